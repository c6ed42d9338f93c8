package broken

import (
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

// window is how long a place in a queue lasts after its waiter's last poll.
const window = 900 * time.Millisecond

// store is a correct lock server in memory with a clock of its own. Drivers reach
// it over a way that can be cut.
type store struct {
	mu       sync.Mutex // guards all below
	keys     map[string]*record
	fences   map[string]uint64
	running  bool
	ahead    time.Duration // of its clock
	commands int64
	flushes  int                      // of what is kept only for speed
	kicked   chan struct{}            // closed and replaced when all connections are ended
	changed  map[string]chan struct{} // by key: closed when it may be free
	ended    chan struct{}            // closed at the end; ends the goroutines that faults leave

	// Parts that faults replace.
	count func(last uint64, now time.Time) uint64 // fences
	lose  func(data bool)                         // drops what a restart loses
	stay  time.Duration                           // how long a place lasts
	delay time.Duration                           // the least time between the expiry of a hold and the next grant
}

// record is a key that is held or waited for.
type record struct {
	token, owner string
	since, until time.Time
	fence        uint64
	barred       time.Time // until then no caller gets the key
	queue        []place
}

// place is one waiter's in a queue.
type place struct {
	token, owner string
	alive        time.Time
}

func newStore() *store {
	s := &store{keys: map[string]*record{}, fences: map[string]uint64{}, running: true,
		changed: map[string]chan struct{}{}, ended: make(chan struct{}), kicked: make(chan struct{}), stay: window}

	// Fences that go by the clock grow also when the counter is lost.
	s.count = func(last uint64, now time.Time) uint64 { return max(last+1, uint64(now.UnixMicro())) }
	s.lose = func(data bool) {
		if !data {
			clear(s.keys)
			clear(s.fences)
		}
	}
	return s
}

var errDown = errors.New("broken: store is down")

// do runs one command.
func (s *store) do(f func(now time.Time)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.running {
		return errDown
	}
	s.commands++
	f(time.Now().Add(s.ahead))
	return nil
}

// locked runs f with the lock of s.
func (s *store) locked(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *store) stop() { s.locked(func() { s.running = false }) }

// start makes the store answer again.
func (s *store) start(data bool) {
	s.locked(func() {
		s.running = true
		s.lose(data)
		for key := range s.changed {
			s.signal(key)
		}
	})
}

// get returns the record of key, or a new one. It first removes what has expired.
func (s *store) get(key string, now time.Time) *record {
	r := s.keys[key]
	if r == nil {
		r = &record{}
		s.keys[key] = r
	}
	if r.token != "" && !now.Before(r.until) {
		r.token, r.barred = "", r.until.Add(s.delay)
	}
	r.queue = slices.DeleteFunc(r.queue, func(p place) bool { return !now.Before(p.alive) })
	return r
}

// put removes an empty record.
func (s *store) put(key string, r *record) {
	if r.token == "" && len(r.queue) == 0 && s.delay == 0 {
		delete(s.keys, key)
	}
}

// signal wakes the waiters for key.
func (s *store) signal(key string) {
	if c := s.changed[key]; c != nil {
		close(c)
		delete(s.changed, key)
	}
}

// watch returns a channel that is closed when key may be free.
func (s *store) watch(key string) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.changed[key]
	if c == nil {
		c = make(chan struct{})
		s.changed[key] = c
	}
	return c
}

// with runs f on the record of key.
func (s *store) with(key string, now time.Time, f func(r *record)) {
	r := s.get(key, now)
	defer s.put(key, r)
	f(r)
}

func (r *record) refusal(now time.Time) error {
	if r.token == "" {
		return &backend.HeldError{}
	}
	return &backend.HeldError{RetryAfter: r.until.Sub(now), Owner: r.owner}
}

// give makes c the holder of a key that is free.
func (s *store) give(r *record, c backend.Claim, now time.Time) (fence uint64) {
	r.token, r.owner, r.since, r.until, r.fence = c.Token, c.Owner, now, now.Add(c.TTL), 0
	if c.Fenced {
		s.fences[c.Key] = s.count(s.fences[c.Key], now)
		r.fence = s.fences[c.Key]
	}
	return r.fence
}

// acquire grants a key to c if no token holds it or waits for it.
func (s *store) acquire(c backend.Claim, now time.Time) (fence uint64, err error) {
	r := s.get(c.Key, now)
	defer s.put(c.Key, r)
	if r.token != "" || len(r.queue) > 0 || now.Before(r.barred) {
		return 0, r.refusal(now)
	}
	return s.give(r, c, now), nil
}

// look is the poll of a Wait. It grants the key to c if no token holds it and no
// place is before c's place. Otherwise, if inQueue, it takes or keeps c's place. It
// may be repeated.
func (s *store) look(c backend.Claim, inQueue bool, now time.Time) (fence uint64, err error) {
	r := s.get(c.Key, now)
	defer s.put(c.Key, r)
	if r.token == c.Token {
		return r.fence, nil
	}

	at := slices.IndexFunc(r.queue, func(p place) bool { return p.token == c.Token })
	if r.token == "" && (at == 0 || len(r.queue) == 0) {
		r.queue = r.queue[min(1, len(r.queue)):]
		return s.give(r, c, now), nil
	}

	if !inQueue {
		return 0, r.refusal(now)
	}
	if at < 0 {
		at = len(r.queue)
		r.queue = append(r.queue, place{})
	}

	// Each poll keeps the place for another while.
	r.queue[at] = place{c.Token, c.Owner, now.Add(s.stay)}
	return 0, r.refusal(now)
}

// quit removes c's place in the queue, or its hold.
func (s *store) quit(c backend.Claim, now time.Time) {
	r := s.get(c.Key, now)
	defer s.put(c.Key, r)
	if r.token == c.Token {
		r.token = ""
	}
	r.queue = slices.DeleteFunc(r.queue, func(p place) bool { return p.token == c.Token })
	s.signal(c.Key)
}

// renew prolongs the hold of a key if mine accepts its token.
func (s *store) renew(c backend.Claim, mine func(token string) bool, now time.Time) error {
	r := s.get(c.Key, now)
	defer s.put(c.Key, r)
	if r.token == "" || !mine(r.token) {
		return backend.ErrLost
	}
	if until := now.Add(c.TTL); until.After(r.until) {
		r.until = until
	}
	return nil
}

// release ends the hold of a key if mine accepts its token.
func (s *store) release(c backend.Claim, mine func(token string) bool, now time.Time) error {
	r := s.get(c.Key, now)
	defer s.put(c.Key, r)
	if r.token == "" || !mine(r.token) {
		return backend.ErrLost
	}
	r.token = ""
	if c.KeepUntil.After(now) {
		r.token, r.until = keptToken, c.KeepUntil
	}
	s.signal(c.Key)
	return nil
}

// keptToken holds a key that was released with KeepUntil.
const keptToken = "(kept)"

func (s *store) inspect(key string, now time.Time) (st backend.Status) {
	r := s.get(key, now)
	defer s.put(key, r)
	if r.token != "" {
		st = backend.Status{Held: true, Owner: r.owner, Since: r.since, TTL: r.until.Sub(now), Fence: r.fence}
	}
	for _, p := range r.queue {
		st.Waiters = append(st.Waiters, p.owner)
	}
	return st
}

// entries lists the holds and places that have not expired.
func (s *store) entries() (all []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now().Add(s.ahead)

	for key := range s.keys {
		r := s.get(key, now)
		if r.token != "" {
			all = append(all, "hold of "+key)
		}
		for _, p := range r.queue {
			all = append(all, "place of "+p.owner+" for "+key)
		}
		s.put(key, r)
	}
	return all
}
