package filelock

import (
	"context"
	"sync"

	"github.com/hasplock/hasp/backend"
)

// Renew prolongs terms, with each guard taken once for all claims that need
// it. A guard that is not free keeps only its own claims waiting.
func (d *Driver) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	if len(cs) == 0 {
		return
	}
	ctx, cancel := bound(ctx, cs[0].Timeout)
	defer cancel()
	byStripe := map[int][]int{}
	for i, c := range cs {
		n := stripeOf(c.Key)
		byStripe[n] = append(byStripe[n], i)
	}
	var mu sync.Mutex // one call of done at a time
	answer := func(is []int, g *guard, err error) {
		errs := make([]error, len(is))
		for j, i := range is {
			if errs[j] = err; err == nil {
				errs[j] = g.renew(ctx, cs[i])
			}
		}
		if g != nil {
			g.drop() // before done, whose length is not ours
		}
		mu.Lock()
		defer mu.Unlock()
		for j, i := range is {
			done(i, backend.Grant{}, explain(errs[j]))
		}
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	for n, is := range byStripe {
		g, err := d.try(ctx, n)
		if g != nil || err != nil {
			answer(is, g, err)
			continue
		}
		wg.Go(func() {
			g, err := d.take(ctx, n)
			answer(is, g, err)
		})
	}
}

func (g *guard) renew(ctx context.Context, c backend.Claim) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
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
		return nil
	}
	return g.store(r)
}
