// Package rowlock keeps locks in the rows of a PostgreSQL table. It is the example of
// docs/drivers.md. For PostgreSQL use hasp's own driver, pglock.
package rowlock

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // registers "pgx" with database/sql

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// A free key has a row without a token, so that its fence stays.
const table = `CREATE TABLE IF NOT EXISTS rowlock (
	key     bytea PRIMARY KEY,
	token   text,
	owner   bytea NOT NULL,
	expires timestamptz NOT NULL,
	fence   bigint NOT NULL)`

// Driver keeps locks in the table rowlock of a database.
type Driver struct{ db *sql.DB }

// Open opens a database and makes the table.
func Open(ctx context.Context, url string) (*Driver, error) {
	db, err := sql.Open("pgx", url)
	if err != nil {
		return nil, err
	}
	if _, err := db.ExecContext(ctx, table); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return &Driver{db}, nil
}

// Close closes the database.
func (d *Driver) Close() error { return d.db.Close() }

// Traits says that there are fences and that all hosts share the locks. Everything
// else that a driver may have is missing.
func (d *Driver) Traits() backend.Traits {
	return backend.Traits{Fenced: true, Reach: backend.Network}
}

// The statement locks the row before it looks at it, so that two callers cannot both find
// it free. A new row has the time as its fence. So the fence also grows after a sweep.
const acquire = `INSERT INTO rowlock AS held (key, token, owner, expires, fence)
	VALUES ($1, $2, $3, clock_timestamp() + $4 * interval '1 microsecond',
		(extract(epoch FROM clock_timestamp()) * 1e6)::bigint)
	ON CONFLICT (key) DO UPDATE SET token = excluded.token, owner = excluded.owner,
		expires = excluded.expires, fence = greatest(held.fence + 1, excluded.fence)
	WHERE held.token IS NULL OR held.expires <= clock_timestamp()
	RETURNING fence`

// Acquire makes one attempt.
func (d *Driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	var fence int64
	row := d.db.QueryRowContext(ctx, acquire, []byte(c.Key), c.Token, []byte(c.Owner), micros(c.TTL))
	err := row.Scan(&fence)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return backend.Grant{}, backend.ErrHeld // the row is held, so it was not updated
	case err != nil:
		return backend.Grant{}, err // the outcome is unknown
	case !c.Fenced:
		return backend.Grant{}, nil
	}
	return backend.Grant{Fence: uint64(fence)}, nil
}

// A renewal never makes a term shorter, and never revives a hold that has expired.
const renew = `UPDATE rowlock
	SET expires = greatest(expires, clock_timestamp() + $3 * interval '1 microsecond')
	WHERE key = $1 AND token = $2 AND expires > clock_timestamp()`

// Renew prolongs terms, one after another.
func (d *Driver) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	for i, c := range cs {
		err := d.change(ctx, renew, []byte(c.Key), c.Token, micros(c.TTL))
		done(i, backend.Grant{}, err)
	}
}

const release = `UPDATE rowlock SET token = NULL
	WHERE key = $1 AND token = $2 AND expires > clock_timestamp()`

// Release frees the key. One release in a thousand also sweeps.
func (d *Driver) Release(ctx context.Context, c backend.Claim) error {
	err := d.change(ctx, release, []byte(c.Key), c.Token)
	if rand.N(1000) == 0 {
		_, _ = d.db.ExecContext(ctx, sweep) // if it fails, a later one does its work
	}
	return err
}

// change runs a statement for a hold. If it finds no row, the hold is lost.
func (d *Driver) change(ctx context.Context, statement string, args ...any) error {
	result, err := d.db.ExecContext(ctx, statement, args...)
	if err != nil {
		return err
	}
	n, err := result.RowsAffected()
	if err == nil && n == 0 {
		err = backend.ErrLost
	}
	return err
}

// No fence of a removed row comes again. A new row starts at the clock in microseconds, and the
// clock is ahead of each old fence, because no key is taken a million times a second.
const sweep = `DELETE FROM rowlock WHERE expires < clock_timestamp() - interval '1 hour'`

// micros rounds a term up.
func micros(d time.Duration) int64 { return int64((d + time.Microsecond - 1) / time.Microsecond) }

func init() { hasp.Register("rowlock", opener, "sslmode", "connect_timeout") }

// opener opens rowlock+postgres://user@host/db?sslmode=disable.
func opener(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	if len(c.Nodes) != 1 {
		return nil, fmt.Errorf("%w: rowlock takes one server, not %d", hasp.ErrInvalid, len(c.Nodes))
	}
	params := url.Values{}
	for name, value := range c.Params {
		params.Set(name, value)
	}
	return Open(ctx, c.Nodes[0]+"?"+params.Encode())
}
