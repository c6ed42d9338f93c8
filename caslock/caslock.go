package caslock

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock/internal/adapter"
	"github.com/hasplock/hasp/internal/calls"
)

// driver is a [backend.Driver] that keeps its locks in a Store.
type driver struct {
	store   Store
	records *records
	sweeper *sweeper
	tasks   *tasks
	writer  string // the token of the intents of this driver
	polls   bool   // the store is no Watcher

	renewals renewals
}

// New returns a Client whose locks are in store. Nil options mean the defaults. New creates and
// deletes a key to probe the store. If the store accepts a wrong version, or if two of eight
// writers succeed that replace one version at the same time, the error is backend.ErrInvalid.
func New(ctx context.Context, store Store, o *hasp.Options) (*hasp.Client, error) {
	d, err := NewDriver(ctx, store)
	if err != nil {
		return nil, err
	}
	return hasp.New(d, o)
}

// NewDriver returns only the driver that New would use, and probes the store as New does. It is for
// the conformance suite, or for a wrapper that is passed to [hasp.New]. If the store is a Watcher,
// the driver is a backend.Waker.
func NewDriver(ctx context.Context, store Store) (backend.Driver, error) {
	if adapter.IsNil(store) {
		return nil, fmt.Errorf("caslock: %w: store is nil", backend.ErrInvalid)
	}

	sweeps, err := probe(ctx, store)
	if err != nil {
		return nil, fmt.Errorf("caslock: %w", backend.Outage(ctx, err))
	}

	rs := &records{store: store, views: &views{byKey: map[string]*view{}}}
	ts := newTasks()
	d := &driver{
		store:   store,
		records: rs,
		sweeper: newSweeper(rs, ts, !sweeps),
		tasks:   ts,
		writer:  rand.Text(),
	}
	d.renewals.byHold = map[hold]*renewal{}

	if _, ok := store.(Watcher); ok {
		return d, nil
	}
	d.polls = true
	return struct{ withoutListen }{d}, nil
}

// withoutListen has the methods of a driver whose store is no Watcher.
type withoutListen interface {
	backend.Inspector
	backend.Lister
}

// Traits reports fences, shared holds and min holds, and what the store says of itself.
func (d *driver) Traits() backend.Traits {
	reach, cancellation := d.store.Limits()

	return backend.Traits{
		Fenced:       true,
		MinHold:      true,
		Shared:       true,
		Reach:        reach,
		Cancellation: cancellation,
	}
}

// Listen watches the record of c.Key.
func (d *driver) Listen(ctx context.Context, c backend.Claim) (<-chan struct{}, func(), error) {
	return d.store.(Watcher).Watch(ctx, name(c.Key))
}

// Close closes the store, if it is an io.Closer. The driver itself has opened nothing.
func (d *driver) Close() error {
	d.tasks.stop()
	if c, ok := d.store.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

// Acquire does not wait for the key. Its Put names the version that it has seen, so only one Put
// for each version succeeds. If the last view shows a free key, Acquire begins with the Put: if
// the view is out of date, the store refuses the Put. Keys of probes are refused with ErrInvalid.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if strings.HasPrefix(c.Key, probePrefix) {
		return backend.Grant{}, fmt.Errorf("%w: keys that begin with %s are caslock's own",
			backend.ErrInvalid, probePrefix)
	}

	v := d.records.views.last(c.Key)
	if v != nil && len(v.live(time.Now())) > 0 {
		v = nil // read the record, because the holds may have ended since
	}

	a := &attempt{claim: c, writer: d.writer, polls: d.polls, sent: map[uint64]backend.Grant{}}
	wrote := false // a hold, or an intent
	err := d.records.update(ctx, c.Key, c.Timeout, v,
		func(v *view, now time.Time) (*record, error) {
			r, err := a.edit(v, now)
			wrote = wrote || r != nil
			return r, err
		})
	if err != nil && !wrote && !backend.Definite(err) {
		err = &calls.Unsent{Err: err} // only a read has failed
	}
	return a.grant, err
}

// Renew makes a try to renew each hold.
func (d *driver) Renew(
	ctx context.Context, cs []backend.Claim, done func(i int, g backend.Grant, err error),
) {
	backend.RenewEach(ctx, cs, done, d.renew)
}

// renew makes a try to renew the hold of c. It returns the first answer to any try of the same
// renewal: a grant or ErrLost. It returns earlier if its own try fails without such an answer, or
// if ctx ends. A try goes on after the end of ctx, because its answer may serve the next try.
func (d *driver) renew(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	r := d.renewals.join(&c)
	failures := make(chan error, 1) // the error of this try, if its outcome is unknown
	err := d.tasks.run(ctx, func(ctx context.Context) {
		g, err := d.try(ctx, &c, r)
		d.renewals.leave(r, &c, g, err)
		if err != nil && !backend.Definite(err) {
			failures <- err
		}
	})
	if err != nil {
		return backend.Grant{}, err
	}

	select {
	case <-r.done:
		return r.grant, r.err
	case err := <-failures:
		return backend.Grant{}, err
	case <-ctx.Done():
		return backend.Grant{}, ctx.Err()
	}
}

// try writes the hold with a new number, and returns its grant. If the method send says that no
// write is needed, try writes nothing, and returns the grant that send has returned.
func (d *driver) try(
	ctx context.Context, c *backend.Claim, r *renewal,
) (g backend.Grant, err error) {
	err = d.change(ctx, c, func(it item, rec *record, now time.Time) (writes bool) {
		g, writes = d.renewals.send(r, it.N, rec.Write, grant(c, 0, now))
		if writes {
			// A shorter TTL must not cut a term that the holder still counts on. The rest that this
			// driver counts is at least the rest that the holder counts.
			rec.add(it, max(c.TTL, it.rest(now)), now)
		}
		return writes
	})
	return g, err
}

// Release frees the key, or leaves it taken until c.KeepUntil by a token that no caller has.
// KeepUntil has no effect on a shared hold.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	err := d.change(ctx, &c, func(it item, r *record, now time.Time) (writes bool) {
		if rest := c.KeepUntil.Sub(now); rest > 0 && it.Kind != kindShared {
			it.Kind = kindMinHold
			it.Token = tokenMinHold
			r.add(it, rest, now)
		}
		return true
	})

	d.sweeper.noteRelease()
	return err
}

// change writes the record without the hold of c.Token. The function edit gets the hold as it, and
// the new record r. It may add a changed hold to r, or return false, so that nothing is written. If
// the last view has the hold, change makes no Get before the Put.
//
// If there is no such hold, change returns ErrLost, but first it writes a new version, for two
// reasons. The store then refuses each earlier Put that is still under way and would bring the
// token back. And if the view is out of date, or another driver has renewed a hold that this driver
// counted as dead, the store refuses the new version, and change looks again.
func (d *driver) change(
	ctx context.Context, c *backend.Claim,
	edit func(it item, r *record, now time.Time) (writes bool),
) error {
	v := d.records.views.last(c.Key)
	if v != nil && find(v.rec.Items, c.Token) < 0 {
		v = nil // read the record, because the view may be older than the hold
	}

	err := d.records.update(ctx, c.Key, c.Timeout, v, func(v *view, now time.Time) (*record, error) {
		items := v.live(now)
		i := find(items, c.Token)
		if i < 0 {
			// Also remove the intent of this driver: a writer that gives up waiting makes a
			// Release, which finds no hold.
			rest := without(items, func(it item) bool { return isIntent(it) && it.Token == d.writer })
			return v.next(rest, now), backend.ErrLost
		}

		it := items[i]
		r := v.next(slices.Delete(items, i, i+1), now)
		if !edit(it, r, now) {
			return nil, nil
		}
		return r, nil
	})

	if errors.Is(err, errForeign) {
		// Another program has overwritten the hold, and no driver writes over such a value.
		return fmt.Errorf("%w: %w", backend.ErrLost, err)
	}
	return err
}

// Inspect reads the record of key.
func (d *driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	v, err := d.records.get(ctx, key)
	if err != nil {
		return backend.Status{}, err
	}
	return v.status(time.Now()), nil
}

// Break writes the record without its holds. It keeps the intents, because their writers still
// wait. The minute bounds only a ctx without a deadline.
func (d *driver) Break(ctx context.Context, key string) error {
	isHold := func(it item) bool { return !isIntent(it) }
	return d.records.update(ctx, key, time.Minute, nil, func(v *view, now time.Time) (*record, error) {
		return v.next(without(v.live(now), isHold), now), nil
	})
}

// List scans the records whose key begins with prefix, and yields those with a holder or a waiter.
// A page must fit into the timeout, also if the store reads its entries one by one. So a page that
// times out is asked for again with fewer entries, and after a quick page, the next one has more.
func (d *driver) List(
	ctx context.Context, prefix string, timeout time.Duration,
) iter.Seq2[backend.Entry, error] {
	const most = 1000 // entries of a page, which is the most that backend.Lister allows
	return func(yield func(backend.Entry, error) bool) {
		position := ""
		n := 100 // entries of the next page
		for {
			began := time.Now()
			within, cancel := context.WithTimeout(ctx, timeout)
			views, next, err := d.records.page(within, prefix, position, n)
			cancel()

			took := time.Since(began)
			timedOut := err != nil && took >= timeout && ctx.Err() == nil
			if timedOut && n > 1 {
				n = max(n/8, 1)
				continue
			}
			if took < timeout/4 {
				n = min(2*n, most)
			}

			// After the end of ctx, yield no more entries, but only the error below. If the page
			// has failed midway, yield what it has read.
			for _, v := range views {
				s := v.status(time.Now())
				inUse := s.Held || len(s.Waiters) > 0
				if ctx.Err() != nil || !inUse {
					continue
				}
				if !yield(backend.Entry{Key: string(v.rec.Key), Status: s}, nil) {
					return
				}
			}

			if err = cmp.Or(ctx.Err(), err); err != nil {
				yield(backend.Entry{}, err)
				return
			}
			if next == "" {
				return
			}
			position = next
		}
	}
}
