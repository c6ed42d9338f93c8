package pglock

import (
	"context"
	"crypto/rand"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/hasplock/hasp/backend"
)

const (
	sweepAge   = time.Hour   // how long a row must be unused before a sweep deletes it
	sweepEvery = time.Minute // the shortest time between two sweeps, by any clients
	sweepCall  = 10 * time.Second

	// One grant of sweepOneIn, on average, starts an attempt to sweep. The choice is random, so that
	// even programs that live only for a second sweep sometimes.
	sweepOneIn = 1000
)

// sweepInTurn deletes the rows of unused keys, unless a client has swept within the last minute. For
// that, it takes the empty key, which no caller can use, for a term of a minute.
func sweepInTurn(ctx context.Context, d *driver) {
	turn := backend.Claim{Token: rand.Text(), TTL: sweepEvery, Timeout: sweepCall}
	within, cancel := context.WithTimeout(ctx, sweepCall)
	defer cancel()
	if _, err := d.Acquire(within, turn); err == nil {
		_ = sweepAll(ctx, d.database, sweepAge) // if it fails, a later sweep deletes the rows
	}
}

// sweepAll deletes the rows of all keys that were unused for longer than the duration age. Each
// statement begins at the key where the statement before has ended.
func sweepAll(ctx context.Context, db *database, age time.Duration) error {
	for next := new(""); next != nil; {
		within, cancel := context.WithTimeout(ctx, sweepCall)
		err := db.query(within, db.sql.sweep, func(_ int, rows pgx.Rows) error {
			return rows.Scan(&next)
		}, micros(age), *next)
		cancel()
		if err != nil {
			return err
		}
	}

	return nil
}
