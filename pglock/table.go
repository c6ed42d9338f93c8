package pglock

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/hasplock/hasp/backend"
)

// minVersion is the oldest PostgreSQL that pglock accepts, as a server_version_num.
const minVersion = 130000

// columns lists the columns that the table must have, with their types.
var columns = []string{
	"ends timestamp with time zone[]", "expires timestamp with time zone", "fence bigint",
	"fenced boolean", "heir bigint", "heir_until timestamp with time zone", "key bytea",
	"owner bytea", "readers jsonb", "since timestamp with time zone", "token text",
	"waiters bigint[]",
}

// The type found is the database's answer about the table.
type found struct {
	version  int
	user     string
	database string
	current  string   // the first schema of the search path; empty if there is none
	schema   string   // the schema of the table; empty if there is no table
	columns  []string // the columns of the table
	primary  bool     // the column key is the primary key
	rights   bool     // this user may use the table
}

const find = `SELECT current_setting('server_version_num')::int,
	current_user::text, current_database()::text,
	coalesce(current_schema(), '')::text, coalesce(n.nspname, '')::text,
	ARRAY(SELECT a.attname || ' ' || format_type(a.atttypid, NULL) FROM pg_attribute a
		WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
		ORDER BY a.attname COLLATE "C"),
	EXISTS (SELECT FROM pg_index i
		JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ALL (i.indkey)
		WHERE i.indrelid = c.oid AND i.indisprimary AND a.attname = 'key'),
	coalesce(has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT') AND
		has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE'), false)
FROM (SELECT to_regclass($1) AS oid) t
	LEFT JOIN pg_class c ON c.oid = t.oid LEFT JOIN pg_namespace n ON n.oid = c.relnamespace`

// tableSchema returns the schema of the table that o names. It creates the table if there is none.
func tableSchema(ctx context.Context, c *pgx.Conn, o Options) (string, error) {
	f, err := findTable(ctx, c, o)
	if err == nil && f.schema == "" {
		if err = createTable(ctx, c, o, f); err == nil {
			f, err = findTable(ctx, c, o)
		}
	}
	if err != nil {
		return "", err
	}
	return f.schema, f.check(o.Table)
}

// findTable looks for the table.
func findTable(ctx context.Context, c *pgx.Conn, o Options) (f found, err error) {
	name := pgx.Identifier{o.Table}
	if o.Schema != "" {
		name = pgx.Identifier{o.Schema, o.Table}
	}

	err = c.QueryRow(ctx, find, pgx.QueryExecModeExec, name.Sanitize()).Scan(
		&f.version, &f.user, &f.database, &f.current, &f.schema, &f.columns, &f.primary, &f.rights)
	if f.version > 0 && f.version < minVersion {
		return f, fmt.Errorf("%w: this server is PostgreSQL %d.%d: pglock needs version 13 or later",
			backend.ErrInvalid, f.version/10000, f.version%10000)
	}
	if code(err) == insufficientRights {
		// The table may exist, but PostgreSQL does not say so if the user may not use the schema.
		return f, noRights(err, c.Config().User, o.Schema, o.Table)
	}

	return f, diagnose(err)
}

// noRights returns the error of a user who may not create the table. The error has all statements
// that someone else may have to run.
func noRights(err error, user, schema, table string) error {
	ddl := strings.Join(strings.Fields(newStatements(schema, table).table), " ")
	s := pgx.Identifier{schema}.Sanitize()
	t := pgx.Identifier{schema, table}.Sanitize()
	u := pgx.Identifier{user}.Sanitize()
	return fmt.Errorf("user %s may not create the table of the locks in schema %s; "+
		"have someone run: %s; GRANT USAGE ON SCHEMA %s TO %s; GRANT SELECT, INSERT, UPDATE, DELETE ON %s TO %s (%w)",
		user, schema, ddl, s, u, t, u, err)
}

// createTable creates the table, unless another client has just done so.
func createTable(ctx context.Context, c *pgx.Conn, o Options, f found) error {
	schema := cmp.Or(o.Schema, f.current)
	if schema == "" {
		return fmt.Errorf("%w: the search path of user %s has no schema: "+
			"name one with the parameter schema", backend.ErrInvalid, f.user)
	}

	ddl := newStatements(schema, o.Table).table
	_, err := c.Exec(ctx, ddl, pgx.QueryExecModeExec)
	if isMade(err) {
		return nil
	}

	switch code(err) {
	case insufficientRights:
		return noRights(err, f.user, schema, o.Table)
	case "3F000":
		return fmt.Errorf("%w: there is no schema %q in database %s: "+
			"create it, or check the parameter schema", backend.ErrInvalid, schema, f.database)
	}

	return diagnose(err)
}

// check returns an error if the table is not for hasp's locks, or if the user may not use it.
func (f found) check(table string) error {
	name := pgx.Identifier{f.schema, table}.Sanitize()
	switch {
	case f.schema == "":
		return fmt.Errorf("the table %q vanished after its creation: try again", table)
	case !slices.Equal(f.columns, columns) || !f.primary:
		return fmt.Errorf("%w: the table %s is not a table of hasp's locks, or of an older hasp: "+
			"name another one with the parameter table, or stop all clients and drop it",
			backend.ErrInvalid, name)
	case !f.rights:
		return fmt.Errorf("user %s may not use the table %s; have its owner run: "+
			"GRANT SELECT, INSERT, UPDATE, DELETE ON %s TO %s", f.user, name, name, pgx.Identifier{f.user}.Sanitize())
	}

	return nil
}
