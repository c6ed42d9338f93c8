// Package memlock keeps locks in the memory of one process.
//
// It guarantees exclusion among all callers in the process that use the same
// store, in order of arrival, with terms, fences and everything else that the
// strategies for several processes have. It is meant for tests, for programs
// that run as one process today, and as a model of a driver. It guarantees
// nothing to other processes, and forgets everything at the end of this one.
//
// A call costs no round trip. A key that nobody holds or waits for takes no
// memory, with one exception. A hold that expired and was never released stays
// until a caller next wants its key. It is also removed when the store has
// 1,024 keys and twice as many as when it last removed such holds.
//
// URL: memlock:// or memlock://NAME is a store that all Clients of the process
// with that name share; [New] makes a private one. There are no parameters.
package memlock

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

func init() { hasp.Register("memlock", open) }

// named are the stores that URLs name.
var named struct {
	sync.Mutex // guards stores
	stores     map[string]*Store
}

func open(_ context.Context, c hasp.Config) (backend.Driver, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	name := ""
	switch len(c.Nodes) {
	case 0:
	case 1:
		name = c.Nodes[0]
		if strings.Contains(name, "://") {
			return nil, fmt.Errorf("%w: memlock is reached over nothing: want memlock:// or memlock://NAME", hasp.ErrInvalid)
		}
	default:
		return nil, fmt.Errorf("%w: memlock takes one node, the name of a store, not %d", hasp.ErrInvalid, len(c.Nodes))
	}
	named.Lock()
	defer named.Unlock()
	s := named.stores[name]
	if s == nil {
		if named.stores == nil {
			named.stores = map[string]*Store{}
		}
		s = NewStore()
		named.stores[name] = s
	}
	return s.Driver(), nil
}

// Store is what several drivers of one process can share. The zero value is
// not usable; call [NewStore].
type Store struct {
	mu    sync.Mutex // guards all below
	keys  map[string]*entry
	fence uint64 // one counter for all keys, so that none is kept for a key that is free
	limit int    // when len(keys) reaches it, expired holds are removed
}

// NewStore returns an empty store.
func NewStore() *Store {
	return &Store{keys: map[string]*entry{}, limit: minLimit}
}

// Driver returns a driver on s, as each Client needs one of its own.
func (s *Store) Driver() *Driver { return &Driver{store: s, closed: make(chan struct{})} }

// New returns a driver on a store of its own.
func New() *Driver { return NewStore().Driver() }

// Driver is a [backend.Driver] on a [Store]. It is a Waiter that keeps the
// order of arrival, fenced, and an Inspector.
type Driver struct {
	store  *Store
	once   sync.Once
	closed chan struct{}
}

var (
	_ backend.Waiter    = (*Driver)(nil)
	_ backend.Inspector = (*Driver)(nil)
)

var errClosed = errors.New("memlock: driver is closed")

// entry is a key that is held or waited for.
type entry struct {
	key   string
	claim backend.Claim // of the holder; Token is empty if there is none
	fence uint64
	since time.Time
	until time.Time
	queue list.List // of *waiter, in order of arrival
}

// waiter is a place in the queue.
type waiter struct {
	claim backend.Claim
	place *list.Element  // in the entry's queue, until grant is set
	grant *backend.Grant // set under the store's mu when the key is handed over
	wake  chan struct{}  // granted, or first in the queue now
}

// Traits returns Ordered, Fenced, Process.
func (d *Driver) Traits() backend.Traits {
	return backend.Traits{Ordered: true, Fenced: true, Reach: backend.Process}
}

// Acquire takes the key if nobody holds it or waits for it.
func (d *Driver) Acquire(_ context.Context, c backend.Claim) (backend.Grant, error) {
	s := d.store
	if err := d.check(c); err != nil {
		return backend.Grant{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	e := s.entry(c.Key, now)
	if e.held(now) || e.queue.Len() > 0 {
		return backend.Grant{}, e.refusal(now)
	}
	return s.give(e, c, now), nil
}

// Wait takes its place in the queue and returns when the key is handed over.
func (d *Driver) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	s := d.store
	if err := d.check(c); err != nil {
		return backend.Grant{}, err
	}
	w := &waiter{claim: c, wake: make(chan struct{}, 1)}
	s.mu.Lock()
	e := s.entry(c.Key, time.Now())
	w.place = e.queue.PushBack(w)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		now := time.Now()
		// A waiter that was granted the key has left the queue and must not touch
		// e. Before it woke, the hold may have been broken or have expired, and the
		// key may have another entry. While w is queued, e stays in the map.
		if w.grant == nil {
			s.advance(e, now)
		}
		if w.grant != nil {
			s.mu.Unlock()
			return *w.grant, nil
		}

		if err := errors.Join(ctx.Err(), d.ended()); err != nil {
			refusal := e.refusal(now)
			s.quit(e, w)
			s.mu.Unlock()
			if ctx.Err() == nil {
				return backend.Grant{}, err
			}
			return backend.Grant{}, refusal
		}
		var expiry <-chan time.Time
		if e.first() == w {
			timer.Reset(e.until.Sub(now))
			expiry = timer.C
		}
		s.mu.Unlock()
		select {
		case <-w.wake:
		case <-expiry:
		case <-ctx.Done():
		case <-d.closed:
		}
		s.mu.Lock()
	}
}

// Renew prolongs terms.
func (d *Driver) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	for i, c := range cs {
		if ctx.Err() != nil {
			return
		}
		g, err := d.renew(c)
		done(i, g, err)
	}
}

func (d *Driver) renew(c backend.Claim) (backend.Grant, error) {
	s := d.store
	if err := d.check(c); err != nil {
		return backend.Grant{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	e := s.keys[c.Key]
	if e == nil || e.claim.Token != c.Token || !e.held(now) {
		return backend.Grant{}, backend.ErrLost
	}
	if until := now.Add(c.TTL); until.After(e.until) {
		e.until = until
	}
	return backend.Grant{Fence: e.fence, Until: trusted(now, c.TTL)}, nil
}

// Release hands the key to the first waiter.
func (d *Driver) Release(_ context.Context, c backend.Claim) error {
	s := d.store
	if err := d.ended(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	e := s.keys[c.Key]
	if e == nil || e.claim.Token != c.Token || !e.held(now) {
		return backend.ErrLost
	}
	s.free(e, now)
	return nil
}

// Inspect returns the holder and the queue.
func (d *Driver) Inspect(_ context.Context, key string) (backend.Status, error) {
	s := d.store
	if err := d.ended(); err != nil {
		return backend.Status{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var st backend.Status
	e := s.keys[key]
	if e == nil {
		return st, nil
	}
	now := time.Now()
	if e.held(now) {
		st = backend.Status{Held: true, Owner: e.claim.Owner, Since: e.since.Round(0), TTL: e.until.Sub(now), Fence: e.fence}
	}
	for p := e.queue.Front(); p != nil; p = p.Next() {
		st.Waiters = append(st.Waiters, p.Value.(*waiter).claim.Owner)
	}
	return st, nil
}

// Break takes the key from its holder and hands it to the first in the queue.
func (d *Driver) Break(_ context.Context, key string) error {
	s := d.store
	if err := d.ended(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.keys[key]; e != nil {
		s.free(e, time.Now())
	}
	return nil
}

// Close ends what waits on this driver. The store and what it keeps stay.
func (d *Driver) Close() error {
	d.once.Do(func() { close(d.closed) })
	return nil
}

func (d *Driver) ended() error {
	select {
	case <-d.closed:
		return errClosed
	default:
		return nil
	}
}

func (d *Driver) check(c backend.Claim) error {
	switch {
	case c.Key == "" || c.Token == "":
		return fmt.Errorf("%w: empty key or token", backend.ErrInvalid)
	case c.TTL < backend.MinTTL:
		return fmt.Errorf("%w: ttl %v is below %v", backend.ErrInvalid, c.TTL, backend.MinTTL)
	}
	return d.ended()
}

// trusted is until when the holder of a term begun now may rely on it.
func trusted(now time.Time, ttl time.Duration) time.Time {
	return now.Add(ttl - backend.Drift(ttl))
}

func (e *entry) held(now time.Time) bool { return e.claim.Token != "" && now.Before(e.until) }

func (e *entry) refusal(now time.Time) *backend.HeldError {
	he := &backend.HeldError{}
	if e.held(now) {
		he.Owner, he.RetryAfter = e.claim.Owner, e.until.Sub(now)
	}
	return he
}

// idle reports whether the key of e has neither a holder nor a waiter.
func (e *entry) idle(now time.Time) bool { return !e.held(now) && e.queue.Len() == 0 }

// first returns the first waiter in the queue, or nil.
func (e *entry) first() *waiter {
	if p := e.queue.Front(); p != nil {
		return p.Value.(*waiter)
	}
	return nil
}

// minLimit is the least limit of a store.
const minLimit = 1024

// entry returns the entry of key, new if need be.
func (s *Store) entry(key string, now time.Time) *entry {
	e := s.keys[key]
	if e != nil {
		return e
	}
	if len(s.keys) >= s.limit {
		s.sweep(now)
	}
	e = &entry{key: key}
	s.keys[key] = e
	return e
}

// sweep removes the entries of holds that expired and were never released.
func (s *Store) sweep(now time.Time) {
	maps.DeleteFunc(s.keys, func(_ string, e *entry) bool { return e.idle(now) })
	s.fit()
}

// remove removes e, which is idle.
func (s *Store) remove(e *entry) {
	delete(s.keys, e.key)
	if s.limit > minLimit && len(s.keys) <= s.limit/8 {
		s.fit()
	}
}

// fit sets the limit for the present number of keys. If there were many more,
// it moves them into a smaller map, since a map never shrinks by itself.
func (s *Store) fit() {
	if len(s.keys) <= s.limit/8 {
		keys := make(map[string]*entry, len(s.keys))
		maps.Copy(keys, s.keys)
		s.keys = keys
	}
	s.limit = max(minLimit, 2*len(s.keys))
}

// give makes c the holder.
func (s *Store) give(e *entry, c backend.Claim, now time.Time) backend.Grant {
	e.claim, e.since, e.until, e.fence = c, now, now.Add(c.TTL), 0
	if c.Fenced {
		s.fence++
		e.fence = s.fence
	}
	return backend.Grant{Fence: e.fence, Until: trusted(now, c.TTL)}
}

// free ends the hold of e, if there is one, and hands the key on.
func (s *Store) free(e *entry, now time.Time) {
	e.claim.Token = ""
	s.advance(e, now)
}

// advance hands the key to the first waiter if the key is free. It makes a new
// first waiter watch the holder's term, and removes the entry of a key that
// stays free.
func (s *Store) advance(e *entry, now time.Time) {
	if e.held(now) {
		return
	}

	w := e.first()
	if w == nil {
		s.remove(e)
		return
	}

	e.queue.Remove(w.place)
	g := s.give(e, w.claim, now)
	w.grant = &g
	w.signal()
	if next := e.first(); next != nil {
		next.signal()
	}
}

// quit gives up w's place in the queue of e, whose key is held.
func (s *Store) quit(e *entry, w *waiter) {
	first := e.first() == w
	e.queue.Remove(w.place)
	// The first waiter is the one that watches the holder's term.
	if next := e.first(); first && next != nil {
		next.signal()
	}
}

func (w *waiter) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}
