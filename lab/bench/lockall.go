package main

import (
	"context"
	"fmt"
	"time"

	"github.com/hasplock/hasp"
)

// several is a setting of the scenario "lockall", in which a caller needs several keys.
type several struct {
	keys   int
	trip   time.Duration // added to each round trip
	length time.Duration
}

func (s several) String() string { return fmt.Sprintf("%d keys, round trip %v", s.keys, s.trip) }

// measure measures a caller that locks and unlocks several free keys. The caller alternates between
// LockAll and one Lock after another.
func (s several) measure(ctx context.Context, b *bench, c contestant) (figures, error) {
	l, err := c.open(ctx, b.storesOf(s.trip), term)
	if err != nil {
		return nil, err
	}
	defer l.close()
	// one list for each way to lock, because spinlock leaves a key free after a long hold
	keys := make([]string, s.keys)
	apart := make([]string, s.keys)
	for i, k := range distinctKeys(s.keys, keysEach) {
		keys[i] = k[0]
		apart[i] = k[1]
	}

	var all, each []time.Duration
	for end := time.Now().Add(s.length); len(each) < 2 || time.Now().Before(end); {
		began := time.Now()
		leases, err := hasp.LockAll(ctx, l.(haspLocker).Client, keys)
		if err == nil {
			err = leases.Unlock(ctx)
		}
		all = append(all, time.Since(began))

		began = time.Now()
		locked := make([]held, len(keys))
		for i, key := range apart {
			if err == nil {
				locked[i], err = l.lock(ctx, key)
			}
		}
		for _, h := range locked {
			if err == nil {
				err = h.Unlock(ctx)
			}
		}
		each = append(each, time.Since(began))
		if err != nil {
			return nil, err
		}
	}

	// Leave out the first times, which include opening connections and loading scripts.
	return figures{"LockAll ms": percentile(all[1:], 50) / 1e3,
		"one by one ms": percentile(each[1:], 50) / 1e3}, nil
}

// atOnce returns the table of the scenario "lockall".
func (r *results) atOnce(p plan) string {
	var columns []column
	settings := p.sections(lockAll)
	for _, s := range settings {
		columns = append(columns, r.of(s.setting+": LockAll ms", "LockAll ms", s),
			r.of("one by one ms", "one by one ms", s))
	}
	return r.table(r.rows(settings[0], 0), columns)
}
