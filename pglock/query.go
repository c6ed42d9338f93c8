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

// errNoRow says that a statement returned no row.
var errNoRow = errors.New("pglock: no row")

// Codes of PostgreSQL's errors.
const (
	serializationFailure = "40001"
	deadlockDetected     = "40P01"
	lockNotAvailable     = "55P03"
	undefinedTable       = "42P01"
	readOnlyTransaction  = "25006"
	duplicateObject      = "42P07"
	uniqueViolation      = "23505"
	insufficientRights   = "42501"
	tooManyConnections   = "53300"
)

// code returns the code of a PostgreSQL error, or "".
func code(err error) string {
	var pe *pgconn.PgError
	if errors.As(err, &pe) {
		return pe.Code
	}
	return ""
}

func isLockTimeout(err error) bool { return code(err) == lockNotAvailable }

// isConflict reports whether PostgreSQL has undone a statement because of another one.
func isConflict(err error) bool {
	c := code(err)
	return c == serializationFailure || c == deadlockDetected
}

// maxConflicts bounds how often a statement is repeated. In each conflict another statement was
// carried out, so many in a row are unlikely.
const maxConflicts = 10

// query is queryUnbounded for every statement except a renewal: it waits for a slot of
// d.others, so that renewals always find a connection.
func (d *driver) query(ctx context.Context, sql string, scan func(pgx.Rows) error, args ...any) error {
	if err := takeSlot(ctx, d.others); err != nil {
		return err
	}
	defer func() { <-d.others }()
	return d.queryUnbounded(ctx, sql, scan, args...)
}

// queryUnbounded runs a statement and calls scan for each row, without waiting for a slot.
// Without a row the error is errNoRow.
//
// It repeats a statement that has certainly changed nothing: PostgreSQL has undone it because of a
// conflict, or the table is missing. Conflicts are deadlocks and, if the default isolation level is
// above read committed, serialization failures. After any other error the statement is not
// repeated, because it may have been carried out.
func (d *driver) queryUnbounded(ctx context.Context, sql string, scan func(pgx.Rows) error, args ...any) error {
	for conflicts, made := 0, false; ; {
		err := d.queryOnce(ctx, sql, scan, args)
		switch {
		case isConflict(err) && conflicts < maxConflicts && ctx.Err() == nil:
			conflicts++
		case code(err) == undefinedTable && !made && ctx.Err() == nil:
			// Make the table again: the database has lost it, or another database answers now.
			made = true
			if d.makeTable(ctx) != nil {
				return err
			}
		default:
			return err
		}
	}
}

// exec is query, but ignores the values of the rows.
func (d *driver) exec(ctx context.Context, sql string, args ...any) error {
	return d.query(ctx, sql, func(pgx.Rows) error { return nil }, args...)
}

func (d *driver) queryOnce(ctx context.Context, sql string, scan func(pgx.Rows) error, args []any) (err error) {
	c, err := d.acquire(ctx)
	if err != nil {
		return err
	}
	sent := time.Now()
	defer func() {
		d.health.note(ctx, c.Conn(), sent, err)
		release(c)
	}()

	if n := len(args) - 1; n >= 0 {
		if most, ok := args[n].(lockWait); ok {
			args = append(slices.Clip(args[:n]), most.timeout(ctx)) // a copy, because a retry needs args
		}
	}
	if _, doubt := d.health.last(); d.bouncer.Load() || time.Since(doubt) < time.Minute {
		// Do not prepare the statement, which takes a second round trip: over a slow link, each new
		// connection would fail with its first statement.
		args = append([]any{pgx.QueryExecModeExec}, args...)
	}
	rows, err := c.Conn().Query(ctx, sql, args...)
	if err != nil {
		return d.failed(c.Conn(), err)
	}
	defer rows.Close()
	n := 0
	for ; rows.Next(); n++ {
		if err := scan(rows); err != nil {
			return err
		}
	}
	rows.Close() // the statement has ended, and rows.Err is its outcome
	switch err := rows.Err(); {
	case err != nil:
		return d.failed(c.Conn(), err)
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

// The method failed returns the error of a statement.
func (d *driver) failed(c *pgx.Conn, err error) error {
	if code(err) == readOnlyTransaction {
		// Connect again, because the server may be a former primary.
		hangUp(c)
		d.listener.leave()
		return fmt.Errorf("%w (%s)", err, hint(err))
	}
	return oneLine(err)
}

// lockWait is how long a statement may wait for locks of PostgreSQL. It is the statement's last
// argument. When the statement gets a connection, lockWait is cut at the caller's deadline. Without
// this cut, the statement could be carried out long after the caller has left.
type lockWait time.Duration

// timeout returns the value of lock_timeout.
func (w lockWait) timeout(ctx context.Context) string {
	most := time.Duration(w)
	if end, ok := ctx.Deadline(); ok {
		most = min(most, time.Until(end))
	}
	return strconv.FormatInt(max(most.Milliseconds(), 1), 10)
}
