package filelock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

func (d *driver) path(key string) string { return filepath.Join(d.dir, stateName(key)) }

// The method load returns the record that holds the key, or nil, nil if there is no record or its
// term has ended. If the state file has no valid record of the key, the error is not ErrHeld,
// because the key is not free, but its holder is not known.
func (d *driver) load(key string, now instant) (*record, error) {
	path := d.path(key)
	b, fi, err := readFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case errors.Is(err, errNotFile):
		return nil, blocksKey(err)
	case err != nil:
		return nil, err
	}

	r, err := decode(b)
	if errors.Is(err, errTorn) && fromBeforeBoot(fi, now) {
		return nil, nil
	}
	if err == nil && r.key != key {
		err = fmt.Errorf("a record of another key, %+q", r.key)
	}
	if err != nil {
		return nil, blocksKey(fmt.Errorf("%s: %w", path, err))
	}

	if r.left(now) <= 0 {
		return nil, nil
	}
	return r, nil
}

// blocksKey adds advice to the error of a state file that is not a record of its key.
func blocksKey(err error) error {
	return fmt.Errorf("%w (the key is blocked until this file is removed, by break or by hand)", err)
}

// fromBeforeBoot reports whether a torn record was written before this boot. If so, a power failure
// has probably left the name without the content, which was not flushed. The holder has ended with
// that boot. A torn record of this boot was damaged in another way, and its key may be held.
func fromBeforeBoot(fi fs.FileInfo, now instant) bool {
	const slack = time.Second // more than the resolution of file times
	return now.boot != "" && fi.ModTime().Add(slack).Before(now.bootTime())
}

func (g *guard) store(r *record) error {
	b := r.encode()
	if len(b) > maxRecord {
		return fmt.Errorf("%w: key of %d bytes, owner of %d: the record would be longer than %d bytes",
			backend.ErrInvalid, len(r.key), len(r.owner), maxRecord)
	}
	return g.d.replace(g.d.path(r.key), g.d.guardFile("temp", g.n), b)
}

// refusal returns the error of a caller that wants the key while the record r holds it.
func (r *record) refusal(now instant) error {
	return &backend.HeldError{RetryAfter: r.left(now), Owner: r.owner, Waited: r.waited}
}

// Renew prolongs the terms of cs. It locks each guard once, for all claims of that guard's stripe.
// If another process has a guard, only the claims of that guard's stripe wait.
func (d *driver) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	if len(cs) == 0 {
		return
	}
	ctx, cancel := withTimeout(ctx, cs[0].Timeout)
	defer cancel()

	byStripe := map[int][]int{} // maps each stripe to the indices of its claims in cs
	for i, c := range cs {
		n := stripeOf(c.Key)
		byStripe[n] = append(byStripe[n], i)
	}

	var mu sync.Mutex // held during each call of the function done, so that no two such calls run at the same time
	answer := func(is []int, g *guard, err error) {
		errs := g.renewAll(ctx, cs, is, err)
		mu.Lock()
		defer mu.Unlock()
		for j, i := range is {
			done(i, backend.Grant{}, d.explain(errs[j]))
		}
	}

	var wg sync.WaitGroup
	defer wg.Wait() // the function done must not be called after Renew has returned
	for n, is := range byStripe {
		wg.Go(func() {
			g, err := d.lockGuard(ctx, n)
			answer(is, g, err)
		})
	}
}

// renewAll renews the claims of cs whose indices are in the slice is, drops the guard, and returns
// the outcomes. If g is nil, every outcome is err.
func (g *guard) renewAll(ctx context.Context, cs []backend.Claim, is []int, err error) []error {
	if g == nil {
		return slices.Repeat([]error{err}, len(is))
	}
	// Drop the guard here, before the function done is called, because that call may take long.
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
