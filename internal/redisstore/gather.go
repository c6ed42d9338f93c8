package redisstore

import (
	"context"
	"errors"
	"net"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// gather sends the commands of concurrent callers to one server, in pipelines of go-redis. A
// goroutine, the flight, sends all commands that wait, receives their replies, and repeats this
// until no command waits. If a flight takes long, another flight sends the commands that wait
// meanwhile. Therefore a distant server, or a connection that dies without an error, delays few
// callers. A caller leaves as soon as its context ends. If its command is not in a pipeline yet,
// the command is not sent. Otherwise its reply is dropped.
type gather struct {
	*settings
	tasks   *tasks
	suspect func() // see finder.suspect
	// sends commands and follows redirections: the client of the Store
	rdb  redis.UniversalClient
	node redis.UniversalClient // the client of this process only; differs from rdb on a cluster
	// replicas must confirm the commands; then there is only one flight, because WAIT blocks the
	// connection
	confirm bool

	// *call; not shared by gathers, because a channel must stay in one bubble of testing/synctest
	calls sync.Pool

	mu      sync.Mutex // guards the fields below
	waiting []*call
	flights []*flight
	idle    []*flight     // for reuse; the one that was used last is at the end
	last    time.Time     // when the last pipeline was sent
	refused time.Time     // when a flight that could not connect gave its calls back
	doubt   time.Time     // a connection that was last used before this time may be dead
	failure error         // why no connection could be made; nil after a reply
	timer   *time.Timer   // runs the method tick; nil before the first call
	took    time.Duration // how long the last pipeline with replies, but without a wire, took
	next    time.Time     // when the timer fires; zero if it does not run
}

const (
	mostFlights = 6
	// so many calls that wait may start a second flight at once
	crowd = 16
	// how long a pipeline is under way before a second flight starts; each further one waits 4
	// times as long
	firstPause = time.Millisecond
	lastPause  = 256 * time.Millisecond // the longest of these times
	tickEvery  = 20 * time.Millisecond  // how often calls whose time is over are ended
	// how long no further flight starts after one could not connect
	refusal = time.Second
	// after this time without a reply, the sentinels may know a new master
	suspectAfter = 500 * time.Millisecond
)

// do sends commands, each once, in one pipeline, and stores their replies in the slice replies. If
// ctx ends first, do returns soon, and each reply is an error.
func (g *gather) do(ctx context.Context, replies []Reply, commands ...[]string) {
	p, ok := g.calls.Get().(*call)
	if !ok {
		p = &call{done: make(chan struct{}, 1)}
	}
	parent := p.fill(ctx, g.plain, commands)
	if f := g.put(p); f != nil {
		g.runByCaller(parent, f, p)
	} else {
		p.wait(parent)
	}

	p.store(replies)

	switch {
	case p.result.err == errNoReply: // do not reuse p, because a flight may still have it
		for i := range replies {
			replies[i].Err = g.noReply()
		}
	case !p.apart: // do not keep the memory of a large call
		*p = call{done: p.done, texts: p.texts[:0], args: p.args[:0]}
		g.calls.Put(p)
	}
}

// doApart is do in a pipeline that no other caller shares. If here is true, the pipeline goes to
// this process, whatever the keys are.
func (g *gather) doApart(ctx context.Context, here bool, replies []Reply, commands ...[]string) {
	p := &call{done: make(chan struct{}, 1), apart: true, here: here}
	p.fill(ctx, g.plain, commands)

	// Send on another goroutine, so that the caller can leave before the replies arrive.
	if !g.tasks.spawn(func() { p.answer(new(flight).send(g, []*call{p})) }) {
		p.answer(result{err: redis.ErrClosed})
	}
	p.wait(ctx) // with the deadline of ctx, because the method tick does not know this call
	p.store(replies)
}

// noReply returns the error of a caller that has left: errNoReply, with the reason why no
// connection could be made, if there is one.
func (g *gather) noReply() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.failure == nil {
		return errNoReply
	}
	return unreached{g.failure}
}

// put adds the call p. If no other call is in progress, put may return a flight that has p, and
// that the caller itself must run by the method runByCaller. Otherwise put returns nil, and another
// goroutine sends p.
func (g *gather) put(p *call) *flight {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.timer == nil {
		g.timer = time.AfterFunc(time.Hour, g.tick) // tickLocked sets the time
	}
	now := time.Now()
	by := now.Add(tickEvery) // when the method tick must run at the latest
	if !p.until.IsZero() {
		by = earlier(by, p.until)
	}

	// If no flight is in progress, start one at once, if possible on the caller's goroutine.
	if len(g.flights) == 0 {
		g.tickLocked(now, by)
		if f := g.forCallerLocked(p, now); f != nil {
			return f
		}
		g.waiting = append(g.waiting, p)
		g.startLocked()
		return nil
	}

	// Otherwise the flights in progress send p after their present pipelines. If these take long,
	// the method tick starts another flight.
	g.waiting = append(g.waiting, p)
	if len(g.waiting) == 1 { // only the first call that waits sets the time of another flight
		by = earlier(by, now.Add(g.pauseLocked()))
	} else if g.isCrowdLocked() {
		g.startLocked()
	}

	g.tickLocked(now, by)
	return nil
}

// tickLocked makes the timer fire at a time, unless it fires earlier.
func (g *gather) tickLocked(now, at time.Time) {
	if g.next.IsZero() || at.Before(g.next) {
		g.next = at
		g.timer.Reset(at.Sub(now))
	}
}

// isCrowdLocked reports whether the calls that wait justify a second flight at once, so that the
// server executes one pipeline while the callers of the other one receive their replies.
func (g *gather) isCrowdLocked() bool {
	// Only a second flight may start at once. Further ones wait for their pause, and with confirm
	// there is only one.
	if len(g.flights) != 1 || g.confirm || g.isRefusedLocked() {
		return false
	}
	return len(g.waiting) >= max(crowd, len(g.flights[0].batch))
}

// isRefusedLocked reports whether a flight could not connect a short time ago.
func (g *gather) isRefusedLocked() bool { return time.Since(g.refused) < refusal }

// forCallerLocked returns a flight that the caller of p runs, so that no other goroutine must be
// woken. The flight has a wire, because only a call on a wire can be ended when the caller's
// context ends. The connection of the wire is ready, because to make one may outlast the caller. If
// there is no such flight, or if the Store is closed, forCallerLocked returns nil.
func (g *gather) forCallerLocked(p *call, now time.Time) *flight {
	i := g.goodLocked()
	if i < 0 {
		return nil
	}
	if !g.tasks.begin() {
		return nil
	}
	f := g.idle[i]
	g.idle = slices.Delete(g.idle, i, i+1)
	g.flights = append(g.flights, f)
	f.batch = append(f.spare[:0], p)
	f.spare = nil
	f.byCaller = true
	f.sent = now
	g.last = now
	f.use = f.wire.begin(now, p.until)
	return f
}

// goodLocked returns the index of the idle flight whose connection was used last, or -1 if no idle
// flight has a connection that is ready and not in doubt.
func (g *gather) goodLocked() int {
	doubt := g.doubtLocked()
	for i, f := range slices.Backward(g.idle) {
		if f.wire != nil && f.wire.isGood(doubt) {
			return i
		}
	}
	return -1
}

// runByCaller runs a flight with the only call p on the caller's goroutine. It returns when p has
// its result. The end of the context parent interrupts the wire.
func (g *gather) runByCaller(parent context.Context, f *flight, p *call) {
	var stop func() bool
	if parent.Done() != nil {
		use := f.use
		stop = context.AfterFunc(parent, func() { f.wire.interrupt(use) })
	}

	r := f.send(g, f.batch)
	if stop != nil {
		stop()
	}
	if again := g.land(f, r); again { // another flight sends p
		p.wait(parent)
		return
	}

	p.result = r
}

// run sends pipelines until no command waits. If the calls of a pipeline wait again, another flight
// sends them, and run returns.
func (g *gather) run(f *flight) {
	for {
		batch := g.load(f)
		if len(batch) == 0 {
			return
		}
		if f.wire != nil {
			// Call renew before begin, which notes that the connection is used now. Set no deadline
			// for a dial, because it serves several callers.
			f.wire.renew(f.doubt)
			f.wire.begin(f.sent, time.Time{})
		}
		r := f.send(g, batch)
		if again := g.land(f, r); again {
			return
		}
		for _, p := range batch {
			p.answer(r)
		}
		clear(batch)
		f.spare = batch[:0]
		runtime.Gosched() // so that callers that are about to call again join the next pipeline
	}
}

// load gives the flight f the calls that wait, and returns them. If there are none, the flight
// ends. Calls whose callers have left are dropped.
func (g *gather) load(f *flight) (batch []*call) {
	g.mu.Lock()
	defer g.mu.Unlock()

	// The batch takes the array of g.waiting, which gets the spare one.
	batch = slices.DeleteFunc(g.waiting, func(p *call) bool { return p.met.Load() })
	g.waiting = f.spare
	f.spare = nil
	if n := g.batchSizeLocked(f, batch); n < len(batch) {
		g.waiting = append(g.waiting, batch[n:]...)
		batch = batch[:n]
	}

	if len(batch) == 0 {
		f.spare = batch
		g.endLocked(f)
		return nil
	}

	now := time.Now()
	f.batch = batch
	f.doubt = g.doubtLocked()
	f.sent = now
	g.last = now
	return batch
}

// batchSizeLocked returns how many of the waiting calls the flight f sends in its next pipeline.
func (g *gather) batchSizeLocked(f *flight, waiting []*call) int {
	now := time.Now()
	isLate := func(f *flight) bool { return f.isLate(now, g.took) }
	if f.wire == nil && slices.ContainsFunc(g.flights, isLate) {
		// The client may have many dead connections, which hasp cannot renew. Risk only one call.
		return min(len(waiting), 1)
	}

	// A call that is apart has a pipeline of its own. So first send only the calls before it. If it
	// is the first one, send only this call.
	if i := slices.IndexFunc(waiting, func(p *call) bool { return p.apart }); i >= 0 {
		return max(i, 1)
	}
	return len(waiting)
}

// land notes the end of a pipeline, whose result is r. If the calls were not sent, and another
// connection may carry them, land returns true. Then they wait for another flight, and f has ended.
func (g *gather) land(f *flight, r result) (again bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.learnLocked(f, r)
	batch := f.batch
	byCaller := f.byCaller

	// Do this before the callers receive their replies and reuse the calls.
	f.batch = nil
	f.byCaller = false
	switch {
	case g.takesBackLocked(f, r):
		for _, p := range batch {
			p.forget()
		}
		g.waiting = append(slices.Clone(batch), g.waiting...)
		g.endLocked(f)

		// Start a flight if there is no other one, or if it finds a connection that works.
		// Otherwise the flights in progress send the calls after their present pipelines.
		if len(g.flights) == 0 || g.goodLocked() >= 0 {
			g.startLocked()
		}
		return true
	case byCaller && len(g.waiting) > 0:
		go g.run(f) // the flight goes on without its caller
	case byCaller:
		f.spare = batch[:0]
		g.endLocked(f)
	}

	return false
}

// learnLocked notes what the result r of a pipeline says about the connections of the gather.
func (g *gather) learnLocked(f *flight, r result) {
	now := time.Now()
	hasReply := r.err == nil || resp.IsReply(r.err)
	if hasReply {
		g.failure = nil
	} else if r.unsent {
		g.failure = r.err
	}

	switch {
	case hasReply && f.wire != nil:
		// The connection works. A flight that was sent before this moment, and fails later, puts
		// no doubt on it.
		f.wire.answered()
	case hasReply:
		g.took = now.Sub(f.sent)
	case r.err != errNoReply && f.isLate(now, g.took) && f.sent.After(g.doubt):
		// The connection failed after a long time without a reply, and not because its caller left.
		g.doubt = f.sent
	}

	// If a replica refused a command, all connections may lead to the replica. The variable now is
	// too early: the call of answered above has noted a later use of this connection, and the
	// connection must be in doubt, too.
	if r.demoted {
		g.doubt = time.Now()
	}
}

// takesBackLocked reports whether the calls of the flight f wait again, because they were not sent,
// and another connection may carry them. If the server may take no more connections, it notes the
// time in g.refused.
func (g *gather) takesBackLocked(f *flight, r result) bool {
	switch {
	case r.err == nil, r.err == errNoReply, !r.unsent:
		return false
	case errors.Is(r.err, errReplaced), errors.Is(r.err, net.ErrClosed):
		// Another server became the master. This ended the dial, or closed the connection during
		// its set-up. The next dial finds the new master.
		return true
	case g.othersWorkLocked(f):
		g.refused = time.Now()
		return true
	}

	return false
}

// doubtLocked returns a time. A connection that was last used before this time is in doubt: it may
// be dead. Some pipelines failed after a long time without a reply, or are in progress and late.
// The result is the time at which the last of these was sent. The reason may be a firewall that has
// forgotten all connections without an error. Then each idle connection would cost a whole call,
// and a call that fails may cost a lease.
func (g *gather) doubtLocked() time.Time {
	doubt := g.doubt
	now := time.Now()
	for _, f := range g.flights {
		if f.sent.After(doubt) && f.isLate(now, g.took) {
			doubt = f.sent
		}
	}
	return doubt
}

// othersWorkLocked reports whether the calls of the flight f, which could not connect, can use
// another connection.
func (g *gather) othersWorkLocked(f *flight) bool {
	if f.wire == nil {
		// The client of a cluster may have sent a part of the pipeline to another server.
		return len(g.flights) > 1 && !g.isCluster
	}
	doubt := g.doubtLocked()
	isGood := func(f *flight) bool { return f.wire.isGood(doubt) }
	return g.goodLocked() >= 0 || slices.ContainsFunc(g.flights, isGood)
}

// pauseLocked returns how long to wait until another flight starts, or until the next tick if none
// may start now.
func (g *gather) pauseLocked() time.Duration {
	n := len(g.flights)
	limit := mostFlights
	if n == 0 {
		return 0
	}
	if g.flights[0].wire == nil {
		// Allow more flights, because without wires a call on a dead connection ends late, perhaps
		// after all callers have left.
		limit *= 2
	}

	if n >= limit || g.confirm || g.isRefusedLocked() {
		return tickEvery
	}

	// The pause is 1, 4, 16 and 64 ms for one to four flights, and 256 ms for more. It began with
	// the last pipeline.
	return max(min(firstPause<<(2*(n-1)), lastPause)-time.Since(g.last), 0)
}

// startLocked starts a flight for the calls that wait. It prefers a flight that has a connection.
func (g *gather) startLocked() {
	f := &flight{}
	if n := len(g.idle); n > 0 {
		i := g.goodLocked()
		if i < 0 {
			i = n - 1 // the one that was used last
		}
		f = g.idle[i]
		g.idle = slices.Delete(g.idle, i, i+1)
	}

	g.last = time.Now()
	if g.tasks.begin() {
		g.flights = append(g.flights, f)
		go g.run(f)
		return
	}

	// the Store is closed
	for _, p := range g.waiting {
		p.answer(result{err: redis.ErrClosed})
	}
	g.waiting = nil
}

// endLocked ends a flight, and keeps it for reuse.
func (g *gather) endLocked(f *flight) {
	g.flights = slices.DeleteFunc(g.flights, func(other *flight) bool { return other == f })
	g.idle = append(g.idle, f)
	g.tasks.end()
}

// tick starts another flight if commands have waited for long, and ends calls whose time is over.
func (g *gather) tick() {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	g.next = time.Time{}
	by := now.Add(tickEvery) // when the next tick must run at the latest

	// isOver also notes in by when a call that is not over will be over.
	isOver := func(p *call) bool {
		if p.until.After(now) {
			by = earlier(by, p.until)
		}
		return p.isOver(now)
	}

	for _, f := range g.flights {
		for _, p := range f.batch {
			switch {
			case !isOver(p):
			case f.byCaller: // its caller waits for the wire and not for an answer
				f.wire.interrupt(f.use)
			default:
				p.answer(result{err: errNoReply})
			}
		}
		if len(f.batch) > 0 && now.Sub(f.sent) >= suspectAfter {
			g.suspect()
		}
	}

	g.waiting = slices.DeleteFunc(g.waiting, func(p *call) bool {
		if isOver(p) {
			p.answer(result{err: errNoReply})
		}
		return p.met.Load() // answered just now, or its caller has left
	})

	if len(g.waiting) > 0 {
		if g.pauseLocked() <= 0 {
			g.startLocked()
		}

		// If a flight has just started, it may not have taken the calls yet, and the pause may be
		// over again. So let at least 50 µs pass.
		by = earlier(by, now.Add(max(g.pauseLocked(), 50*time.Microsecond)))
	}

	if len(g.flights) > 0 {
		g.tickLocked(now, by)
	}
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
