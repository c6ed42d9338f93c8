package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// competes returns calls with a Lead that does not renew its lease until fn returns. The function
// once runs fn under a lease, and reports whether the Lead is over.
func competes(once func(context.Context, *hasp.Lease, leadFn) (bool, error)) calls {
	c := sound
	c.lead = func(ctx context.Context, l hasp.Locker, key string, fn leadFn, opts ...hasp.Option) error {
		for {
			lease, err := l.Lock(ctx, key, opts...)
			if err == nil {
				var over bool
				if over, err = once(ctx, lease, fn); over {
					return err
				}
			} else if ctx.Err() != nil || errors.Is(err, hasp.ErrInvalid) || errors.Is(err, hasp.ErrClosed) {
				return err
			}
		}
	}
	return c
}

// leads returns calls with a Lead that passes its fn the context that the function of returns.
func leads(of func(context.Context, *hasp.Lease) context.Context) calls {
	return competes(func(ctx context.Context, l *hasp.Lease, fn leadFn) (bool, error) {
		err := fn(of(ctx, l), l)
		uerr := l.Unlock(ctx)
		return !errors.Is(uerr, hasp.ErrLost) || ctx.Err() != nil, errors.Join(err, uerr)
	})
}

// locksAll returns calls with a broken DoAll.
func locksAll(doAll doAllFunc) calls {
	return calls{sound.lead, doAll, sound.apart}
}

// The checks of Lead, DoAll and WithoutReentry find calls that break their promises.
func TestPlantedCallsAreFound(t *testing.T) {
	for name, c := range map[string]struct {
		broken calls
		finds  string // a part of an error that finds the bug
	}{
		"Lead that is not renewed after the end of its context": {
			leads(func(_ context.Context, l *hasp.Lease) context.Context { return l.Context() }),
			"a holder that cleaned up",
		},
		"Lead that unlocks before fn has returned": {
			competes(func(ctx context.Context, l *hasp.Lease, fn leadFn) (bool, error) {
				stop := context.AfterFunc(ctx, func() { _ = l.Unlock(context.Background()) })
				defer stop()
				return true, fn(l.Context(), l)
			}),
			"that one still held the key: true",
		},
		"Lead that returns the result of a lost term": {
			competes(func(ctx context.Context, l *hasp.Lease, fn leadFn) (bool, error) {
				err := fn(l.Context(), l)
				_ = l.Unlock(ctx)
				return true, err
			}),
			"Lead by",
		},
		"Lead whose fn gets the context of Lead": {
			leads(func(ctx context.Context, _ *hasp.Lease) context.Context { return ctx }),
			"the context of the fn of Lead",
		},
		"Lead that an outage ends": {
			calls{hasp.Do, sound.doAll, sound.apart},
			"Lead by",
		},
		"DoAll without one of the keys": {
			locksAll(func(ctx context.Context, l hasp.Locker, keys []string, fn allFn, opts ...hasp.Option) error {
				return hasp.DoAll(ctx, l, keys[:1], fn, opts...)
			}),
			"the fn of DoAll",
		},
		"DoAll that keeps what it has if a key is held": {
			locksAll(func(ctx context.Context, l hasp.Locker, keys []string, fn allFn, opts ...hasp.Option) error {
				if _, err := l.Lock(ctx, keys[0], opts...); err != nil {
					return err
				}
				return hasp.DoAll(ctx, l, keys[1:], fn, opts...)
			}),
			"DoAll by",
		},
		"DoAll that is not renewed after the end of its context": {
			locksAll(func(ctx context.Context, l hasp.Locker, keys []string, fn allFn, opts ...hasp.Option) error {
				all, err := hasp.LockAll(ctx, l, keys, opts...)
				if err != nil {
					return err
				}
				err = fn(all.Context(), all)
				return errors.Join(err, all.Unlock(ctx))
			}),
			"a holder that cleaned up",
		},
		"DoAll that does not report a loss": {
			locksAll(func(ctx context.Context, l hasp.Locker, keys []string, fn allFn, opts ...hasp.Option) (err error) {
				all := hasp.DoAll(ctx, l, keys, func(ctx context.Context, ls *hasp.Leases) error {
					err = fn(ctx, ls)
					return err
				}, opts...)
				if errors.Is(all, hasp.ErrLost) {
					return err
				}
				return all
			}),
			"DoAll by",
		},
		"WithoutReentry that re-enters": {
			calls{sound.lead, sound.doAll, func() hasp.Option { return nil }},
			"two holders",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			find(t, Kind{Name: "waiter", Open: inMemory(true)}, c.broken, c.finds)
		})
	}
}

// hasty is a store whose drivers report each renewal as done without asking the server.
type hasty struct{ *servers }

type hastyDriver struct{ Driver }

func (s hasty) Link(r *rand.Rand, timeout time.Duration) (backend.Driver, Link) {
	d, link := s.servers.Link(r, timeout)
	return hastyDriver{d.(Driver)}, link
}

func (d hastyDriver) Renew(_ context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	for i := range cs {
		done(i, backend.Grant{}, nil)
	}
}

// The simulation finds a driver that is broken.
func TestPlantedBugIsFound(t *testing.T) {
	kind := kinds[slices.IndexFunc(kinds, func(k Kind) bool { return k.Name == "fairlock" })]
	open := kind.Open
	kind.Open = func(t *testing.T, r *rand.Rand) Store { return hasty{open(t, r).(*servers)} }
	find(t, kind, sound, "two holders")
}

// The drift is needed: a lease is not safe if the store's clock is faster than the drift allows for.
func TestFastClockIsFound(t *testing.T) {
	for _, kind := range kinds {
		if kind.Name == "spinlock" || kind.Name == "redlock3" {
			t.Run(kind.Name, func(t *testing.T) {
				t.Parallel()
				kind.Fast = 0.05
				find(t, kind, sound, "two holders")
			})
		}
	}
}
