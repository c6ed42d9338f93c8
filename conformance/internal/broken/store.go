package broken

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
)

// window is how long a place in a queue stays after its waiter's last poll.
const window = 900 * time.Millisecond

// store is a lock server in memory. It is correct unless a fault changes it. Drivers reach the
// store over connections of the type way, which can be cut.
type store struct {
	mu       sync.Mutex // guards the fields below
	keys     map[string]*record
	fences   map[string]uint64
	running  bool
	ways     map[string]*way // maps addresses, which Open receives, to connection paths
	commands atomic.Int64
	flushes  atomic.Int64             // how often Flush was called
	changed  map[string]chan struct{} // for each key: closed when the key may be free
	ended    context.Context          // ends with the store, and ends goroutines of faults
	end      context.CancelFunc

	// Faults replace these parts.
	count func(last uint64, now time.Time) uint64 // returns the next fence
	lose  func(data bool)                         // drops what a restart loses
	stay  time.Duration                           // how long a place stays after a poll
	delay time.Duration                           // how long after an expiry the key is refused
}

// record is a key that is held or waited for.
type record struct {
	hold              // the exclusive hold
	barred  time.Time // no caller gets the key before this time
	queue   []queued
	readers []hold // the shared holds
	writer  queued // a writer that waits for readers; it keeps new readers out until writer.alive
}

// hold is one hold of a key, or none if token is empty.
type hold struct {
	token, owner string
	since, until time.Time
	fence        uint64
}

// queued is a waiter in a queue. Its place expires at the time in the field alive.
type queued struct {
	token, owner string
	alive        time.Time
	shared       bool
}

func newStore() *store {
	s := &store{keys: map[string]*record{}, fences: map[string]uint64{}, running: true,
		changed: map[string]chan struct{}{}, stay: window}
	s.ways = map[string]*way{"": newWay(s)}
	s.ended, s.end = context.WithCancel(context.Background())

	// Use the clock, so that fences grow even if the last fence is lost.
	s.count = func(last uint64, now time.Time) uint64 {
		return max(last+1, uint64(now.UnixMicro()))
	}
	s.lose = func(data bool) {
		if !data {
			clear(s.keys)
			clear(s.fences)
		}
	}

	return s
}

var errDown = errors.New("broken: store is down")

// do runs a command, unless the store is stopped.
func (s *store) do(f func(now time.Time)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.running {
		return errDown
	}
	s.commands.Add(1)
	f(time.Now())
	return nil
}

func (s *store) locked(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *store) stop() { s.locked(func() { s.running = false }) }

func (s *store) start(data bool) {
	s.locked(func() {
		s.running = true
		s.lose(data)
		for key := range s.changed {
			s.signal(key)
		}
	})
}

// get returns the record of key, or a new record. It drops holds and places that have ended. It
// never removes a record, because a store lasts for one run of the suite.
func (s *store) get(key string, now time.Time) *record {
	r := s.keys[key]
	if r == nil {
		r = &record{}
		s.keys[key] = r
	}

	for _, h := range r.holds() {
		if h.token != "" && !now.Before(h.until) {
			h.token, r.barred = "", h.until.Add(s.delay)
		}
	}

	r.readers = slices.DeleteFunc(r.readers, func(h hold) bool { return h.token == "" })
	r.queue = slices.DeleteFunc(r.queue, func(p queued) bool { return !now.Before(p.alive) })
	if !now.Before(r.writer.alive) {
		r.writer = queued{}
	}
	return r
}

// holds returns the exclusive hold, and after it the shared holds.
func (r *record) holds() []*hold {
	all := []*hold{&r.hold}
	for i := range r.readers {
		all = append(all, &r.readers[i])
	}
	return all
}

// signal wakes the waiters for key.
func (s *store) signal(key string) {
	if c := s.changed[key]; c != nil {
		close(c)
		delete(s.changed, key)
	}
}

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

func (r *record) refusal(now time.Time) error {
	if len(r.readers) > 0 {
		rest := r.lastReader().Sub(now)
		return &backend.HeldError{RetryAfter: rest, Owner: r.readers[0].owner, Shared: true}
	}
	if r.token == "" {
		return &backend.HeldError{}
	}
	return &backend.HeldError{RetryAfter: r.until.Sub(now), Owner: r.owner}
}

// lastReader returns the time at which the last shared hold ends.
func (r *record) lastReader() (until time.Time) {
	for _, h := range r.readers {
		if h.until.After(until) {
			until = h.until
		}
	}
	return until
}

// free reports whether no hold refuses c.
func (r *record) free(c backend.Claim) bool {
	return r.token == "" && (c.Shared || len(r.readers) == 0)
}

// command is one command that a driver sends to the store.
type command struct {
	*store
	d   *driver
	c   backend.Claim // the claim as the store receives it
	r   *record       // the key's record
	now time.Time
}

// effect is what a command does in the store. Only a grant has a fence.
type effect = func(x *command) (fence uint64, err error)

// own returns the hold of the claim's token, or nil. It searches the holds of the claim's kind,
// shared or exclusive.
func (x *command) own() *hold {
	for i, h := range x.r.holds() {
		if x.c.Shared == (i > 0) && h.token != "" && x.d.mine(x.c, h.token) {
			return h
		}
	}
	return nil
}

// refuse returns the refusal of the claim. If the argument waits is true and readers refuse a
// writer, the writer keeps new readers out for twice the time in the field stay.
func (x *command) refuse(waits bool) error {
	if waits && !x.c.Shared && len(x.r.readers) > 0 {
		// A caller that listens asks again after a second. Keep new readers out until then.
		x.r.writer = queued{token: x.c.Token, owner: x.c.Owner, alive: x.now.Add(2 * x.stay)}
	}
	return x.r.refusal(x.now)
}

// give grants the key without a check for other holds.
func (x *command) give() (fence uint64, err error) {
	if x.c.Fenced {
		x.fences[x.c.Key] = x.count(x.fences[x.c.Key], x.now)
		fence = x.fences[x.c.Key]
	}

	h := hold{x.c.Token, x.c.Owner, x.now, x.now.Add(x.c.TTL), fence}
	if x.c.Shared {
		x.r.readers = append(x.r.readers, h)
	} else {
		x.r.hold, x.r.writer = h, queued{}
	}
	return fence, nil
}

// acquire grants the key if no other token holds it and no other token waits for it.
func (x *command) acquire() (fence uint64, err error) {
	wanted := len(x.r.queue) > 0 || x.c.Shared && x.r.writer.token != ""
	if wanted || !x.r.free(x.c) || x.now.Before(x.r.barred) {
		return 0, x.refuse(x.c.WillRetry)
	}
	x.d.granted[x.c.Token] = x.c
	return x.give()
}

// look is a poll of a Wait. It grants the key if no token holds it and no waiter has a place before
// the claim. Otherwise, if the driver keeps the order of arrival, the claim takes or keeps its
// place. A poll of a claim that already holds the key is granted the key again.
func (x *command) look() (fence uint64, err error) {
	r := x.r
	c := x.c
	inQueue := x.d.kind == orders
	if h := x.own(); h != nil {
		return h.fence, nil
	}

	at := slices.IndexFunc(r.queue, func(p queued) bool { return p.token == c.Token })
	before := r.queue
	if at >= 0 {
		before = r.queue[:at]
	}

	// Readers with no writer between them in the queue get the key together.
	first := !slices.ContainsFunc(before, func(p queued) bool { return !c.Shared || !p.shared })
	if !inQueue && c.Shared && r.writer.token != "" {
		first = false
	}

	if r.free(c) && first {
		if at >= 0 {
			r.queue = slices.Delete(r.queue, at, at+1)
		}

		return x.give()
	}

	if !inQueue {
		return 0, x.refuse(true)
	}

	if at < 0 {
		at = len(r.queue)
		r.queue = append(r.queue, queued{})
	}

	r.queue[at] = queued{c.Token, c.Owner, x.now.Add(x.stay), c.Shared}
	return 0, x.refuse(false)
}

// quit removes the place in the queue and the hold of the claim.
func (x *command) quit() {
	for _, h := range x.r.holds() {
		if h.token == x.c.Token {
			h.token = ""
		}
	}

	if x.r.writer.token == x.c.Token {
		x.r.writer = queued{}
	}
	x.r.queue = slices.DeleteFunc(x.r.queue, func(p queued) bool { return p.token == x.c.Token })
	x.signal(x.c.Key)
}

func (x *command) renew() (fence uint64, err error) {
	h := x.own()
	if h == nil {
		return 0, backend.ErrLost
	}
	if until := x.now.Add(x.c.TTL); until.After(h.until) {
		h.until = until
	}
	return 0, nil
}

func (x *command) release() (fence uint64, err error) {
	if x.r.writer.token == x.c.Token {
		x.r.writer = queued{} // the writer no longer waits
	}
	h := x.own()
	if h == nil {
		return 0, backend.ErrLost
	}
	h.token = ""
	if x.c.KeepUntil.After(x.now) && !x.c.Shared {
		h.token, h.until = keptToken, x.c.KeepUntil
	}
	x.signal(x.c.Key)
	return 0, nil
}

func (x *command) breakKey() (fence uint64, err error) {
	x.r.hold, x.r.readers, x.r.writer = hold{}, nil, queued{}
	x.signal(x.c.Key)
	return 0, nil
}

// keptToken is the token that holds a key after a release with KeepUntil.
const keptToken = "(kept)"

func (s *store) inspect(key string, now time.Time) (st backend.Status) {
	r := s.get(key, now)
	if r.token != "" {
		st = backend.Status{Held: true, Owner: r.owner, Since: r.since, Fence: r.fence}
		st.TTL = r.until.Sub(now)
	}

	for _, h := range r.readers {
		st.Held = true
		st.TTL = r.lastReader().Sub(now)
		st.Fence = max(st.Fence, h.fence)
		st.Shared = append(st.Shared, h.owner)
	}

	for _, p := range r.queue {
		st.Waiters = append(st.Waiters, p.owner)
	}
	return st
}

// list returns up to n entries in the order of their keys, from the first key that is greater than
// the argument after. The result more reports whether further entries may follow.
func (s *store) list(prefix, after string, n int, now time.Time) (page []backend.Entry, more bool) {
	for _, key := range slices.Sorted(maps.Keys(s.keys)) {
		if key <= after || !strings.HasPrefix(key, prefix) {
			continue
		}
		if st := s.inspect(key, now); st.Held || len(st.Waiters) > 0 {
			page = append(page, backend.Entry{Key: key, Status: st})
		}
		if len(page) == n {
			return page, true
		}
	}

	return page, false
}

// entries lists the holds and places that have not expired.
func (s *store) entries() (all []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()

	for key := range s.keys {
		r := s.get(key, now)
		for _, h := range r.holds() {
			if h.token != "" {
				all = append(all, "hold of "+key)
			}
		}

		if r.writer.token != "" {
			all = append(all, "intent of "+r.writer.owner+" for "+key)
		}

		for _, p := range r.queue {
			all = append(all, "place of "+p.owner+" for "+key)
		}
	}

	return all
}

// latency is how long a command travels to the store. A reply takes as long.
const latency = 200 * time.Microsecond

// way is a driver's connection path to the store.
type way struct {
	store *store

	mu          sync.Mutex // guards the fields below
	state       conformance.LinkState
	changed     chan struct{}         // closed and replaced when state changes
	nextState   conformance.LinkState // Up if no change is due
	repliesLeft int                   // how many more replies are carried before nextState
}

func newWay(s *store) *way {
	return &way{
		store:     s,
		state:     conformance.Up,
		changed:   make(chan struct{}),
		nextState: conformance.Up,
	}
}

func (w *way) set(state conformance.LinkState) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nextState = conformance.Up
	w.setLocked(state)
}

// setAfter implements SetAfter of a [conformance.Link].
func (w *way) setAfter(replies int, state conformance.LinkState) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.setLocked(conformance.Up)
	w.nextState = state
	w.repliesLeft = replies
}

// count counts a carried reply. It begins the state that setAfter has set, when that is due.
func (w *way) count() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.nextState == conformance.Up {
		return
	}
	w.repliesLeft--
	if w.repliesLeft < 0 {
		w.setLocked(w.nextState)
		w.nextState = conformance.Up
	}
}

func (w *way) setLocked(state conformance.LinkState) {
	w.state = state
	close(w.changed)
	w.changed = make(chan struct{})
}

func (w *way) now() (conformance.LinkState, <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state, w.changed
}

var (
	errRefused = errors.New("broken: connection refused")
	errNoReply = errors.New("broken: connection lost before the reply")
)

// call lets the store run f, and returns when the reply arrives. If call returns an error, the
// caller does not know whether f has run.
func (w *way) call(ctx context.Context, f func(now time.Time)) error {
	if _, _, err := w.carries(ctx, errRefused); err != nil {
		return err
	}

	if err := pause(ctx, latency); err != nil {
		return err // the request was not sent
	}

	if err := w.store.do(f); err != nil {
		return err
	}

	w.count()
	state, changed, err := w.carries(ctx, errNoReply)
	switch {
	case err != nil:
		return err
	case state == conformance.Slow:
		return pause(ctx, conformance.Delay)
	case state == conformance.Up:
		return pause(ctx, latency)
	}

	// A Deaf link loses the reply, even if the link is Up later.
	select {
	case <-changed:
		return errNoReply
	case <-ctx.Done():
		return ctx.Err()
	}
}

// carries waits until the link is not Hung. It returns the link's state, and the channel that is
// closed when the state changes. If the link is Down, the error is the argument down.
func (w *way) carries(
	ctx context.Context, down error,
) (state conformance.LinkState, changed <-chan struct{}, err error) {
	for {
		switch state, changed = w.now(); state {
		case conformance.Down:
			return state, changed, down
		case conformance.Hung:
		default:
			return state, changed, nil
		}

		select {
		case <-changed:
		case <-ctx.Done():
			return state, changed, ctx.Err()
		}
	}
}

// link creates a connection path to the store, and returns a Link that controls it.
func (s *store) link() *conformance.Link {
	w := newWay(s)
	var name string
	s.locked(func() {
		name = fmt.Sprintf("link %d", len(s.ways))
		s.ways[name] = w
	})

	return &conformance.Link{
		Store:    name,
		Set:      w.set,
		SetAfter: w.setAfter,
		Close:    func() { w.set(conformance.Down) },
	}
}

func (s *store) endConnections() {
	s.locked(func() {
		for _, w := range s.ways {
			w.set(conformance.Down)
			w.set(conformance.Up)
		}
	})
}

// delivers reports whether messages of the store reach the driver.
func (w *way) delivers() bool {
	state, _ := w.now()
	return state == conformance.Up || state == conformance.Slow
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
