package redisstore

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// Holds that replicas must confirm travel in lanes. WAIT blocks its connection
// until the replicas have what that connection wrote. If each hold had a
// connection of its own, many callers would take all of the pool, and renewals
// would queue behind them until healthy leases were lost. So holds use few
// connections at a time, and those that find no free lane travel together, with
// one WAIT for all of them.
const (
	// maxLanes is how many connections to a server may wait for replicas of new
	// holds. It is less than half of the smallest pool. One lane would make
	// every caller wait for the WAIT before it, and a dead connection would stop
	// them all.
	maxLanes = 4

	// maxTogether bounds the commands that share a WAIT, and so how many fail
	// with one connection.
	maxTogether = 512
)

// lanes are the lanes of one server.
type lanes struct {
	mu      sync.Mutex // guards all below
	used    int
	waiting []*passenger // empty while a lane is free
}

// passenger is a command that waits for a lane or for its reply.
type passenger struct {
	args  []any
	until time.Time    // when its caller leaves; zero if the caller has no deadline
	met   atomic.Bool  // set by the reply and by the caller that leaves; the second acts
	done  chan journey // has room for one
}

// journey is the outcome of a passenger.
type journey struct {
	v          any
	short, err error
}

// hold sends a command and has its replicas confirm it. It returns the reply,
// and what the replicas failed to do.
func (s *Store) hold(ctx context.Context, at *server, args []any) (v any, short, err error) {
	l := &at.lanes
	l.mu.Lock()
	if l.used < maxLanes {
		l.used++
		l.mu.Unlock()
		// The lane stays in use until the reply, and then goes to those that wait.
		defer s.pass(at)
		return s.sendAlone(ctx, at, false, true, args)
	}

	// Join the queue with mu still held: a lane that becomes free now finds p.
	p := &passenger{args: args, done: make(chan journey, 1)}
	p.until, _ = ctx.Deadline()
	l.waiting = append(l.waiting, p)
	l.mu.Unlock()

	select {
	case j := <-p.done:
		return j.v, j.short, j.err
	case <-ctx.Done():
		// If the command was not sent yet, it is not sent any more.
		if !p.met.Swap(true) {
			return nil, nil, resp.ErrNoReply
		}
		j := <-p.done // the reply came first
		return j.v, j.short, j.err
	}
}

// pass hands a lane on to the commands that wait for one. They travel on their own
// goroutine, so that the caller that has left the lane does not wait for them.
func (s *Store) pass(at *server) {
	if some := at.lanes.next(); some != nil {
		go func() {
			for ; some != nil; some = at.lanes.next() {
				s.carry(at, some)
			}
		}()
	}
}

// next returns the commands that travel next in a lane. If there are none, it frees
// the lane and returns nil.
func (l *lanes) next() []*passenger {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := min(len(l.waiting), maxTogether)
	if n == 0 {
		// Under the mu that found the queue empty, so no caller queues for a lane
		// that is free.
		l.used--
		l.waiting = nil
		return nil
	}

	some := l.waiting[:n:n]
	l.waiting = l.waiting[n:]
	return some
}

// carry sends the commands whose callers still wait, in one pipeline.
func (s *Store) carry(at *server, some []*passenger) {
	var last time.Time
	there := some[:0]
	for _, p := range some {
		// A caller that leaves after this check has an unknown outcome.
		if p.met.Load() {
			continue
		}
		if p.until.IsZero() {
			p.until = time.Now().Add(longest)
		}
		if p.until.After(last) {
			last = p.until
		}
		there = append(there, p)
	}
	if len(there) == 0 {
		return
	}

	// No caller's cancellation ends the call, because other callers share it.
	ctx, cancel := context.WithDeadline(context.Background(), last)
	defer cancel()
	within, end := s.begin(ctx)
	defer end()

	cmds := make([]*resp.Command, len(there))
	for i, p := range there {
		cmds[i] = resp.NewCommand(within, p.args)
	}
	short := s.send(within, at, false, true, cmds...)

	for i, p := range there {
		v, err := cmds[i].Result()
		// If the caller has left, it has reported an unknown outcome, and the reply
		// is dropped.
		if !p.met.Swap(true) {
			p.done <- journey{v, short, err}
		}
	}
}
