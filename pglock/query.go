package pglock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// These are SQLSTATE codes of PostgreSQL's errors.
const (
	serializationFailure = "40001"
	deadlockDetected     = "40P01"
	lockNotAvailable     = "55P03"
	undefinedTable       = "42P01"
	readOnlyTransaction  = "25006"
	duplicateTable       = "42P07"
	duplicateObject      = "42710" // here the row type of a table
	uniqueViolation      = "23505"
	insufficientRights   = "42501"
	tooManyConnections   = "53300"
)

// The function code returns the SQLSTATE code of a PostgreSQL error, or "".
func code(err error) string {
	var pe *pgconn.PgError
	if errors.As(err, &pe) {
		return pe.Code
	}
	return ""
}

// isMade reports whether a statement that creates the table has failed because another client has
// just created the table.
func isMade(err error) bool {
	c := code(err)
	return c == duplicateTable || c == duplicateObject || c == uniqueViolation
}

// isConflict reports whether PostgreSQL has undone a statement because of another statement.
func isConflict(err error) bool {
	c := code(err)
	return c == serializationFailure || c == deadlockDetected
}

// maxConflicts bounds how often a statement is repeated after conflicts. In each conflict another
// statement has succeeded, so a statement is unlikely to have many conflicts in a row.
const maxConflicts = 10

// scanner reads a row of an answer. Rows count from 0.
type scanner func(row int, rows pgx.Rows) error

// ignore is the scanner of a statement whose rows mean nothing.
func ignore(int, pgx.Rows) error { return nil }

// query does what queryOn does, on a connection for statements.
func (d *driver) query(
	ctx context.Context, statement string, scan scanner, args ...any,
) (n int, err error) {
	return d.queryOn(ctx, d.statements, statement, scan, args...)
}

// queryOn runs the statement of a file in the directory sql, and calls scan for each row. It
// returns the number of the rows.
//
// queryOn repeats a statement that has certainly changed nothing, because PostgreSQL has undone it
// after a conflict, or because the table is missing. Conflicts are deadlocks and, if the default
// isolation level is above read committed, serialization failures. After any other error the
// statement is not repeated, because it may have been carried out. A repeated statement counts its
// rows from zero again, because a conflict at the commit also undoes the rows that scan has read.
func (d *driver) queryOn(
	ctx context.Context, on *connections, statement string, scan scanner, args ...any,
) (int, error) {
	conflicts := 0
	tableMade := false
	for {
		n, err := d.queryOnce(ctx, on, d.sql[statement], scan, args)
		switch {
		case isConflict(err) && conflicts < maxConflicts && ctx.Err() == nil:
			conflicts++
		case code(err) == undefinedTable && !tableMade && ctx.Err() == nil:
			// Make the table again. It was dropped, or another database answers now.
			tableMade = true
			if d.makeTable(ctx) != nil {
				return 0, err // it says that the table is missing
			}
		default:
			return n, err
		}
	}
}

// queryApart does what queryOn does, on a connection outside the pool of statements. If the server
// has no connection left for that, it uses the pool of statements after all.
func (d *driver) queryApart(
	ctx context.Context, statement string, scan scanner, args ...any,
) (n int, err error) {
	n, err = d.queryOn(ctx, d.renewals, statement, scan, args...)
	if code(err) == tooManyConnections {
		// Nothing was sent. The server has no connection left, but the other pool may have one.
		return d.query(ctx, statement, scan, args...)
	}
	return n, err
}

// finish runs a statement that ends a hold or a wait, and returns the number of the rows. If all
// connections of the pool are in use, by the program itself or by attempts that wait for the lock
// of a row, finish uses a connection outside the pool, so that no release waits for them. Each such
// statement has the same first arguments: the key, the channel, and how long to wait for the lock
// of the row.
func (d *driver) finish(
	ctx context.Context, statement, key string, lockTimeout time.Duration, args ...any,
) (n int, err error) {
	run := d.query
	if s := d.statements.Stat(); s.AcquiredConns() == s.MaxConns() {
		run = d.queryApart
	}
	args = append([]any{[]byte(key), d.channel, lockWait(lockTimeout)}, args...)
	return run(ctx, statement, ignore, args...)
}

// queryOnce sends a statement once. It returns the number of the rows. It records whether an answer
// came (see health).
func (d *driver) queryOnce(
	ctx context.Context, on *connections, sql string, scan scanner, args []any,
) (n int, err error) {
	c, err := on.acquire(ctx)
	if err != nil {
		return 0, err
	}
	sent := time.Now()
	defer func() {
		on.health.note(ctx, c.Conn(), sent, err)
		release(c)
	}()

	args = slices.Clone(args) // because a retry needs the lockWait, which is replaced here
	for i, arg := range args {
		if wait, ok := arg.(lockWait); ok {
			args[i] = wait.timeout(ctx)
		}
	}

	_, doubt := on.health.last()
	if d.bouncer.Load() || time.Since(doubt) < time.Minute {
		// Do not prepare the statement. A pooler may send it to another session than the one in
		// which it was prepared. And preparing takes a second round trip. So after a timeout, which
		// may show that the link is slow, the first statement on each new connection could fail.
		args = append([]any{pgx.QueryExecModeExec}, args...)
	}

	rows, err := c.Conn().Query(ctx, sql, args...)
	if err != nil {
		return 0, d.statementError(c.Conn(), err)
	}
	defer rows.Close()

	for ; rows.Next(); n++ {
		if err := scan(n, rows); err != nil {
			return n, err
		}
	}

	rows.Close() // after this, rows.Err returns the outcome of the statement
	return n, d.statementError(c.Conn(), rows.Err())
}

// hangUp tells the server that c ends, and closes c without waiting for an answer.
func hangUp(c *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	c.Close(ctx)
}

// statementError returns err, the error of a statement on c, in one line. If err is nil, it returns
// nil. If the server can only read, statementError also ends the connections to it.
func (d *driver) statementError(c *pgx.Conn, err error) error {
	if code(err) == readOnlyTransaction {
		// The server may be a former primary. Once c and the listener's session have ended, new
		// connections find the new primary.
		hangUp(c)
		d.listener.endSession()
		return fmt.Errorf("%w (%s)", err, hint(err))
	}

	return oneLine(err)
}

// lockWait is an argument that says how long a statement may wait for locks of PostgreSQL. When the
// statement has a connection, queryOnce replaces the lockWait by the result of the method timeout.
type lockWait time.Duration

// The method timeout returns the value for lock_timeout, in milliseconds. It is shortened so that
// the wait ends at the deadline of ctx. Otherwise the server could carry out the statement long
// after the caller has left.
func (w lockWait) timeout(ctx context.Context) string {
	timeout := time.Duration(w)
	if end, ok := ctx.Deadline(); ok {
		timeout = min(timeout, time.Until(end))
	}
	return strconv.FormatInt(max(timeout.Milliseconds(), 1), 10) // 0 would mean no limit
}
