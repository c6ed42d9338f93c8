package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"time"
)

// again measures a caller that locks one key again and again, while a caller of another process
// wants the key now and then.
func (b *bench) again(ctx context.Context, c contestant, s repetition) (figures, error) {
	l, err := b.locker(ctx, c)
	if err != nil {
		return nil, err
	}
	key := "bench:" + rand.Text()[:8]
	if _, err := pairs(ctx, l, term, [][]string{{key}}, s.length/4); err != nil {
		return nil, err
	}
	if _, err := b.order(order{Op: "open", Contestant: c.name, Stores: b.at, Key: key, Waiters: 1, Think: s.think}); err != nil {
		return nil, err
	}
	if _, err := b.order(order{Op: "begin"}); err != nil {
		return nil, err
	}
	made, err := pairs(ctx, l, term, [][]string{{key}}, s.length)
	reports, failed := b.order(order{Op: "stop"})
	if err != nil || failed != nil {
		return nil, cmp.Or(err, failed)
	}

	var waits []time.Duration
	for _, t := range reports[0].Turns {
		for i, got := range t.Got {
			waits = append(waits, time.Duration(got-t.Asked[i]))
		}
	}
	return figures{
		"pairs_per_s":   float64(made.pairs) / made.took.Seconds(),
		"other_p50_ms":  percentile(waits, 50) / 1e3,
		"other_p99_ms":  percentile(waits, 99) / 1e3,
		"others_served": float64(len(waits)),
	}, nil
}

// repeated returns the table of the scenario "again".
func (r *results) repeated(p plan) string {
	return r.table(r.rows(section{again, p.again.String()}, 1),
		r.plain("pairs/s", "pairs_per_s"), r.plain("the other's wait, p50 ms", "other_p50_ms"), r.plain("p99 ms", "other_p99_ms"), r.plain("its holds", "others_served"))
}
