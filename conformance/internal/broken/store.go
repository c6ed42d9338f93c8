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

// window is how long a place in a queue lasts after its waiter's last poll.
const window = 900 * time.Millisecond

// store is a correct lock server in memory with a clock of its own. Drivers reach it over ways,
// which can be cut.
type store struct {
	mu       sync.Mutex // guards all below
	keys     map[string]*record
	fences   map[string]uint64
	running  bool
	ahead    time.Duration   // of its clock
	ways     map[string]*way // by the addresses that Open gets
	commands atomic.Int64
	flushes  atomic.Int64             // of what is kept only for speed
	changed  map[string]chan struct{} // by key: closed when it may be free
	asked    map[string]func(string)  // by the ID in a token: receives the keys for which refused callers ask
	ended    context.Context          // ends at the end, and ends the goroutines that faults leave
	end      context.CancelFunc

	// Faults replace these parts.
	count func(last uint64, now time.Time) uint64 // fences
	lose  func(data bool)                         // drops what a restart loses
	stay  time.Duration                           // how long a place lasts
	delay time.Duration                           // the time from the expiry of a hold to the next grant, at least
}

// record is a key that is held or waited for.
type record struct {
	hold              // the exclusive one
	barred  time.Time // until then no caller gets the key
	queue   []queued
	readers []hold // the shared holds
	writer  queued // a writer that waits for readers; keeps new readers out while it is alive
}

// hold is a hold of a key. Without a token there is none.
type hold struct {
	token, owner string
	since, until time.Time
	fence        uint64
}

// queued is a waiter in a queue.
type queued struct {
	token, owner string
	alive        time.Time
	shared       bool
}

func newStore() *store {
	s := &store{keys: map[string]*record{}, fences: map[string]uint64{}, running: true,
		changed: map[string]chan struct{}{}, asked: map[string]func(string){}, stay: window}
	s.ways = map[string]*way{"": newWay(s)}
	s.ended, s.end = context.WithCancel(context.Background())

	// Use the clock, so that fences grow even if the counter is lost.
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
	s.commands.Add(1)
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

// get returns the record of key, or a new one, without the holds and places that have ended.
// Records are never removed, because a store lasts for one run of the suite.
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

// holds returns the exclusive hold, and then the shared ones.
func (r *record) holds() []*hold {
	all := []*hold{&r.hold}
	for i := range r.readers {
		all = append(all, &r.readers[i])
	}
	return all
}

// find returns the hold whose token mine accepts, or nil.
func (r *record) find(shared bool, mine func(token string) bool) *hold {
	for i, h := range r.holds() {
		if shared == (i > 0) && h.token != "" && mine(h.token) {
			return h
		}
	}
	return nil
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

func (r *record) refusal(now time.Time) error {
	if len(r.readers) > 0 {
		return &backend.HeldError{RetryAfter: r.lastReader().Sub(now), Owner: r.readers[0].owner, Shared: true}
	}
	if r.token == "" {
		return &backend.HeldError{}
	}
	return &backend.HeldError{RetryAfter: r.until.Sub(now), Owner: r.owner}
}

// lastReader returns the end of the longest shared hold.
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

// command is one command of a driver at the store.
type command struct {
	*store
	d    *driver
	c    backend.Claim // in the form that the store gets
	r    *record       // of the key
	now  time.Time
	mine func(token string) bool // accepts the token of the claim's hold
}

// accepting returns x with another comparison of tokens.
func (x *command) accepting(mine func(token string) bool) *command {
	x.mine = mine
	return x
}

// anyToken accepts every token.
func anyToken(string) bool { return true }

// refuse returns the refusal of a claim. If the claim is a writer that waits for readers, it keeps
// new readers out from now on.
func (x *command) refuse(waits bool) error {
	if waits && !x.c.Shared && len(x.r.readers) > 0 {
		// Last until the next attempt, because a caller that listens asks once a second.
		x.r.writer = queued{token: x.c.Token, owner: x.c.Owner, alive: x.now.Add(2 * x.stay)}
	}
	if id, ok := backend.RecallID(x.r.token); ok && x.asked[id] != nil {
		x.asked[id](x.c.Key)
	}
	return x.r.refusal(x.now)
}

// give makes the claim a holder of the key, without a check for other holds.
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

// acquire grants the key if no token holds it or waits for it.
func (x *command) acquire() (fence uint64, err error) {
	if !x.r.free(x.c) || len(x.r.queue) > 0 || x.now.Before(x.r.barred) || x.c.Shared && x.r.writer.token != "" {
		return 0, x.refuse(x.c.WillRetry)
	}
	x.d.granted[x.c.Token] = x.c
	return x.give()
}

// look is the poll of a Wait, and may be repeated. It grants the key if no token holds it and no
// place is before the claim's. Otherwise, if the driver keeps the order, it takes or keeps the
// claim's place.
func (x *command) look() (fence uint64, err error) {
	r, c, inQueue := x.r, x.c, x.d.kind == orders
	if h := r.find(c.Shared, func(token string) bool { return token == c.Token }); h != nil {
		return h.fence, nil
	}

	at := slices.IndexFunc(r.queue, func(p queued) bool { return p.token == c.Token })
	before := r.queue
	if at >= 0 {
		before = r.queue[:at]
	}

	// Readers that stand together get the key together.
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

// quit removes the claim's place in the queue, or its hold.
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

// renew prolongs the hold of the claim.
func (x *command) renew() (fence uint64, err error) {
	h := x.r.find(x.c.Shared, x.mine)
	if h == nil {
		return 0, backend.ErrLost
	}
	if until := x.now.Add(x.c.TTL); until.After(h.until) {
		h.until = until
	}
	return 0, nil
}

// release ends the hold of the claim.
func (x *command) release() (fence uint64, err error) {
	if x.r.writer.token == x.c.Token {
		x.r.writer = queued{} // it waits no more
	}
	h := x.r.find(x.c.Shared, x.mine)
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

// breakKey ends all holds of the key.
func (x *command) breakKey() (fence uint64, err error) {
	x.r.hold, x.r.readers, x.r.writer = hold{}, nil, queued{}
	x.signal(x.c.Key)
	return 0, nil
}

// keptToken holds a key that was released with KeepUntil.
const keptToken = "(kept)"

func (s *store) inspect(key string, now time.Time) (st backend.Status) {
	r := s.get(key, now)
	if r.token != "" {
		st = backend.Status{Held: true, Owner: r.owner, Since: r.since, TTL: r.until.Sub(now), Fence: r.fence}
	}
	for _, h := range r.readers {
		st.Held, st.TTL, st.Fence = true, r.lastReader().Sub(now), max(st.Fence, h.fence)
		st.Shared = append(st.Shared, h.owner)
	}
	for _, p := range r.queue {
		st.Waiters = append(st.Waiters, p.owner)
	}
	return st
}

// list returns up to n keys that begin with prefix and sort after the key after, and whether there
// may be more.
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
	now := time.Now().Add(s.ahead)

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

// latency is how long a command takes to reach the store, and a reply to come back.
const latency = 200 * time.Microsecond

// way is a driver's connection path to the store.
type way struct {
	store *store

	mu      sync.Mutex // guards all below
	state   conformance.LinkState
	changed chan struct{}         // closed and replaced when state changes
	then    conformance.LinkState // the state after the next left replies, if not Up
	left    int
}

func newWay(s *store) *way {
	return &way{store: s, state: conformance.Up, then: conformance.Up, changed: make(chan struct{})}
}

func (w *way) set(state conformance.LinkState) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.then = conformance.Up
	w.setLocked(state)
}

// setAfter is the SetAfter of a [conformance.Link].
func (w *way) setAfter(replies int, state conformance.LinkState) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.setLocked(conformance.Up)
	w.then, w.left = state, replies
}

// count records that a reply was carried, for setAfter.
func (w *way) count() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.then == conformance.Up {
		return
	}
	if w.left--; w.left < 0 {
		w.state, w.then = w.then, conformance.Up
		w.setLocked(w.state)
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
	errRefused   = errors.New("broken: connection refused")
	errNoReply   = errors.New("broken: connection lost before the reply")
	errWrongType = errors.New("broken: a record of another type")
)

// call makes the store run f, and returns when the reply arrives. If it returns an error, f may
// have run or not.
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

	// A deaf link loses the reply for good.
	select {
	case <-changed:
		return errNoReply
	case <-ctx.Done():
		return ctx.Err()
	}
}

// carries waits until the link is not Hung, and returns its state and the channel of its next
// change. If the link is Down, the error is down.
func (w *way) carries(ctx context.Context, down error) (state conformance.LinkState, changed <-chan struct{}, err error) {
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

// link makes a new way.
func (s *store) link() *conformance.Link {
	w := newWay(s)
	var name string
	s.locked(func() {
		name = fmt.Sprintf("link %d", len(s.ways))
		s.ways[name] = w
	})
	return &conformance.Link{Store: name, Set: w.set, SetAfter: w.setAfter, Close: func() { w.set(conformance.Down) }}
}

// endConnections ends all connections.
func (s *store) endConnections() {
	s.locked(func() {
		for _, w := range s.ways {
			w.set(conformance.Down)
			w.set(conformance.Up)
		}
	})
}

// delivers reports whether messages of the store arrive.
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
