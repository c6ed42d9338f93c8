package redisstore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/lazyctx"
	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// gather sends the commands of concurrent callers to one server, in pipelines of go-redis. A
// goroutine, the flight, sends all commands that wait, receives their replies, and repeats this
// until no command waits. If a flight takes long, another flight sends the commands that wait
// meanwhile. Therefore a distant server, or a connection that dies without an error, delays few
// callers. A caller leaves as soon as its context ends. If its command is not in a pipeline yet, the
// command is not sent. Otherwise its reply is dropped.
type gather struct {
	at   *server
	kept bool // replicas must confirm the commands; then there is only one flight, because WAIT blocks the connection

	calls sync.Pool // *call; not shared by gathers, because a channel must stay in one bubble of testing/synctest

	mu      sync.Mutex // guards the fields below
	waiting []*call
	flights []*flight
	idle    []*flight     // for reuse; the one that was used last is at the end
	last    time.Time     // when the last pipeline was sent
	refused time.Time     // when a flight that could not connect gave its calls back
	doubt   time.Time     // a connection that was last used before this time may be dead
	timer   *time.Timer   // runs the method tick; nil before the first call
	took    time.Duration // how long the last pipeline with replies, but without a wire, took
	next    time.Time     // when the timer fires; zero if it does not run
}

// flight is one pipeline after another.
type flight struct {
	batch []*call // g.mu guards it
	spare []*call // for reuse
	cmds  []redis.Cmder
	wire  *wire // nil for aside, for holds, for a cluster, and for a client that the caller passed

	use     int       // of the wire; g.mu guards the fields below
	sent    time.Time // when the pipeline in progress was sent
	lone    bool      // the caller of the only call runs the flight
	refused bool      // it could not connect, so other flights take its calls
	demoted bool      // a replica has refused a command
}

// call holds the commands of one caller. The field met is set when the replies have arrived or the
// caller has left. If the replies arrive first, the caller receives them.
type call struct {
	alone bool // in a pipeline of its own
	here  bool // see aside
	cmds  []resp.Command
	room  [1]resp.Command // usually the array of cmds
	texts []string        // the arguments of all commands
	args  []any           // the same for go-redis

	ctx   context.Context // of the caller
	quit  context.Context // when it ends, the caller leaves within a tick
	until time.Time       // the deadline of the caller, or zero; then the caller leaves within a tick

	met    atomic.Bool
	done   chan struct{} // receives a signal when the fields below are set
	err    error         // of the pipeline
	unsent bool          // certainly no command was sent
	run    string        // of the server
	lost   error         // the error in place of a reply that grants a hold, because too few replicas have confirmed it
}

const (
	// maxShared limits the bytes in the arguments of a call in a common pipeline, because a server
	// closes the connection if an argument is too long.
	maxShared = 64 << 10

	mostFlights = 6
	crowd       = 16                     // so many calls that wait may start a second flight at once
	firstPause  = time.Millisecond       // how long a pipeline is under way before a second flight starts; each further one waits 4 times as long
	lastPause   = 256 * time.Millisecond // the longest of these times
	tickEvery   = 20 * time.Millisecond  // how often calls whose time is over are ended
	refusal     = time.Second            // how long no further flight starts after one could not connect
	lateAfter   = 16 * time.Millisecond  // a connection without a reply for so long may be dead
	longest     = 3 * time.Second        // how long a pipeline may take if its callers have no deadline
)

// errNoReply means that no reply arrived before the caller left. The outcome is unknown.
var errNoReply = fmt.Errorf("no reply: %w", os.ErrDeadlineExceeded)

// do sends commands, each once, in one pipeline, and stores their replies.
func (g *gather) do(ctx context.Context, replies []Reply, commands ...[]string) {
	p, ok := g.calls.Get().(*call)
	if !ok {
		p = &call{done: make(chan struct{}, 1)}
	}
	parent := p.fill(ctx, g.at.store.plain, commands)
	if f := g.put(p); f != nil {
		g.alone(parent, f, p)
	} else {
		g.wait(parent, p)
	}
	g.finish(p, replies)
}

// aside is do in a pipeline that no other caller shares. If here is true, the pipeline goes to this
// process, whatever the keys are.
func (g *gather) aside(ctx context.Context, here bool, replies []Reply, commands ...[]string) {
	p := &call{done: make(chan struct{}, 1), alone: true, here: here}
	p.fill(ctx, g.at.store.plain, commands)
	if !g.at.store.spawn(func() { p.answer(g.send(&flight{}, []*call{p})) }) {
		p.answer(redis.ErrClosed, nil)
	}
	g.wait(ctx, p)
	g.finish(p, replies)
}

// fill stores the commands and the context of a caller. If plain is false, go-redis gets pointers to
// the arguments, which need no memory of their own. A hook would see these pointers, and may keep
// them, so plain is true for a client that the caller of hasp passed.
func (p *call) fill(ctx context.Context, plain bool, commands [][]string) (parent context.Context) {
	n, bytes := 0, 0
	for _, args := range commands {
		n += len(args)
		for _, arg := range args {
			bytes += len(arg)
		}
	}
	p.alone = p.alone || bytes > maxShared
	if n > cap(p.texts) || plain {
		p.texts, p.args = make([]string, 0, n), make([]any, 0, n)
	}
	p.cmds = p.room[:0]
	for _, args := range commands {
		from := len(p.args)
		for _, arg := range args {
			if plain {
				p.args = append(p.args, arg)
				continue
			}
			p.texts = append(p.texts, arg)
			p.args = append(p.args, &p.texts[len(p.texts)-1])
		}
		p.cmds = append(p.cmds, resp.NewCommand(p.args[from:]...))
	}
	p.ctx = ctx
	parent, p.quit, p.until = lazyctx.Split(ctx)
	return parent
}

// wait returns when the replies have arrived, or when parent ends.
func (g *gather) wait(parent context.Context, p *call) {
	select {
	case <-p.done:
	case <-parent.Done():
		if !p.met.Swap(true) {
			p.err = errNoReply
			break
		}
		<-p.done // the replies arrived first
	}
}

// finish stores the replies of a call, and keeps the call for another caller.
func (g *gather) finish(p *call, replies []Reply) {
	if p.err == errNoReply { // a flight may still have p
		for i := range replies {
			replies[i] = Reply{Err: errNoReply}
		}
		return
	}
	for i, cmd := range p.cmds {
		replies[i] = cmd.Reply(p.err)
		if p.unsent && replies[i].Err != nil {
			replies[i].Err = resp.NotSent(replies[i].Err)
		}
		replies[i].Run = p.run
		if p.lost != nil && replies[i].Err == nil && !tookNothing(replies[i].Value) {
			replies[i] = Reply{Err: p.lost}
		}
	}
	if !p.alone {
		*p = call{done: p.done, texts: p.texts[:0], args: p.args[:0]}
		g.calls.Put(p)
	}
}

// answer ends a call, unless the caller has left.
func (p *call) answer(err, lost error) {
	if !p.met.Swap(true) {
		p.err, p.lost = err, lost
		p.done <- struct{}{}
	}
}

// over reports whether the caller must leave.
func (p *call) over(now time.Time) bool {
	return !p.until.IsZero() && !now.Before(p.until) || p.quit.Err() != nil
}

// put adds a call. If no other call is in progress, put may return a flight that the caller itself
// must run, by the method alone.
func (g *gather) put(p *call) *flight {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.timer == nil {
		g.timer = time.AfterFunc(time.Hour, g.tick)
	}
	now := time.Now()
	by := now.Add(tickEvery)
	if !p.until.IsZero() && p.until.Before(by) {
		by = p.until
	}
	if len(g.flights) > 0 {
		g.waiting = append(g.waiting, p)
		if len(g.waiting) == 1 { // the first one that waits for a flight
			by = earlier(by, now.Add(g.pauseLocked()))
		} else if g.isCrowdLocked() {
			g.startLocked()
		}
		g.tickLocked(now, by)
		return nil
	}
	g.tickLocked(now, by)
	g.last = now
	if f := g.lonelyLocked(); f != nil {
		f.batch, f.spare = append(f.spare[:0], p), nil
		f.lone, f.sent = true, g.last
		f.use = f.wire.begin(g.last, p.until)
		return f
	}
	g.waiting = append(g.waiting, p)
	g.startLocked()
	return nil
}

// tickLocked makes the timer fire at a time, unless it fires earlier.
func (g *gather) tickLocked(now, at time.Time) {
	if g.next.IsZero() || at.Before(g.next) {
		g.next = at
		g.timer.Reset(at.Sub(now))
	}
}

// isCrowdLocked reports whether the calls that wait justify a second flight at once, so that the server
// executes one pipeline while the callers of the other one receive their replies.
func (g *gather) isCrowdLocked() bool {
	return len(g.flights) == 1 && !g.kept && len(g.waiting) >= max(crowd, len(g.flights[0].batch)) && !g.isRefusedLocked()
}

// isRefusedLocked reports whether a flight could not connect a short time ago.
func (g *gather) isRefusedLocked() bool { return time.Since(g.refused) < refusal }

// lonelyLocked starts a flight that its only caller runs, so that no other goroutine must be woken.
// Only a connection of hasp's own ends a call when the caller's context ends. The connection is ready,
// because to make one may outlast the caller. If there is no such connection, lonelyLocked returns
// nil.
func (g *gather) lonelyLocked() *flight {
	i := g.goodLocked()
	if i < 0 || g.kept || !g.at.store.begin() {
		return nil
	}
	f := g.idle[i]
	g.idle = slices.Delete(g.idle, i, i+1)
	g.flights = append(g.flights, f)
	return f
}

// goodLocked returns the index of the idle flight whose connection was used last, or -1.
func (g *gather) goodLocked() int {
	doubt := g.doubtedLocked()
	for i, f := range slices.Backward(g.idle) {
		if f.wire != nil && f.wire.isGood(doubt) {
			return i
		}
	}
	return -1
}

// alone runs a flight with the only call p on the caller's goroutine.
func (g *gather) alone(parent context.Context, f *flight, p *call) {
	var stop func() bool
	if parent.Done() != nil {
		use := f.use
		stop = context.AfterFunc(parent, func() { f.wire.interrupt(use) })
	}
	err, _ := g.send(f, f.batch)
	if stop != nil {
		stop()
	}
	over, sent := f.wire.state()
	if over && err != nil {
		err = errNoReply
	}
	if run := f.wire.run; !g.land(f, err) {
		p.err, p.unsent, p.run = err, !sent, run
		return
	}
	g.wait(parent, p)
}

// land notes the end of a pipeline. It reports whether the calls of the flight wait again.
func (g *gather) land(f *flight, err error) (again bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	batch, lone := f.batch, f.lone
	f.batch, f.lone = nil, false // before the callers reuse the calls
	switch {
	case err != nil && !resp.IsReply(err):
	case f.wire != nil:
		f.wire.answered() // so it is not in doubt because of another flight that is late
	default:
		g.took = time.Since(f.sent)
	}
	if f.demoted { // after answered, because this connection is in doubt too
		f.demoted, g.doubt = false, time.Now() // the other connections may lead to the replica as well
	}
	if again = err != nil && g.takesBackLocked(f, err); again {
		g.waiting = append(slices.Clone(batch), g.waiting...)
		for _, p := range batch {
			for _, cmd := range p.cmds {
				cmd.SetErr(nil) // Process does not, if the next attempt succeeds
			}
		}
	}
	switch {
	case !lone:
	case len(g.waiting) > 0:
		go g.run(f)
	default:
		f.spare = batch[:0]
		g.endLocked(f)
	}
	return again
}

// takesBackLocked reports whether the calls of a flight that failed shall wait again, because they
// were not sent.
func (g *gather) takesBackLocked(f *flight, err error) bool {
	switch {
	case err == errNoReply: // the caller has left
	case f.hasSent(err):
		if !resp.IsReply(err) && g.isLateLocked(f, time.Now()) && f.sent.After(g.doubt) {
			g.doubt = f.sent
		}
	case errors.Is(err, errReplaced):
		return true // the next connection leads to the new master
	case g.othersWorkLocked(f):
		// The server may take no more connections.
		f.refused, g.refused = true, time.Now()
		return true
	}
	return false
}

// doubtedLocked returns the time before which a connection must have been used to be in doubt: when the
// last flight began that has failed without a reply, or that waits for one for so long that it may
// never come. A firewall may have forgotten all connections without a word. Each idle one would then
// cost a whole call, and a lease its term. A flight that still connects says nothing about them.
func (g *gather) doubtedLocked() time.Time {
	if len(g.flights) == 0 {
		return g.doubt
	}
	doubt, now := g.doubt, time.Now()
	for _, f := range g.flights {
		if len(f.batch) > 0 && f.sent.After(doubt) && g.isLateLocked(f, now) {
			doubt = f.sent
		}
	}
	return doubt
}

// othersWorkLocked reports whether calls can use another connection than that of a flight.
func (g *gather) othersWorkLocked(f *flight) bool {
	if f.wire == nil {
		return len(g.flights) > 1 && !g.at.store.isCluster // part of the commands may be at another server
	}
	doubt := g.doubtedLocked()
	return g.goodLocked() >= 0 || slices.ContainsFunc(g.flights, func(f *flight) bool { return f.wire.isGood(doubt) })
}

// hasSent reports whether the commands of a flight that failed may have been sent.
func (f *flight) hasSent(err error) bool {
	if f.wire == nil {
		return !resp.IsUnsent(err)
	}
	_, sent := f.wire.state()
	return sent
}

// isLateLocked reports whether a flight has had no reply for so long that its connection may be dead.
func (g *gather) isLateLocked(f *flight, now time.Time) bool {
	usual := 2 * g.took
	if f.wire != nil {
		if _, sent := f.wire.state(); !sent {
			return false
		}
		usual = f.wire.setUp()
	}
	return now.Sub(f.sent) >= max(lateAfter, min(usual, lastPause))
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// pauseLocked returns how long to wait until another flight starts.
func (g *gather) pauseLocked() time.Duration {
	n, most := len(g.flights), mostFlights
	if n == 0 {
		return 0
	}
	if g.flights[0].wire == nil {
		most *= 2 // the client ends a call on a dead connection late, perhaps after all callers have left
	}
	if n >= most || g.kept || g.isRefusedLocked() {
		return tickEvery
	}
	return max(min(firstPause<<(2*(n-1)), lastPause)-time.Since(g.last), 0)
}

// startLocked starts a flight for the calls that wait. It prefers a flight that has a connection.
func (g *gather) startLocked() {
	f := &flight{}
	if n := len(g.idle); n > 0 {
		i := g.goodLocked()
		if i < 0 {
			i = n - 1
		}
		f = g.idle[i]
		g.idle = slices.Delete(g.idle, i, i+1)
	}
	g.last = time.Now()
	if g.at.store.begin() {
		g.flights = append(g.flights, f)
		go g.run(f)
		return
	}
	for _, p := range g.waiting {
		p.answer(redis.ErrClosed, nil)
	}
	g.waiting = nil
}

// endLocked ends a flight.
func (g *gather) endLocked(f *flight) {
	g.flights = slices.DeleteFunc(g.flights, func(other *flight) bool { return other == f })
	g.idle = append(g.idle, f)
	g.at.store.wg.Done()
}

// tick starts another flight if commands have waited for long, and ends calls whose time is over.
func (g *gather) tick() {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	g.next = time.Time{}
	by := now.Add(tickEvery)
	over := func(p *call) bool {
		if !p.until.IsZero() && p.until.After(now) {
			by = earlier(by, p.until)
		}
		return p.over(now)
	}
	for _, f := range g.flights {
		for _, p := range f.batch {
			switch {
			case !over(p):
			case f.lone:
				f.wire.interrupt(f.use)
			default:
				p.answer(errNoReply, nil)
			}
		}
		if len(f.batch) == 0 {
			continue
		}
		if now.Sub(f.sent) >= maxPause {
			g.at.store.suspect()
		}
	}
	g.waiting = slices.DeleteFunc(g.waiting, func(p *call) bool {
		if over(p) {
			p.answer(errNoReply, nil)
		}
		return p.met.Load()
	})
	if len(g.waiting) > 0 {
		if g.pauseLocked() <= 0 {
			g.startLocked()
		}
		by = earlier(by, now.Add(max(g.pauseLocked(), 50*time.Microsecond)))
	}
	if len(g.flights) > 0 {
		g.tickLocked(now, by)
	}
}

// run sends pipelines until no command waits.
func (g *gather) run(f *flight) {
	for first := true; ; first = false {
		if !first {
			runtime.Gosched() // so that callers that are about to call again join this pipeline
		}
		batch, doubt := g.load(f)
		if len(batch) == 0 {
			return
		}
		if f.wire != nil {
			f.wire.renew(doubt) // before begin, which says that the connection was used
			f.wire.begin(f.sent, time.Time{})
		}
		err, lost := g.send(f, batch)
		unsent, run := false, ""
		if f.wire != nil {
			unsent, run = err != nil && !f.hasSent(err), f.wire.run
		}
		if g.land(f, err) {
			continue
		}
		for _, p := range batch {
			p.unsent, p.run = unsent, run
			p.answer(err, lost)
		}
		clear(batch)
		f.spare = batch[:0]
	}
}

// load gives a flight all calls that wait. If there are none, the flight ends.
func (g *gather) load(f *flight) (batch []*call, doubt time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if f.refused {
		f.refused = false
		g.endLocked(f)
		if len(g.waiting) > 0 && (len(g.flights) == 0 || g.goodLocked() >= 0) {
			g.startLocked()
		}
		return nil, time.Time{}
	}
	batch, g.waiting = g.waiting, f.spare
	batch = slices.DeleteFunc(batch, func(p *call) bool { return p.met.Load() })
	now, most := time.Now(), len(batch)
	late := func(f *flight) bool { return len(f.batch) > 0 && g.isLateLocked(f, now) }
	switch i := slices.IndexFunc(batch, func(p *call) bool { return p.alone }); {
	case f.wire == nil && slices.ContainsFunc(g.flights, late):
		most = 1 // the client may have many dead connections, which hasp cannot renew
	case i >= 0:
		most = max(i, 1)
	}
	if most < len(batch) {
		g.waiting = append(g.waiting, batch[most:]...)
		batch = batch[:most]
	}
	doubt = g.doubtedLocked()
	f.spare, f.batch = nil, batch
	if len(batch) == 0 {
		f.spare = batch
		g.endLocked(f)
		return nil, time.Time{}
	}
	g.last, f.sent = now, now
	return batch, doubt
}

// send sends the commands of the calls in one pipeline, and receives the replies. It returns the
// error of the pipeline, and the error in place of replies that grant a hold.
func (g *gather) send(f *flight, batch []*call) (err, lost error) {
	ctx := batchContext{Context: context.Background()}
	if len(batch) == 1 {
		ctx.Context = batch[0].ctx // a hook sees the values of the only caller
	}
	cmds := f.cmds[:0]
	if g.at.store.plain {
		cmds = nil // a hook may keep it
	}
	for _, p := range batch {
		if p.until.After(ctx.until) {
			ctx.until = p.until
		}
		for _, cmd := range p.cmds {
			cmds = append(cmds, cmd)
		}
	}
	if ctx.until.IsZero() {
		ctx.until = time.Now().Add(longest)
	}

	rdb := g.at.rdb
	switch {
	case f.wire != nil:
		rdb = f.wire.rdb
	case g.kept || batch[0].here:
		rdb = g.at.node
	}
	if g.kept {
		wait := resp.NewCommand("wait", strconv.Itoa(g.at.store.replicas), strconv.FormatInt(patience(ctx.until), 10))
		cmds = append(cmds, wait)
		err = g.exec(ctx, rdb, cmds)
		lost = g.at.store.unconfirmed(wait.Reply(err))
	} else {
		err = g.exec(ctx, rdb, cmds)
	}
	f.demoted = slices.ContainsFunc(cmds, func(cmd redis.Cmder) bool { return cmd.Err() != nil && resp.IsReadOnly(cmd.Err()) })
	clear(cmds)
	f.cmds = cmds
	return err, lost
}

// exec sends commands in a pipeline. A client that the caller passed has a second pool for pipelines,
// in which even a single command of hasp does not wait behind other commands of the program. The
// client of a Store that was opened has one pool, and Process costs less than a pipeline. But on a
// cluster, Process also sends COMMAND, to which the user may have no right.
func (g *gather) exec(ctx context.Context, rdb redis.UniversalClient, cmds []redis.Cmder) error {
	return resp.Survive(func() error {
		if len(cmds) == 1 && !g.at.store.plain && !g.at.store.isCluster {
			return rdb.Process(ctx, cmds[0])
		}
		pipe := rdb.Pipeline()
		_ = pipe.BatchProcess(ctx, cmds...) // only queues the commands
		_, err := pipe.Exec(ctx)
		return err
	})
}

// batchContext has a deadline without a timer, because go-redis gives the deadline to the
// connection. It has the values of another context, but does not end with it.
type batchContext struct {
	context.Context
	until time.Time
}

func (c batchContext) Deadline() (time.Time, bool) { return c.until, true }
func (batchContext) Done() <-chan struct{}         { return nil }
func (batchContext) Err() error                    { return nil }
