package main

import (
	"context"
	"time"

	"github.com/hasplock/hasp/backend"
)

// day is max_ttl of redlock under a leader.
const day = 24 * time.Hour

// leader is a driver that keeps a key. The engine of a Client checks its clock each
// second, which would take too long here.
type leader struct {
	backend.Driver
	w     *World
	claim backend.Claim
}

// ask makes a call to the store, and reports its error.
func (l leader) ask(call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err := call(ctx)
	if err != nil {
		l.w.book.errorf("the leader: %v", err)
	}
	return err
}

// renew renews the claim some times, each after a sixth of a day.
func (l leader) renew(times int) {
	for range times {
		time.Sleep(day / 6)
		_ = l.ask(func(ctx context.Context) (err error) {
			l.Renew(ctx, []backend.Claim{l.claim}, func(_ int, _ backend.Grant, e error) { err = e })
			return err
		})
	}
}

// lead runs a leader that renews for a month or longer, without other callers.
// Then one server is unreachable to it, and another loses its data. Others come
// before the leader's term has ended, and must not get the key.
func lead(w *World) {
	s := w.Store.(*masters)
	d, _ := s.Link(nil, 0)
	defer d.Close()
	l := leader{d, w, backend.Claim{Key: Key(0), Token: "leader", TTL: day / 2, Timeout: time.Second, Fenced: true}}
	if l.ask(func(ctx context.Context) error { _, err := d.Acquire(ctx, l.claim); return err }) != nil {
		return
	}
	l.renew((30 + w.R.IntN(10)) * 6)

	// The leader keeps a bare quorum. Then one of its servers loses its data.
	order := w.R.Perm(len(s.nodes))
	s.links[0].proxies[order[0]].Stall()
	l.renew(4)
	s.nodes[order[1]].Restart(false)
	for range 4 {
		time.Sleep(time.Duration(w.R.IntN(60)) * time.Minute)
		if w.TryLock(Key(0)) {
			w.book.errorf("two holders of %s", Key(0))
		}
	}

	s.links[0].proxies[order[0]].Flow()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = d.Release(ctx, l.claim) // too few servers have a record
	w.book.granted++            // to no Client
}
