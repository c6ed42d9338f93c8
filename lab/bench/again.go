package main

import (
	"context"
	"crypto/rand"
	"strings"
	"time"
)

// measure measures a caller that locks one key again and again, while a caller of another process
// wants the key now and then. The key lingers only for the first caller.
func (s repetition) measure(ctx context.Context, b *bench, c contestant) (figures, error) {
	l, err := b.locker(ctx, c)
	if err != nil {
		return nil, err
	}
	key := "bench:" + rand.Text()[:8]
	if _, err := pairs(ctx, l, term, [][]string{{key}}, s.length/4); err != nil {
		return nil, err
	}
	var made made
	reports, err := b.compete([]order{{Contestant: strings.TrimSuffix(c.name, "-linger"),
		Stores: b.at[0], Key: key, Waiters: 1, Think: s.think}}, func() (err error) {
		made, err = pairs(ctx, l, term, [][]string{{key}}, s.length)
		return err
	})

	if err != nil {
		return nil, err
	}

	var waits []time.Duration
	for _, t := range reports[0].Visits[0] {
		if t.Got != 0 {
			waits = append(waits, time.Duration(t.Got-t.Asked))
		}
	}

	return figures{
		"pairs/s":                  float64(made.pairs) / made.took.Seconds(),
		"the other's wait, p50 ms": percentile(waits, 50) / 1e3,
		"p99 ms":                   percentile(waits, 99) / 1e3,
		"its holds":                float64(len(waits)),
	}, nil
}

// repeated returns the table of the scenario "again".
func (r *results) repeated(p plan) string {
	return r.table(r.rows(p.sections(again)[0], 1),
		r.metrics("pairs/s", "the other's wait, p50 ms", "p99 ms", "its holds"))
}
