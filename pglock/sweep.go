package pglock

import (
	"context"
	"crypto/rand"
	mathrand "math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/hasplock/hasp/backend"
)

// Times and numbers of the sweep.
const (
	sweepAge   = time.Hour   // rows unused for so long are deleted; see sweep.sql
	sweepEvery = time.Minute // of all clients together, at most
	sweepOneIn = 1000        // grants, on average, for one attempt to sweep
	sweepBatch = 1000        // rows in one statement; see sweep.sql
	sweepCall  = 10 * time.Second
)

// sweepSeldom is called after each grant. After some grants, at random, it deletes the rows of
// unused keys. So programs that live for a second also do their part.
func (d *driver) sweepSeldom() {
	now, next := time.Now(), d.nextSweep.Load()
	if mathrand.N(sweepOneIn) != 0 || now.UnixNano() < next || d.closing.Err() != nil {
		return
	}
	if d.nextSweep.CompareAndSwap(next, now.Add(sweepEvery).UnixNano()) {
		d.wg.Go(func() { d.sweepInTurn(d.closing) })
	}
}

// sweepInTurn sweeps unless a client has swept within the last minute. It takes a lock with a term
// of a minute on the empty key, which no caller can use.
func (d *driver) sweepInTurn(ctx context.Context) {
	turn := backend.Claim{Token: rand.Text(), TTL: sweepEvery, Timeout: sweepCall}
	within, cancel := context.WithTimeout(ctx, sweepCall)
	defer cancel()
	if _, err := d.Acquire(within, turn); err == nil {
		_ = d.sweepAll(ctx, sweepAge) // a later sweep deletes what this one has not
	}
}

// sweepAll deletes the rows of all keys that were not used for age.
func (d *driver) sweepAll(ctx context.Context, age time.Duration) error {
	for n := int64(sweepBatch); n == sweepBatch; {
		within, cancel := context.WithTimeout(ctx, sweepCall)
		err := d.query(within, d.sql.sweep, func(rows pgx.Rows) error {
			var mode *string
			return rows.Scan(&n, &mode)
		}, micros(age))
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}
