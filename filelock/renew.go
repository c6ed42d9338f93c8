package filelock

import (
	"context"
	"slices"
	"sync"

	"github.com/hasplock/hasp/backend"
)

// Renew prolongs the terms of cs. It locks each guard once, for all claims of the stripe. If
// another process has a guard, only the claims of that stripe wait.
func (d *driver) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	if len(cs) == 0 {
		return
	}
	ctx, cancel := withTimeout(ctx, cs[0].Timeout)
	defer cancel()

	byStripe := map[int][]int{} // indices in cs, by stripe
	for i, c := range cs {
		n := stripeOf(c.Key)
		byStripe[n] = append(byStripe[n], i)
	}

	var mu sync.Mutex // so that no two calls of done run at the same time
	answer := func(is []int, g *guard, err error) {
		errs := g.renewAll(ctx, cs, is, err)
		mu.Lock()
		defer mu.Unlock()
		for j, i := range is {
			done(i, backend.Grant{}, d.explain(errs[j]))
		}
	}

	var wg sync.WaitGroup
	defer wg.Wait() // done must not be called after Renew has returned
	for n, is := range byStripe {
		wg.Go(func() {
			g, err := d.lockGuard(ctx, n)
			answer(is, g, err)
		})
	}
}

// renewAll renews the claims of cs whose indices are in is, drops the guard, and returns the
// outcomes. If g is nil, every outcome is err.
func (g *guard) renewAll(ctx context.Context, cs []backend.Claim, is []int, err error) []error {
	if g == nil {
		return slices.Repeat([]error{err}, len(is))
	}
	// Drop the guard here, before done is called, because done may take any time.
	defer g.drop()
	errs := make([]error, len(is))
	for j, i := range is {
		errs[j] = g.renew(ctx, cs[i])
	}
	return errs
}

func (g *guard) renew(ctx context.Context, c backend.Claim) error {
	if ctx.Err() != nil {
		return context.Cause(ctx) // an earlier claim of the stripe took too long
	}

	now := g.d.clock()
	r, err := g.d.load(c.Key, now)
	if err != nil {
		return err
	}
	if r == nil || r.token != c.Token {
		return backend.ErrLost
	}
	if !r.extend(now, c.TTL) {
		return nil // the record lasts long enough, and a renewal never shortens a term
	}
	return g.store(r)
}
