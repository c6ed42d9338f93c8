package caslock

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	mathrand "math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

const intentTTL = 3 * time.Second // longer than the sleeps of a writer that waits; see Claim.WillRetry

var errForeign = fmt.Errorf("%w: the value was written by another program: remove it, or choose another key", backend.ErrInvalid)

// driver is a [backend.Driver] that keeps its locks in a Store.
type driver struct {
	store    Store
	writer   string       // the token of the intents of this driver
	position atomic.Value // a string: where the next part of a sweep begins

	mu    sync.Mutex // guards views
	views map[string]*view
}

// New returns a Client whose locks are in store. Nil options mean the defaults. New creates and
// deletes a key to probe the store, and tries three calls that the store must refuse.
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
	if store == nil {
		return nil, fmt.Errorf("caslock: %w: store is nil", backend.ErrInvalid)
	}
	d := &driver{store: store, writer: rand.Text(), views: map[string]*view{}}
	if err := d.probe(ctx); err != nil {
		return nil, fmt.Errorf("caslock: %w", err)
	}
	if _, ok := store.(Watcher); ok {
		return d, nil
	}
	return struct{ withoutListen }{d}, nil
}

type withoutListen interface {
	backend.Inspector
	backend.Lister
}

// probe checks that the store refuses a Put and a Delete with a wrong version. Its values
// are records, so a sweep removes one that is left after a lost reply.
func (d *driver) probe(ctx context.Context) error {
	key := "caslock-probe-" + rand.Text()
	put := func(n uint64, version string) (string, error) {
		value, _ := json.Marshal(record{Key: []byte(key), Write: uint64(time.Now().UnixMicro()) + n})
		return d.store.Put(ctx, key, value, version)
	}
	one, err := put(1, "")
	two, err2 := put(2, one)
	if err := cmp.Or(err, err2); err != nil {
		return err
	}
	_, exists := put(3, "")
	_, changed := put(3, one)
	for _, err := range []error{exists, changed, d.store.Delete(ctx, key, one)} {
		if err == nil || one == two {
			return fmt.Errorf("%w: the store does not compare versions, so it cannot keep locks", backend.ErrInvalid)
		} else if !errors.Is(err, ErrConflict) {
			return err
		}
	}
	return d.store.Delete(ctx, key, two)
}

// Listen watches the record of c.Key.
func (d *driver) Listen(ctx context.Context, c backend.Claim) (<-chan struct{}, func(), error) {
	return d.store.(Watcher).Watch(ctx, name(c.Key))
}

// Traits reports fences, shared holds and min holds, and what the store says of itself.
func (d *driver) Traits() backend.Traits {
	reach, cancellation := d.store.Limits()
	return backend.Traits{Fenced: true, MinHold: true, Shared: true, Reach: reach, Cancellation: cancellation}
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

// remember returns the view of a record, and keeps it as the last view of its key. An item that was
// in the view before keeps its time seen. If there are too many views, remember deletes those of
// free keys. If that is not enough, it deletes some others, which only delays a take-over.
func (d *driver) remember(version string, r record, now time.Time) *view {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range r.Items {
		it := &r.Items[i]
		it.seen = now
		if before := d.views[string(r.Key)]; before != nil {
			for _, old := range before.rec.Items {
				if old.Token == it.Token && old.N == it.N && old.seen.Before(now) {
					it.seen = old.seen
				}
			}
		}
	}
	const most = 10_000
	if len(d.views) >= most {
		maps.DeleteFunc(d.views, func(_ string, v *view) bool { return len(v.rec.Items) == 0 })
	}
	for k := range d.views {
		if len(d.views) < most {
			break
		}
		delete(d.views, k)
	}
	v := &view{version, r}
	d.views[string(r.Key)] = v
	return v
}

// look reads a key.
func (d *driver) look(ctx context.Context, key string) (*view, error) {
	e, err := d.store.Get(ctx, name(key))
	if err != nil {
		return nil, err
	}
	return d.decode(key, e, time.Now())
}

// decode returns the view of an entry. A key that is not known is "". The argument now is a time
// after the reply, because a time from before the call could be earlier than the write. The writer
// began to count its term before the write.
func (d *driver) decode(key string, e Entry, now time.Time) (*view, error) {
	var r record
	if e.Version == "" {
		r.Key = []byte(key)
	} else if json.Unmarshal(e.Value, &r) != nil || len(r.Key) == 0 || key != "" && key != string(r.Key) {
		return nil, errForeign
	}
	return d.remember(e.Version, r, now.Add(-max(e.Age, 0))), nil
}

// put writes r if the key still has the version of v.
func (d *driver) put(ctx context.Context, v *view, r *record) error {
	value, _ := json.Marshal(r) // no error, because each field can be encoded
	version, err := d.store.Put(ctx, name(string(r.Key)), value, v.version)
	if err == nil && (version == "" || version == v.version) {
		err = fmt.Errorf("the store gave version %q to two values of a key", version)
	}
	if err == nil {
		d.remember(version, *r, time.Now())
	}
	return err
}

// update writes the record that edit returns for a view, and returns edit's error. If edit returns
// no record, update writes nothing. It takes at most the duration timeout. It begins with v, or
// with a Get if v is nil. It reads again if another write came first, which may be update's own Put
// if a library or a proxy has sent the Put twice.
func (d *driver) update(ctx context.Context, key string, timeout time.Duration, v *view, edit func(v *view, now time.Time) (*record, error)) (err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for pause := time.Millisecond; ; pause = min(2*pause, 30*time.Millisecond) {
		if v == nil {
			if v, err = d.look(ctx, key); err != nil {
				return err
			}
		}
		r, result := edit(v, time.Now()) // the time before the Put, which may take long
		if r != nil {
			if err := d.put(ctx, v, r); err != nil {
				result = err
			}
		}
		if !errors.Is(result, ErrConflict) {
			return result
		}
		v = nil
		time.Sleep(mathrand.N(pause)) // so that two writers do not conflict again
	}
}

// Acquire does not wait for the key. Its Put names the version that it has seen, so only one Put
// for each version succeeds. If the last view shows a free key, Acquire makes no Get.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
	v := d.last(c.Key)
	if v != nil && len(v.live(time.Now())) > 0 {
		v = nil
	}
	sent := map[uint64]time.Time{} // when each Put was sent, by the number of its write
	err = d.update(ctx, c.Key, c.Timeout, v, func(v *view, now time.Time) (*record, error) {
		items := v.live(now)
		if i := find(items, c.Token); i >= 0 {
			at, ours := sent[items[i].N]
			if !ours {
				return nil, refusal(items[i:i+1], now) // the hold of an earlier call
			}
			// The store has carried out an earlier Put of this call. The term counts from that Put,
			// because others may have seen its record since.
			g = grant(&c, items[i].N, at)
			return nil, nil
		}

		blockers := without(items, func(it item) bool {
			return it.Kind == shared && c.Shared || it.Kind == intent && !c.Shared
		})
		r := v.next(without(items, isIntent), now)
		it := item{Kind: exclusive, Token: c.Token, Owner: []byte(c.Owner), Waited: c.Waited, Since: now}
		if len(blockers) > 0 {
			held := refusal(blockers, now)
			// If shared holds refuse a writer, it writes its intent. If the record has a fresh
			// intent, the writer writes nothing: a Watcher reports each write, also to the writer
			// itself.
			fresh := slices.ContainsFunc(items, func(it item) bool { return isIntent(it) && it.rest(now) > intentTTL/2 })
			if fresh || !c.WillRetry || c.Shared || !held.Shared {
				return nil, held
			}
			it.Kind, it.Token = intent, d.writer // the driver's token, so a release of any later claim removes it
			r.add(it, intentTTL, now)
			return r, held
		}

		if c.Shared {
			it.Kind = shared
		}
		if c.Fenced {
			r.Fence = r.Write
		}
		r.add(it, c.TTL, now)
		sent[r.Write] = now
		g = grant(&c, r.Write, now)
		return r, nil
	})
	return g, err // g means nothing if there is an error
}

// grant returns the grant of a hold whose Put was sent at the time start.
func grant(c *backend.Claim, fence uint64, start time.Time) backend.Grant {
	if !c.Fenced {
		fence = 0
	}
	return backend.Grant{Fence: fence, Until: start.Add(c.TTL - backend.Drift(c.TTL))}
}

// Renew writes each hold with a new number and at least its TTL. A term never gets shorter: the
// rest that this driver counts is at least the rest that the holder counts.
func (d *driver) Renew(ctx context.Context, cs []backend.Claim, done func(i int, g backend.Grant, err error)) {
	backend.RenewEach(ctx, cs, done, func(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
		err = d.change(ctx, &c, func(it item, r *record, now time.Time) {
			r.add(it, max(c.TTL, it.rest(now)), now)
			g = grant(&c, 0, now)
		})
		return g, err
	})
}

// Release frees the key, or leaves it taken until c.KeepUntil by a token that no caller has.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	err := d.change(ctx, &c, func(it item, r *record, now time.Time) {
		if rest := c.KeepUntil.Sub(now); rest > 0 && it.Kind != shared {
			it.Kind, it.Token = kept, "kept"
			r.add(it, rest, now)
		}
	})
	if mathrand.N(100) == 0 { // a sweep reads 200 entries, which is more than 100 releases can leave
		_ = d.sweep(ctx)
	}
	return err
}

// change writes the record without the hold of c.Token. The function edit may add the hold again,
// changed. If the last view has the hold, change makes no Get before the Put.
//
// If there is no such hold, change writes a new version before it returns ErrLost. Then the store
// refuses each earlier Put that is still under way and would bring the token back. It also refuses
// the new version if the view was stale, or if another driver has renewed a hold that this driver
// counted as dead.
func (d *driver) change(ctx context.Context, c *backend.Claim, edit func(it item, r *record, now time.Time)) error {
	v := d.last(c.Key)
	if v != nil && find(v.rec.Items, c.Token) < 0 {
		v = nil // it may be too old
	}
	err := d.update(ctx, c.Key, c.Timeout, v, func(v *view, now time.Time) (*record, error) {
		items := v.live(now)
		i := find(items, c.Token)
		if i < 0 {
			// A writer that gives up releases only its last claim. Its intent may be of an earlier
			// one.
			rest := without(items, func(it item) bool { return isIntent(it) && it.Token == d.writer })
			return v.next(rest, now), backend.ErrLost
		}
		it := items[i]
		r := v.next(slices.Delete(items, i, i+1), now)
		edit(it, r, now)
		return r, nil
	})
	if errors.Is(err, errForeign) {
		return fmt.Errorf("%w: %w", backend.ErrLost, err) // no driver writes over such a value
	}
	return err
}
