package pglock

import (
	"context"
	"crypto/rand"
	mathrand "math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/hasplock/hasp/backend"
)

const (
	sweepAge   = time.Hour        // how long a row must be unused before a sweep deletes it
	sweepEvery = time.Minute      // the shortest time between two sweeps, by any clients
	sweepCall  = 10 * time.Second // the timeout of each statement of a sweep
)

// sweepSeldom is called after each grant. After one grant of 1,000, chosen at random, it starts a
// sweep, which deletes the rows of unused keys. This driver starts at most one a minute. The choice
// is random so that even programs that live only for a second sweep sometimes.
func (d *driver) sweepSeldom() {
	now := time.Now()
	next := d.nextSweep.Load()
	if mathrand.N(d.sweepOneIn) != 0 || now.UnixNano() < next {
		return
	}
	// If another grant has just moved nextSweep, that grant starts the sweep.
	if d.nextSweep.CompareAndSwap(next, now.Add(sweepEvery).UnixNano()) {
		d.spawn(d.sweepInTurn)
	}
}

// sweepInTurn sweeps unless any client has begun a sweep within the last minute. To know that, it
// takes the lock of the empty key, which no caller can use, for a minute, and never releases it.
func (d *driver) sweepInTurn() {
	turn := backend.Claim{Token: rand.Text(), TTL: sweepEvery, Timeout: sweepCall}
	within, cancel := context.WithTimeout(d.closing, sweepCall)
	defer cancel()
	if _, err := d.Acquire(within, turn); err == nil {
		_ = d.sweepAll(d.closing, sweepAge) // a later sweep deletes the rows that this sweep leaves
	}
}

// sweepAll deletes the rows of all keys that were unused for longer than the duration age. Each
// statement begins at the key where the statement before has ended.
func (d *driver) sweepAll(ctx context.Context, age time.Duration) error {
	next := new("") // after the last row, the statement sets next to nil
	for next != nil {
		within, cancel := context.WithTimeout(ctx, sweepCall)
		var deleted int64 // is not used
		scan := func(_ int, rows pgx.Rows) error { return rows.Scan(&next, &deleted) }
		_, err := d.query(within, "sweep", scan, micros(age), *next)
		cancel()
		if err != nil {
			return err
		}
	}

	return nil
}
