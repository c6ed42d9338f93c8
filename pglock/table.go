package pglock

import (
	"context"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// minVersion is the oldest PostgreSQL that pglock accepts, as a server_version_num.
const minVersion = 130000

// columns lists the columns that the table must have, with their types.
var columns = []string{
	"ends timestamp with time zone[]",
	"expires timestamp with time zone",
	"fence bigint",
	"fenced boolean",
	"heir bigint",
	"heir_until timestamp with time zone",
	"key bytea",
	"owner bytea",
	"readers jsonb",
	"since timestamp with time zone",
	"token text",
	"waiters bigint[]",
}

// tableInfo is the database's answer about the table and its user.
type tableInfo struct {
	version  int
	user     string
	database string
	current  string   // the first schema of the search path; empty if there is none
	schema   string   // the schema of the table; empty if there is no table
	columns  []string // the columns of the table
	primary  bool     // the column key is the primary key
	rights   bool     // this user may use the table
}

// find is the statement of the method find. Its parameter is the table's name in quotes. It returns
// one row even if there is no table.
const find = `SELECT current_setting('server_version_num')::int, current_user::text, current_database()::text,
	coalesce(current_schema(), '')::text, coalesce(n.nspname, '')::text,
	ARRAY(SELECT a.attname || ' ' || format_type(a.atttypid, NULL) FROM pg_attribute a
		WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attname COLLATE "C"),
	EXISTS (SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ALL (i.indkey)
		WHERE i.indrelid = c.oid AND i.indisprimary AND a.attname = 'key'),
	coalesce(has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT') AND
		has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE'), false)
FROM (SELECT to_regclass($1) AS oid) t
	LEFT JOIN pg_class c ON c.oid = t.oid LEFT JOIN pg_namespace n ON n.oid = c.relnamespace`

// check returns ErrInvalid if a name is impossible, and sets the default of Table.
func (o *Options) check() error {
	for what, name := range map[string]string{"schema": o.Schema, "table": o.Table} {
		if len(name) > 63 || strings.Contains(name, "\x00") {
			return invalid("%s %q: PostgreSQL takes names of up to 63 bytes", what, name)
		}
	}

	if o.Table == "" {
		o.Table = defaultTable
	}
	return nil
}

// setUp finds or creates the table, and prepares the statements for it. After an error, the driver
// is closed.
func (d *driver) setUp(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			d.Close()
		}
	}()

	c, err := d.statements.Acquire(ctx)
	if err != nil {
		return diagnose(err)
	}
	defer c.Release()
	// The argument own is false, because the set-up needs no parameters of the session.
	if err := d.notice(ctx, c.Conn(), false); err != nil {
		return diagnose(err)
	}

	f, err := d.find(ctx, c.Conn())
	if err != nil {
		return err
	}
	if f.schema == "" { // there is no table
		if err := d.create(ctx, c.Conn(), f); err != nil {
			return err
		}
		f, err = d.find(ctx, c.Conn())
		if err != nil {
			return err
		}
	}

	if err := f.check(d.options.Table); err != nil {
		return err
	}
	d.table = tableName(f.schema, d.options.Table)
	d.sql = newStatements(d.table)
	// The channel's name has a hash of the table's name, because it may have only 63 bytes.
	h := fnv.New64a()
	h.Write([]byte(f.schema + "\x00" + d.options.Table))
	d.channel = fmt.Sprintf("hasp_%x", h.Sum64())
	return nil
}

// The method find looks for the table. If there is none, the result has no schema. If the server is
// too old or the user has too few rights, the error says what to do.
func (d *driver) find(ctx context.Context, c *pgx.Conn) (f tableInfo, err error) {
	name := tableName(d.options.Schema, d.options.Table)
	err = c.QueryRow(ctx, find, pgx.QueryExecModeExec, name).Scan(
		&f.version, &f.user, &f.database, &f.current, &f.schema, &f.columns, &f.primary, &f.rights)
	// If the query has failed, version is 0.
	if f.version > 0 && f.version < minVersion {
		major, minor := f.version/10000, f.version%10000
		return f, invalid("this server is PostgreSQL %d.%d: pglock needs version 13 or later", major, minor)
	}
	if code(err) == insufficientRights {
		// The table may exist, but PostgreSQL does not say so if the user may not use the schema.
		return f, noRights(err, c.Config().User, d.options.Schema, d.options.Table)
	}
	return f, diagnose(err)
}

// noRights returns the error of a user who may not create the table. The error has all statements
// that someone else may have to run.
func noRights(err error, user, schema, table string) error {
	t := tableName(schema, table)
	ddl := strings.Join(strings.Fields(newStatements(t)["create"]), " ")
	s := pgx.Identifier{schema}.Sanitize()
	u := pgx.Identifier{user}.Sanitize()
	return fmt.Errorf("user %s may not create the table of the locks in schema %s; have someone run: "+
		"%s; GRANT USAGE ON SCHEMA %s TO %s; GRANT SELECT, INSERT, UPDATE, DELETE ON %s TO %s (%w)",
		user, schema, ddl, s, u, t, u, err)
}

// The method create creates the table, unless another client has just done so. Without the option
// Schema, the table's schema is the first one of the search path, which f has.
func (d *driver) create(ctx context.Context, c *pgx.Conn, f tableInfo) error {
	schema := d.options.Schema
	if schema == "" {
		schema = f.current
	}
	if schema == "" {
		return invalid("the search path of user %s has no schema: name one with the parameter schema", f.user)
	}

	ddl := newStatements(tableName(schema, d.options.Table))["create"]
	_, err := c.Exec(ctx, ddl, pgx.QueryExecModeExec)
	if isMade(err) {
		return nil
	}
	switch code(err) {
	case insufficientRights:
		return noRights(err, f.user, schema, d.options.Table)
	case "3F000":
		return invalid("there is no schema %q in database %s: create it, or check the parameter schema",
			schema, f.database)
	}

	return diagnose(err)
}

// makeTable creates the table again after it has vanished, unless another client has just done so.
func (d *driver) makeTable(ctx context.Context) error {
	_, err := d.queryOnce(ctx, d.statements, d.sql["create"], ignore, nil)
	if isMade(err) {
		return nil
	}
	return err
}

// check returns an error if the table is not for hasp's locks, or if the user may not use it.
func (f tableInfo) check(table string) error {
	name := tableName(f.schema, table)
	switch {
	case f.schema == "":
		return fmt.Errorf("the table %q vanished after its creation: try again", table)
	case slices.Contains(f.columns, "writer_until timestamp with time zone"):
		return invalid("the table %s is of an older hasp: stop its clients, and run: DROP TABLE %s", name, name)
	case !slices.Equal(f.columns, columns) || !f.primary:
		return invalid("the table %s is not a table of hasp's locks: name another one with the parameter table",
			name)
	case !f.rights:
		return fmt.Errorf("user %s may not use the table %s; have its owner run: "+
			"GRANT SELECT, INSERT, UPDATE, DELETE ON %s TO %s",
			f.user, name, name, pgx.Identifier{f.user}.Sanitize())
	}

	return nil
}

// notice finds out whether a connection pooler is between the driver and the server, and records
// that in d.bouncer. If there is a pooler, the answer comes from another server process than the
// one that was named when the connection began. If there is no pooler, and own says that the
// connection belongs to the driver's own pool, notice sets three parameters of the session:
//   - the isolation level to read committed, which has the fewest conflicts;
//   - lock_timeout to 0, because otherwise a wait for a table lock could end with the same error as
//     a wait for a row (see blocked);
//   - plan_cache_mode so that each statement is planned once.
func (d *driver) notice(ctx context.Context, c *pgx.Conn, own bool) error {
	const sql = `SELECT pg_backend_pid() <> $1::bigint, CASE WHEN pg_backend_pid() = $1::bigint AND $2::bool
		THEN set_config('default_transaction_isolation', 'read committed', false) || set_config('lock_timeout', '0', false) ||
			set_config('plan_cache_mode', 'force_generic_plan', false) END`
	var pooled bool
	var unused *string // the column in which the statement sets the parameters
	err := c.QueryRow(ctx, sql, pgx.QueryExecModeExec, int64(c.PgConn().PID()), own).Scan(&pooled, &unused)
	if err == nil {
		d.bouncer.Store(pooled)
		if pooled {
			d.listener.setDeaf(true) // LISTEN does not work through a pooler
		}
		lastAnswer(c) // this first call records the time
	}

	return err
}
