package pglock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hasplock/hasp"
)

// errNoRow says that a statement returned no row.
var errNoRow = errors.New("pglock: no row")

// maxConflicts bounds how often a statement is repeated after conflicts. In each conflict another
// statement has succeeded, so a statement is unlikely to have many conflicts in a row.
const maxConflicts = 10

// renewalConns is how many connections a Client uses for renewals. One statement renews up to 256
// leases.
const renewalConns = 2

// database is the table of the locks, with the connections to it.
type database struct {
	statements *connections // all but renewals: the pool that was passed, or one of our own
	renewals   *connections // renewals only, so that they never wait behind the program's own work
	own        bool         // true if the pool of statements is our own
	bouncer    atomic.Bool  // true if a pooler shares sessions, so that nothing may be left in them

	sql     *statements
	channel string // the first part of the names of the channels that releases send to
}

// use has db run its statements on pool, and renewals on connections with the settings of pool.
func (db *database) use(pool *pgxpool.Pool) error {
	cfg := pool.Config()
	cfg.MaxConns = renewalConns
	cfg.MinConns = 0
	cfg.MinIdleConns = 0
	boundConnect(cfg.ConnConfig)
	renewals, err := pgxpool.NewWithConfig(context.Background(), cfg) // makes no connection yet
	if err != nil {
		if db.own {
			pool.Close()
		}
		return err
	}

	db.statements = newConnections(pool)
	db.renewals = newConnections(renewals)
	return nil
}

// boundConnect gives cfg a timeout for each host, because a caller's pool may have none.
func boundConnect(cfg *pgx.ConnConfig) {
	cfg.ConnectTimeout = cmp.Or(cfg.ConnectTimeout, hasp.DefaultTimeout)
}

// The method close closes the connections that the driver has opened.
func (db *database) close() {
	db.renewals.Close()
	if db.own {
		db.statements.Close()
	}
}

// connect opens a connection beside the pools, with the settings of the pool of statements.
func (db *database) connect(ctx context.Context) (*pgx.Conn, error) {
	cfg := db.statements.Config()
	boundConnect(cfg.ConnConfig)
	if cfg.BeforeConnect != nil {
		if err := cfg.BeforeConnect(ctx, cfg.ConnConfig); err != nil {
			return nil, err
		}
	}
	return pgx.ConnectConfig(ctx, cfg.ConnConfig)
}

// setUp finds or creates the table that o names, and prepares the statements for it.
func (db *database) setUp(ctx context.Context, o Options) error {
	c, err := db.statements.Acquire(ctx)
	if err != nil {
		return diagnose(err)
	}
	defer c.Release()
	if err := db.notice(ctx, c.Conn(), false); err != nil {
		return diagnose(err)
	}

	schema, err := tableSchema(ctx, c.Conn(), o)
	if err != nil {
		return err
	}

	db.sql = newStatements(schema, o.Table)
	h := fnv.New64a()
	h.Write([]byte(schema + "\x00" + o.Table))
	db.channel = fmt.Sprintf("hasp_%x", h.Sum64())
	return nil
}

// notice finds out whether a connection pooler is between the driver and the server. If there is a
// pooler, the answer comes from another server process than the one that was named when the
// connection began. If there is no pooler and own is true, notice sets the session's isolation
// level to read committed, which has the fewest conflicts, lock_timeout to 0, and plan_cache_mode so
// that each statement is planned once. Without the 0, a wait for a table lock could end with the
// same error as a wait for a row (see blocked).
func (db *database) notice(ctx context.Context, c *pgx.Conn, own bool) error {
	const sql = `SELECT pg_backend_pid() <> $1::bigint,
		CASE WHEN pg_backend_pid() = $1::bigint AND $2::bool
			THEN set_config('default_transaction_isolation', 'read committed', false) ||
				set_config('lock_timeout', '0', false) ||
				set_config('plan_cache_mode', 'force_generic_plan', false) END`
	var pooled bool
	pid := int64(c.PgConn().PID())
	err := c.QueryRow(ctx, sql, pgx.QueryExecModeExec, pid, own).Scan(&pooled, nil)
	if err == nil {
		db.bouncer.Store(pooled)
		lastAnswer(c)
	}

	return err
}

// ending is what the statement release ends: a hold, all holds, or the place of a waiter.
type ending struct {
	key    string
	token  *string // nil for all holds
	keep   *int64  // for how many µs the key stays taken without a holder; nil if it becomes free
	waiter int64   // the number of a waiter that leaves the line of the key, or 0
}

// The method end ends what e says, and wakes the next waiter. It reports whether a hold has ended. It
// waits for the lock of the row for the duration most.
func (db *database) end(ctx context.Context, e ending, most time.Duration) (ended bool, err error) {
	err = db.query(ctx, db.sql.release, func(_ int, rows pgx.Rows) error {
		return rows.Scan(&ended, nil, nil)
	}, []byte(e.key), e.token, e.keep, e.waiter, db.channel, lockWait(most))
	if errors.Is(err, errNoRow) {
		return false, nil
	}
	return ended, err
}

// scanRow reads the present row of rows. The first row has the number 0.
type scanRow func(row int, rows pgx.Rows) error

// query does what queryOn does, on a connection for statements.
func (db *database) query(ctx context.Context, sql string, scan scanRow, args ...any) error {
	return db.queryOn(ctx, db.statements, sql, scan, args...)
}

// queryOn runs a statement and calls the function scan for each row. If there is no row, the error
// is errNoRow. Each attempt counts its rows from zero, because a conflict at the commit undoes an
// attempt whose rows have been read.
//
// It repeats a statement that has certainly changed nothing, because PostgreSQL has undone it after
// a conflict, or because the table is missing. Conflicts are deadlocks and, if the default
// isolation level is above read committed, serialization failures. After any other error the
// statement is not repeated, because it may have been carried out.
func (db *database) queryOn(
	ctx context.Context, on *connections, sql string, scan scanRow, args ...any,
) error {
	conflicts := 0
	made := false
	for {
		err := db.queryOnce(ctx, on, sql, scan, args)
		switch {
		case isConflict(err) && conflicts < maxConflicts && ctx.Err() == nil:
			conflicts++
		case code(err) == undefinedTable && !made && ctx.Err() == nil:
			// Make the table again. It was dropped, or another database answers now.
			made = true
			if db.makeTable(ctx) != nil {
				return err
			}
		default:
			return err
		}
	}
}

// makeTable creates the table again after it has vanished.
func (db *database) makeTable(ctx context.Context) error {
	err := db.queryOnce(ctx, db.statements, db.sql.table, nil, nil)
	if errors.Is(err, errNoRow) || isMade(err) {
		return nil
	}
	return err
}

// queryOnce does what queryOn does, but repeats nothing.
func (db *database) queryOnce(
	ctx context.Context, on *connections, sql string, scan scanRow, args []any,
) (err error) {
	c, err := on.acquire(ctx)
	if err != nil {
		return err
	}

	sent := time.Now()
	defer func() {
		on.health.note(ctx, c.Conn(), sent, err)
		release(c)
	}()

	args = slices.Clone(args) // because a retry needs args
	for i, arg := range args {
		if most, ok := arg.(lockWait); ok {
			args[i] = most.timeout(ctx)
		}
	}

	if db.bouncer.Load() || on.health.doubted(time.Minute) {
		// Do not prepare the statement, because that takes a second round trip. Over a slow link,
		// the first statement on each new connection would fail.
		args = append([]any{pgx.QueryExecModeExec}, args...)
	}

	rows, err := c.Conn().Query(ctx, sql, args...)
	if err != nil {
		return failure(c.Conn(), err)
	}
	defer rows.Close()

	n := 0
	for ; rows.Next(); n++ {
		if err := scan(n, rows); err != nil {
			return err
		}
	}

	rows.Close() // after this, rows.Err returns the outcome of the statement
	switch err := rows.Err(); {
	case err != nil:
		return failure(c.Conn(), err)
	case n == 0:
		return errNoRow
	}

	return nil
}

// hangUp tells the server that c ends, and closes c without waiting for an answer.
func hangUp(c *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	c.Close(ctx)
}

// failure returns err, the error of a statement, in one line.
func failure(c *pgx.Conn, err error) error {
	if code(err) == readOnlyTransaction {
		// End the connection to the server, because it may be a former primary.
		hangUp(c)
		return fmt.Errorf("%w (%s)", err, hint(err))
	}
	return oneLine(err)
}

// lockWait is an argument that says how long a statement may wait for locks of PostgreSQL. When the
// statement has a connection, the wait is shortened to end at the caller's deadline. Otherwise the
// server could carry out the statement long after the caller has left.
type lockWait time.Duration

// The method timeout returns the value for lock_timeout.
func (w lockWait) timeout(ctx context.Context) string {
	most := time.Duration(w)
	if end, ok := ctx.Deadline(); ok {
		most = min(most, time.Until(end))
	}
	return strconv.FormatInt(max(most.Milliseconds(), 1), 10)
}
