// Package memlock keeps locks in the memory of one process.
//
// It excludes all callers in the process that use the same store, and serves them in order of
// arrival. It has terms, fences and all other features of the strategies for several processes. It
// is meant for tests, for programs that run as one process today, and as a model for new drivers.
// Other processes are not excluded.
//
// A call costs no round trip. A key without a holder or a waiter takes no memory, unless its last
// hold expired without a release. The store removes such a hold when a caller wants the key. The
// store removes all such holds when it has at least 1,024 keys, and at least twice as many keys as
// the last removal left.
//
// The URL memlock:// or memlock://NAME names a store that all Clients of the process with that URL
// share. NAME has no colon. The Client of [New] has a store of its own. The URL has no parameters.
package memlock

import (
	"cmp"
	"container/list"
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// Store is the memory that several drivers of one process can share. The zero value is an empty
// store.
type Store struct {
	mu    sync.Mutex // guards the fields below, and every entry and waiter
	keys  map[string]*entry
	fence uint64 // the last fence; one counter for all keys, so that a free key needs no entry
	limit int    // when len(keys) reaches this number, the next new key removes expired holds
}

// minLimit is the smallest limit of a Store after its first sweep.
const minLimit = 1024

// Driver returns a new driver on s. Each Client needs a driver of its own.
func (s *Store) Driver() backend.Driver { return newDriver(s) }

func newDriver(s *Store) *driver { return &driver{store: s, closed: make(chan struct{})} }

// New returns a Client whose locks are in a store of its own. If o is nil, the defaults apply.
func New(o *hasp.Options) (*hasp.Client, error) { return hasp.New(NewDriver(), o) }

// NewDriver returns a driver on a store of its own, without a Client. It is for the conformance
// suite, or for a wrapper that is passed to [hasp.New].
func NewDriver() backend.Driver { return new(Store).Driver() }

// driver is a [backend.Driver] on a [Store]. It is a Waiter that serves callers in order of
// arrival. It is also an Inspector and a Lister, and grants fences.
type driver struct {
	store  *Store
	once   sync.Once     // so that Close closes the channel only once
	closed chan struct{} // closed by Close
}

var (
	_ backend.Waiter    = (*driver)(nil)
	_ backend.Inspector = (*driver)(nil)
	_ backend.Lister    = (*driver)(nil)
)

var errClosed = errors.New("memlock: driver is closed")

// Traits reports all that a driver can do, within one process.
func (d *driver) Traits() backend.Traits {
	return backend.Traits{
		Ordered: true,
		Fenced:  true,
		MinHold: true,
		Shared:  true,
		Reach:   backend.Process,
	}
}

// Acquire takes the key if the key has no waiter, and is free for the claim c.
func (d *driver) Acquire(_ context.Context, c backend.Claim) (backend.Grant, error) {
	if err := d.closedErr(); err != nil {
		return backend.Grant{}, err
	}

	s := d.store
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	e := s.entryLocked(c.Key, now)
	if e.queue.Len() > 0 || !e.freeFor(c, now) {
		// If callers wait, refuse c even if the term has just ended. The timer of the first waiter
		// is about to fire, and that waiter must get the key.
		return backend.Grant{}, e.refusal(now)
	}
	return s.grantLocked(e, c, now), nil
}

// Wait queues for the key, and returns when the key is handed to c. If ctx ends, Wait leaves the
// queue, and returns a HeldError.
func (d *driver) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if err := d.closedErr(); err != nil {
		return backend.Grant{}, err
	}

	s := d.store
	w := &waiter{claim: c, wake: make(chan struct{}, 1)}
	s.mu.Lock()
	e := s.entryLocked(c.Key, time.Now())
	w.place = e.queue.PushBack(w)
	s.mu.Unlock() // from now on, any caller may hand the key to w

	timer := time.NewTimer(0) // is reset before each use
	defer timer.Stop()

	for {
		g, rest, err := d.poll(ctx, e, w)
		if err != nil {
			return backend.Grant{}, err
		}
		if g != nil {
			return *g, nil
		}

		// Only the first waiter needs a timer. The others get a signal when they become first.
		var expired <-chan time.Time
		if rest > 0 {
			timer.Reset(rest)
			expired = timer.C
		}

		select { // whatever has happened, poll finds out
		case <-w.wake:
		case <-expired:
		case <-ctx.Done():
		case <-d.closed:
		}
	}
}

// poll returns the grant of the waiter w, if it has the key now, or the error that ends the wait of
// w. Otherwise both are nil, and the wait goes on. If w is the first waiter, rest is then the rest
// of a holder's term, after which w must call poll again. For the other waiters rest is 0.
func (d *driver) poll(
	ctx context.Context, e *entry, w *waiter,
) (g *backend.Grant, rest time.Duration, err error) {
	s := d.store
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()

	// If the holder's term has ended, hand the key over. Do not touch e if w was granted the key
	// before: that hold may have ended before w woke, and the key may have another entry. While w
	// is queued, e stays in the map.
	if w.grant == nil && e.freeFor(e.first().claim, now) {
		s.advanceLocked(e, now)
	}
	if w.grant != nil {
		return w.grant, 0, nil
	}

	// The key is held by another claim. If the wait ends, w leaves the queue. So nothing of it
	// stays in the store, and the refusal is definite.
	if ctx.Err() != nil {
		err = e.refusal(now)
	} else {
		err = d.closedErr()
	}
	if err != nil {
		e.queue.Remove(w.place)
		s.advanceLocked(e, now) // shared waiters behind w may join the readers now
		return nil, 0, err
	}

	if e.first() != w {
		return nil, 0, nil
	}
	if r := e.reader(now); r != nil {
		return nil, r.until.Sub(now), nil // any reader will do, because w then calls poll again
	}
	return nil, e.until.Sub(now), nil
}

// Renew prolongs the terms of cs, one after the other.
func (d *driver) Renew(
	ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error),
) {
	for i, c := range cs {
		if ctx.Err() != nil {
			return
		}
		g, err := d.renew(c)
		done(i, g, err) // do not hold mu here, because the function done may be any code
	}
}

// renew prolongs the term of one hold. The error is ErrLost if the term has ended.
func (d *driver) renew(c backend.Claim) (backend.Grant, error) {
	if err := d.closedErr(); err != nil {
		return backend.Grant{}, err
	}

	s := d.store
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	e, r := s.findHoldLocked(c, now)
	if e == nil {
		return backend.Grant{}, backend.ErrLost
	}

	// Keep the later end, because a renewal never shortens a term.
	g := backend.Grant{Fence: e.fence, Until: trustedUntil(now, c.TTL)}
	until := now.Add(c.TTL)
	if r != nil {
		g.Fence = r.fence
		r.until = later(r.until, until)
	} else {
		e.until = later(e.until, until)
	}
	return g, nil
}

// minHoldToken replaces the token of a hold that was released with KeepUntil. No claim has this
// token, because tokens have only URL-safe characters.
const minHoldToken = "(kept)"

// Release hands the key to the first waiter. If c.KeepUntil is set, the first waiter receives the
// key at that time.
func (d *driver) Release(_ context.Context, c backend.Claim) error {
	if err := d.closedErr(); err != nil {
		return err
	}

	s := d.store
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	e, r := s.findHoldLocked(c, now)
	switch {
	case e == nil:
		return backend.ErrLost
	case r != nil: // a shared hold, on which KeepUntil has no effect
		delete(e.readers, c.Token)
	case c.KeepUntil.After(now):
		e.claim.Token = minHoldToken
		e.until = c.KeepUntil
	default:
		e.claim.Token = "" // the key has no exclusive holder any more
	}
	s.advanceLocked(e, now)
	return nil
}

// Inspect returns the holder and the waiters of key.
func (d *driver) Inspect(_ context.Context, key string) (backend.Status, error) {
	var st backend.Status
	if err := d.closedErr(); err != nil {
		return st, err
	}

	s := d.store
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.keys[key]; e != nil {
		st = e.status(time.Now())
	}
	return st, nil
}

// pageSize is how many keys List looks at before it lets other calls go on.
const pageSize = 256

// List yields the keys in no particular order. It looks at 256 keys at a time.
func (d *driver) List(
	ctx context.Context, prefix string, _ time.Duration,
) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		s := d.store
		if err := cmp.Or(ctx.Err(), d.closedErr()); err != nil {
			yield(backend.Entry{}, err)
			return
		}

		s.mu.Lock()
		defer s.mu.Unlock()
		yieldUnlocked := func(e backend.Entry, err error) bool {
			s.mu.Unlock()
			defer s.mu.Lock() // deferred, because yield may panic
			return yield(e, err)
		}

		n := 0
		for key, e := range s.keys {
			n++
			if n%pageSize == 0 {
				s.mu.Unlock() // lets other calls go on
				s.mu.Lock()
			}
			if err := cmp.Or(ctx.Err(), d.closedErr()); err != nil {
				yieldUnlocked(backend.Entry{}, err)
				return
			}

			// Look the key up again, because the store may have been unlocked since the last key.
			// The entry may be gone, and sweepLocked may have replaced the map that this loop
			// ranges over.
			if !strings.HasPrefix(key, prefix) || s.keys[key] != e {
				continue
			}
			st := e.status(time.Now())
			inUse := st.Held || len(st.Waiters) > 0 // not if the hold has expired without a release
			if inUse && !yieldUnlocked(backend.Entry{Key: key, Status: st}, nil) {
				return
			}
		}
	}
}

// Break takes the key from its holder and hands it to the first waiter.
func (d *driver) Break(_ context.Context, key string) error {
	if err := d.closedErr(); err != nil {
		return err
	}

	s := d.store
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.keys[key]; e != nil {
		e.claim.Token = "" // no exclusive holder
		e.readers = nil
		s.advanceLocked(e, time.Now())
	}
	return nil
}

// Close ends every Wait of this driver. The holds stay in the store.
func (d *driver) Close() error {
	d.once.Do(func() { close(d.closed) })
	return nil
}

// closedErr returns errClosed if Close was called, and otherwise nil.
func (d *driver) closedErr() error {
	select {
	case <-d.closed:
		return errClosed
	default:
		return nil
	}
}

// findHoldLocked returns the entry of c.Key if c.Token holds the key, and otherwise nil. If the
// hold is shared, findHoldLocked also returns the reader.
func (s *Store) findHoldLocked(c backend.Claim, now time.Time) (*entry, *reader) {
	// A hold whose term has ended is lost, even if the key is still free.
	e := s.keys[c.Key]
	if e == nil || !e.isHeld(now) {
		return nil, nil
	}
	if r := e.readers[c.Token]; r != nil && now.Before(r.until) {
		return e, r
	}
	if e.claim.Token == c.Token {
		return e, nil
	}
	return nil, nil
}

// entryLocked returns the entry of key, which it creates if there is none.
func (s *Store) entryLocked(key string, now time.Time) *entry {
	if e := s.keys[key]; e != nil {
		return e
	}

	if len(s.keys) >= s.limit {
		s.sweepLocked(now) // in the zero Store the limit is 0, so this creates the map
	}
	e := &entry{key: key}
	s.keys[key] = e
	return e
}

// grantLocked makes the claim c the holder of the key, or adds c to the readers. The key must be
// free for c.
func (s *Store) grantLocked(e *entry, c backend.Claim, now time.Time) backend.Grant {
	if !e.isHeld(now) {
		// Remove what is left of an earlier hold.
		e.claim = backend.Claim{}
		e.readers = nil
		e.until = now
		e.fence = 0
	}

	if c.Fenced {
		s.fence++
		e.fence = s.fence
	}
	if c.Shared {
		return e.enter(c, now)
	}

	e.claim = c
	e.since = now
	e.until = now.Add(c.TTL)
	return backend.Grant{Fence: e.fence, Until: trustedUntil(now, c.TTL)}
}

// advanceLocked must be called after each change of a hold or of the queue. It hands the key to the
// first waiter if the key is free for that waiter. If the first waiter is shared, the shared
// waiters directly behind it also receive the key. A free key without a waiter loses its entry.
func (s *Store) advanceLocked(e *entry, now time.Time) {
	for w := e.first(); w != nil && e.freeFor(w.claim, now); w = e.first() {
		e.queue.Remove(w.place)
		g := s.grantLocked(e, w.claim, now)
		w.grant = &g
		w.signal()
	}

	next := e.first()
	switch {
	case next != nil:
		// Make the waiter set its timer again. It may have become the first just now, or the timer
		// may run until the end of an old term.
		next.signal()
	case !e.isHeld(now):
		delete(s.keys, e.key)
		if s.limit > minLimit && len(s.keys) <= s.limit/8 {
			s.sweepLocked(now) // frees the memory of the map, which is now far too large
		}
	}
}

// sweepLocked removes the entries of holds that expired without a release. The other entries move
// to a new map, because a map keeps the memory of its largest size.
func (s *Store) sweepLocked(now time.Time) {
	keys := map[string]*entry{}
	for key, e := range s.keys {
		if e.isHeld(now) || e.queue.Len() > 0 {
			keys[key] = e
		}
	}
	s.keys = keys
	s.limit = max(minLimit, 2*len(keys))
}

// entry is a key that has a holder or waiters.
type entry struct {
	key   string
	claim backend.Claim // the exclusive holder's claim; Token is empty if there is no such holder
	fence uint64        // the largest fence of the holders, or 0
	since time.Time     // the time at which the exclusive hold began
	until time.Time     // the time at which the term of the exclusive hold ends
	queue list.List     // the waiters (of type *waiter) in order of arrival

	// readers maps tokens to the holders of shared holds. The terms of some may have ended.
	readers map[string]*reader
}

// isHeld reports whether the key has a holder.
func (e *entry) isHeld(now time.Time) bool {
	isExclusive := e.claim.Token != "" && now.Before(e.until)
	return isExclusive || e.reader(now) != nil
}

// reader returns a reader whose term has not ended, or nil. It removes readers whose terms have
// ended, so that dead readers do not add up.
func (e *entry) reader(now time.Time) *reader {
	for token, r := range e.readers {
		if now.Before(r.until) {
			return r
		}
		delete(e.readers, token)
	}
	return nil
}

// rest returns the rest of the holder's term, or of the longest term of the readers. If the key has
// readers, until lies in the past: see grantLocked.
func (e *entry) rest(now time.Time) time.Duration {
	until := e.until
	for _, r := range e.readers {
		until = later(until, r.until)
	}
	return until.Sub(now)
}

// freeFor reports whether the key has no holder that excludes c.
func (e *entry) freeFor(c backend.Claim, now time.Time) bool {
	joins := c.Shared && len(e.readers) > 0 // if all readers' terms have ended, isHeld is false
	return !e.isHeld(now) || joins
}

// status returns what Inspect and List say of the key. It names 1,000 readers at most.
func (e *entry) status(now time.Time) (st backend.Status) {
	const maxShown = 1000
	if e.isHeld(now) {
		st = backend.Status{Held: true, TTL: e.rest(now), Fence: e.fence}
		if len(e.readers) == 0 {
			st.Owner = e.claim.Owner
			st.Since = e.since.Round(0) // without the monotonic clock, as other strategies return it
			st.Kept = e.isMinHold()
		}
		for _, r := range e.readers {
			if now.Before(r.until) && len(st.Shared) < maxShown {
				st.Shared = append(st.Shared, r.owner)
			}
		}
	}

	for p := e.queue.Front(); p != nil; p = p.Next() {
		st.Waiters = append(st.Waiters, p.Value.(*waiter).claim.Owner)
	}
	return st
}

// refusal returns a HeldError, which names the holder, or one of the readers. If the key has no
// holder, the error names none, because the caller is refused for the sake of callers that wait.
func (e *entry) refusal(now time.Time) *backend.HeldError {
	he := &backend.HeldError{}
	if e.isHeld(now) {
		he.Owner = e.claim.Owner
		he.RetryAfter = e.rest(now)
		he.Waited = e.claim.Waited
		he.Kept = e.isMinHold()
	}
	if r := e.reader(now); r != nil {
		he.Owner = r.owner
		he.Shared = true
	}
	return he
}

// first returns the first waiter, or nil.
func (e *entry) first() *waiter {
	if p := e.queue.Front(); p != nil {
		return p.Value.(*waiter)
	}
	return nil
}

// enter adds c to the readers. If c asks for a fence, its fence is e.fence, which is new.
func (e *entry) enter(c backend.Claim, now time.Time) backend.Grant {
	r := &reader{owner: c.Owner, until: now.Add(c.TTL)}
	g := backend.Grant{Until: trustedUntil(now, c.TTL)}
	if c.Fenced {
		r.fence = e.fence
		g.Fence = e.fence
	}

	if e.readers == nil {
		e.readers = map[string]*reader{}
	}
	e.readers[c.Token] = r
	return g
}

// isMinHold reports whether the hold was released with KeepUntil.
func (e *entry) isMinHold() bool { return e.claim.Token == minHoldToken }

// reader is one holder of a shared hold.
type reader struct {
	owner string
	fence uint64
	until time.Time // when its term ends
}

// waiter is a place in the queue.
type waiter struct {
	claim backend.Claim
	place *list.Element  // its place in the entry's queue, until grant is set
	grant *backend.Grant // nil until the key is handed to this waiter
	wake  chan struct{}  // signals a grant, or that the waiter is now first; has room for one signal
}

// signal wakes the waiter. One pending signal is enough, because the waiter reads the state under
// mu after it wakes.
func (w *waiter) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// trustedUntil returns the time until which the holder may trust a term that begins now.
func trustedUntil(now time.Time, ttl time.Duration) time.Time {
	return now.Add(ttl - backend.Drift(ttl))
}

// later returns the later of two times.
func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

func init() { hasp.Register("memlock", open) }

// byName has the stores of URLs, under the names in these URLs.
var byName = struct {
	sync.Mutex // guards stores
	stores     map[string]*Store
}{stores: map[string]*Store{}}

// open opens the driver of a URL, whose only node, if any, is the name of a store.
func open(_ context.Context, c hasp.Config) (backend.Driver, error) {
	if len(c.Nodes) > 1 {
		return nil, fmt.Errorf("%w: memlock takes one node, the name of a store, not %d",
			hasp.ErrInvalid, len(c.Nodes))
	}

	name := ""
	if len(c.Nodes) == 1 {
		name = c.Nodes[0]
	}
	if strings.Contains(name, ":") { // probably the address of a server
		return nil, fmt.Errorf("%w: memlock has no transport and no server: "+
			"want memlock:// or memlock://NAME", hasp.ErrInvalid)
	}

	// Several Clients may open the same name at the same time. They must share one store.
	byName.Lock()
	defer byName.Unlock()
	s := byName.stores[name]
	if s == nil {
		s = new(Store)
		byName.stores[name] = s
	}
	return s.Driver(), nil
}
