// Package memlock keeps locks in the memory of one process.
//
// It guarantees exclusion among all callers in the process that use the same
// store, in order of arrival, with terms, fences and everything else that the
// strategies for several processes have. It is meant for tests, for programs
// that run as one process today, and as a model of a driver. It guarantees
// nothing to other processes, and forgets everything at the end of this one.
//
// A call costs no round trip. A key that nobody holds or waits for takes no
// memory.
//
// URL: memlock:// or memlock://NAME is a store that all Clients of the process
// with that name share; [New] makes a private one. There are no parameters.
package memlock

import (
	"context"
	"errors"
	"fmt"
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
	sweep int    // number of keys at which expired ones are looked for
}

// NewStore returns an empty store.
func NewStore() *Store {
	return &Store{keys: map[string]*entry{}, sweep: minSweep}
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
	claim backend.Claim // of the holder; Token is empty if there is none
	fence uint64
	since time.Time
	until time.Time
	queue []*waiter
}

// waiter is a place in the queue.
type waiter struct {
	claim backend.Claim
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
	if e.held(now) || len(e.queue) > 0 {
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
	e.queue = append(e.queue, w)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		now := time.Now()
		s.advance(e, now)
		if w.grant != nil {
			s.mu.Unlock()
			return *w.grant, nil
		}
		if err := errors.Join(ctx.Err(), d.ended()); err != nil {
			refusal := e.refusal(now)
			s.quit(e, w, now)
			s.mu.Unlock()
			if ctx.Err() == nil {
				return backend.Grant{}, err
			}
			return backend.Grant{}, refusal
		}
		var expiry <-chan time.Time
		if e.queue[0] == w {
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

// Release hands the key to the first in the queue.
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
	e.claim.Token = ""
	s.advance(e, now)
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
	for _, w := range e.queue {
		st.Waiters = append(st.Waiters, w.claim.Owner)
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
		e.claim.Token = ""
		s.advance(e, time.Now())
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

// minSweep is how many keys there are at least when expired ones are looked
// for. They are those that a holder has lost and never unlocked.
const minSweep = 1024

// entry returns the entry of key, new if need be.
func (s *Store) entry(key string, now time.Time) *entry {
	e := s.keys[key]
	if e != nil {
		return e
	}
	if len(s.keys) >= s.sweep {
		for k, e := range s.keys {
			s.drop(k, e, now)
		}
		s.sweep = max(minSweep, 2*len(s.keys))
	}
	e = &entry{}
	s.keys[key] = e
	return e
}

// drop forgets key if nobody holds it or waits for it.
func (s *Store) drop(key string, e *entry, now time.Time) {
	if !e.held(now) && len(e.queue) == 0 {
		delete(s.keys, key)
	}
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

// advance hands the key to the first in the queue if nobody holds it, has a
// new first one watch the holder's term, and forgets a key that is free.
func (s *Store) advance(e *entry, now time.Time) {
	if e.held(now) {
		return
	}
	if len(e.queue) == 0 {
		if e.claim.Key != "" {
			s.drop(e.claim.Key, e, now)
		}
		return
	}
	w := e.queue[0]
	e.queue[0] = nil
	e.queue = e.queue[1:]
	g := s.give(e, w.claim, now)
	w.grant = &g
	w.signal()
	if len(e.queue) > 0 {
		e.queue[0].signal()
	}
}

// quit gives up a place in the queue.
func (s *Store) quit(e *entry, w *waiter, now time.Time) {
	first := e.queue[0] == w
	for i := range e.queue {
		if e.queue[i] == w {
			e.queue = append(e.queue[:i], e.queue[i+1:]...)
			break
		}
	}
	if first && len(e.queue) > 0 {
		e.queue[0].signal()
	}
	s.drop(w.claim.Key, e, now)
}

func (w *waiter) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}
