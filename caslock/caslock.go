package caslock

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// Options are the settings of [New]. Nil and the zero value mean the defaults.
type Options struct {
	// Client has the options of the Client that New returns. NewDriver ignores it.
	Client hasp.Options
}

const (
	idle      = time.Hour       // how long the record of a free key stays; see the package comment
	maxViews  = 10_000          // keys that a driver remembers
	intentTTL = 3 * time.Second // longer than the sleeps of a writer that waits; see Claim.WillRetry
	maxPause  = 30 * time.Millisecond
)

// driver is a [backend.Driver] that keeps its locks in a Store.
type driver struct {
	store  Store
	limits Limits

	// doubts contains the tokens for which this driver has sent a Put, because a Put of unknown
	// outcome may still arrive. A Release that is answered removes its token. See the method lost.
	doubts sync.Map

	writer string // the token of the intents of this driver

	position atomic.Value // a string: where the next part of a sweep begins

	mu    sync.Mutex // guards views
	views map[string]*view
}

var _ backend.Inspector = (*driver)(nil)

// New returns a Client whose locks are in store. It creates and deletes a key to probe the store,
// and tries three calls that the store must refuse.
func New(ctx context.Context, store Store, o *Options) (*hasp.Client, error) {
	o = cmp.Or(o, &Options{})
	d, err := NewDriver(ctx, store, o)
	if err != nil {
		return nil, err
	}
	return hasp.New(d, &o.Client)
}

// NewDriver returns only the driver that New would use, and probes the store as New does. It is for
// the conformance suite, or for a wrapper that is passed to [hasp.New]. If the store is a Watcher,
// the driver is a backend.Waker. If the store is a Lister, the driver is a backend.Lister.
func NewDriver(ctx context.Context, store Store, _ *Options) (backend.Driver, error) {
	if store == nil {
		return nil, fmt.Errorf("caslock: %w: store is nil", backend.ErrInvalid)
	}
	d := &driver{store: store, limits: store.Limits(), writer: rand.Text(), views: map[string]*view{}}
	if err := d.probe(ctx); err != nil {
		return nil, fmt.Errorf("caslock: %w", err)
	}
	w, watches := store.(Watcher)
	l, lists := store.(Lister)
	switch {
	case watches && lists:
		return struct {
			*driver
			waker
			lister
		}{d, waker{w}, lister{d, l}}, nil
	case watches:
		return struct {
			*driver
			waker
		}{d, waker{w}}, nil
	case lists:
		return struct {
			*driver
			lister
		}{d, lister{d, l}}, nil
	}
	return d, nil
}

// probe checks that the store refuses a Put and a Delete with a wrong version.
func (d *driver) probe(ctx context.Context) error {
	key := "caslock-probe-" + rand.Text()
	one, err := d.store.Put(ctx, key, []byte("1"), "")
	if err != nil {
		return err
	}
	two, err := d.store.Put(ctx, key, []byte("2"), one)
	if err != nil {
		return err
	}
	put := func(version string) error {
		_, err := d.store.Put(ctx, key, []byte("3"), version)
		return err
	}
	for _, err := range []error{put(""), put(one), d.store.Delete(ctx, key, one)} {
		if err == nil || one == two {
			return fmt.Errorf("%w: the store does not compare versions, so it cannot keep locks", backend.ErrInvalid)
		} else if !errors.Is(err, ErrConflict) {
			return err
		}
	}
	return d.store.Delete(ctx, key, two)
}

// waker is the part of a driver whose store is a Watcher.
type waker struct{ w Watcher }

// Listen watches the record of c.Key.
func (w waker) Listen(ctx context.Context, c backend.Claim) (<-chan struct{}, func(), error) {
	return w.w.Watch(ctx, c.Key)
}

// Traits reports fences, shared holds and min holds. The other traits are the store's Limits.
func (d *driver) Traits() backend.Traits {
	return backend.Traits{Fenced: true, MinHold: true, Shared: true, MaxTTL: d.limits.MaxTTL,
		Reach: cmp.Or(d.limits.Reach, backend.Network), Cancellation: d.limits.Cancellation}
}

// Close closes the store, if it is an io.Closer. The driver itself has opened nothing.
func (d *driver) Close() error {
	if c, ok := d.store.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

// last returns the last view of key, or nil.
func (d *driver) last(key string) *view {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.views[key]
}

// remember stores v as the last view of key. If v is nil, it forgets the last view. If there are
// too many views, it forgets some of them, which only delays a take-over.
func (d *driver) remember(key string, v *view) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if v == nil {
		delete(d.views, key)
		return
	}
	for k := range d.views {
		if len(d.views) < maxViews {
			break
		}
		delete(d.views, k)
	}
	d.views[key] = v
}

// look reads a key.
func (d *driver) look(ctx context.Context, key string) (*view, error) {
	e, err := d.store.Get(ctx, key)
	if err != nil {
		return nil, err
	}
	v, err := newView(key, e, d.last(key), time.Now())
	if err == nil {
		d.remember(key, v)
	}
	return v, err
}

// put writes r if the key still has the version of v.
func (d *driver) put(ctx context.Context, v *view, r *record) error {
	key := string(r.Key)
	value, err := json.Marshal(r)
	if err != nil {
		return err
	}
	version, err := d.store.Put(ctx, key, value, v.version)
	if err == nil && (version == "" || version == v.version) {
		err = fmt.Errorf("the store gave version %q to two values of a key", version)
	}
	switch {
	case err == nil:
		after := &view{version: version, rec: *r}
		after.observe(v, time.Now())
		d.remember(key, after)
	case !errors.Is(err, ErrConflict):
		d.remember(key, nil) // the outcome is unknown
	}
	return err
}

// update writes the record that edit returns for a view, and returns edit's error. If edit returns
// no record, update writes nothing. It takes at most the duration timeout. It begins with v, or
// with a Get if v is nil. It reads again if edit returns ErrConflict, or if another write came
// first. The other write may be update's own Put, if a library or a proxy has sent the Put twice.
func (d *driver) update(ctx context.Context, key string, timeout time.Duration, v *view, edit func(v *view, now time.Time) (*record, error)) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for pause := time.Millisecond; ; pause = min(2*pause, maxPause) {
		if v == nil {
			var err error
			if v, err = d.look(ctx, key); err != nil {
				return err
			}
		}
		r, result := edit(v, time.Now()) // the time before the Put, which may take long
		if r != nil {
			if err := d.put(ctx, v, r); errors.Is(err, ErrConflict) {
				result = err
				time.Sleep(mathrand.N(pause)) // so that two writers do not conflict again
			} else if err != nil {
				return err
			}
		}
		if !errors.Is(result, ErrConflict) {
			return result
		}
		v = nil
	}
}

// Acquire makes one attempt: a Put on the version that it has seen, so that only one Put for each
// version succeeds. If the last view shows a free key, Acquire makes no Get.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
	if d.limits.MaxTTL > 0 && c.TTL > d.limits.MaxTTL {
		return g, fmt.Errorf("%w: ttl %v is above %v", backend.ErrInvalid, c.TTL, d.limits.MaxTTL)
	}
	v := d.last(c.Key)
	if v != nil && len(v.live(time.Now())) > 0 {
		v = nil
	}
	_, doubt := d.doubts.Load(c.Token) // an earlier call may have got the key with this token
	sent := map[uint64]time.Time{}     // when each Put was sent, by the number of its write
	err = d.update(ctx, c.Key, c.Timeout, v, func(v *view, now time.Time) (*record, error) {
		items := v.live(now)
		if i := find(items, c.Token); i >= 0 {
			it := items[i]
			if at, ours := sent[it.N]; ours {
				// The store has carried out an earlier Put of this call. The term counts from that
				// Put, because others may have seen its record since.
				g = grant(&c, it.Fence, at)
				return nil, nil
			}
			return nil, refusal(items[i:i+1], now) // the hold of an earlier call
		}

		blockers := without(items, func(it *item) bool {
			return it.Kind == shared && c.Shared || it.Kind == intent && !c.Shared
		})
		r := v.next(without(items, isIntent), now)
		if len(blockers) > 0 {
			held := refusal(blockers, now)
			if !c.WillRetry || c.Shared || !held.Shared {
				return nil, held
			}
			// This is a writer that shared holds refuse. If the record has a fresh intent, write
			// nothing: a Watcher reports each write, also to this writer, which would ask again.
			if i := slices.IndexFunc(items, func(it item) bool { return isIntent(&it) }); i >= 0 && items[i].rest(now) > intentTTL/2 {
				return nil, held
			}
			r.add(&c, intent, intentTTL, now).Token = d.writer // so that a release of the next claim removes it
			d.doubts.Store(c.Token, true)
			return r, held
		}

		k := exclusive
		if c.Shared {
			k = shared
		}
		it := r.add(&c, k, c.TTL, now)
		if c.Fenced {
			r.Fence = it.Fence
		}
		d.doubts.Store(c.Token, true)
		sent[it.N] = now
		g = grant(&c, it.Fence, now)
		return r, nil
	})
	if errors.Is(err, errForeign) {
		err = fmt.Errorf("%w: %w", backend.ErrInvalid, err)
	}
	if errors.Is(err, backend.ErrHeld) && !doubt {
		d.doubts.Delete(c.Token) // each Put of this call was answered, and none has written the token
	}
	return g, err // g means nothing if there is an error
}

// grant returns the grant of a hold whose Put was sent at the time start.
func grant(c *backend.Claim, fence uint64, start time.Time) backend.Grant {
	g := backend.Grant{Until: start.Add(c.TTL - backend.Drift(c.TTL))}
	if c.Fenced {
		g.Fence = fence
	}
	return g
}

// Renew writes each hold with a new number and at least its TTL. A term never gets shorter, because
// this driver never counts less of the term as left than the holder does.
func (d *driver) Renew(ctx context.Context, cs []backend.Claim, done func(i int, g backend.Grant, err error)) {
	backend.RenewEach(ctx, cs, done, func(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
		err = d.change(ctx, &c, func(it *item, r *record, now time.Time) bool {
			it.N, it.TTL = r.Write, max(c.TTL, it.rest(now))
			it.Ends = now.Round(0).Add(it.TTL)
			g = grant(&c, 0, now)
			return true
		})
		return g, err
	})
}

// Release frees the key, or leaves it taken until c.KeepUntil by a token that no caller has.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	err := d.change(ctx, &c, func(it *item, r *record, now time.Time) bool {
		rest := c.KeepUntil.Sub(now)
		if c.KeepUntil.IsZero() || rest <= 0 || it.Kind == shared {
			return false
		}
		it.Kind, it.Token, it.N, it.TTL, it.Ends = kept, "kept", r.Write, rest, c.KeepUntil.Round(0)
		return true
	})
	if err == nil || errors.Is(err, backend.ErrLost) {
		d.doubts.Delete(c.Token)
	}
	if mathrand.N(sweepOneIn) == 0 {
		_ = d.sweep(ctx) // a later sweep does what this one has not done
	}
	return err
}

// change lets the function edit change the hold of c.Token, and writes the result. If edit returns
// false, the hold is removed. If the last view has the hold, change makes no Get before the Put.
func (d *driver) change(ctx context.Context, c *backend.Claim, edit func(it *item, r *record, now time.Time) bool) error {
	last := d.last(c.Key)
	err := d.update(ctx, c.Key, c.Timeout, last, func(v *view, now time.Time) (*record, error) {
		items := v.live(now)
		i := find(items, c.Token)
		if i < 0 {
			if v == last && find(v.rec.Items, c.Token) < 0 {
				return nil, ErrConflict // the view is too old
			}
			return d.lost(c, v, items, now), backend.ErrLost
		}
		it := items[i]
		r := v.next(slices.Delete(items, i, i+1), now)
		if edit(&it, r, now) {
			r.Items = append(r.Items, it)
		}
		return r, nil
	})
	if errors.Is(err, errForeign) {
		return fmt.Errorf("%w: %w", backend.ErrLost, err) // no driver writes over such a value
	}
	return err
}

// lost handles a claim whose token holds nothing in v. It returns the record to write before
// ErrLost is reported, or nil if there is no doubt. The argument items contains the live items of
// v. There are three doubts: a Put of unknown outcome may still arrive and bring the token back, v
// may be stale, and another driver may have renewed a hold that has died for this driver. A new
// version ends all three doubts, because a write that expects an earlier version is refused.
func (d *driver) lost(c *backend.Claim, v *view, items []item, now time.Time) *record {
	_, doubt := d.doubts.Load(c.Token)
	// A writer that gives up releases its last claim. Its intent may be of an earlier claim.
	rest := without(items, func(it *item) bool { return isIntent(it) && it.Token == d.writer })
	if doubt || len(rest) < len(items) || find(v.rec.Items, c.Token) >= 0 {
		return v.next(rest, now)
	}
	return nil
}
