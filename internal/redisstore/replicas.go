package redisstore

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// Replicas returns how many replicas must confirm a hold; zero means none. A command of
// another client may hand a hold over to a waiter of this one. Then the strategy sends a
// renewal, which the replicas confirm.
func (s *Store) Replicas() int { return s.replicas }

// tookNothing reports whether the reply to a kept command means that the command took
// no hold. [Store.Send] lists these replies.
func tookNothing(reply any) bool {
	if all, ok := reply.([]any); ok && len(all) > 0 {
		reply = all[0]
	}
	n, ok := reply.(int64)
	return reply == nil || ok && n <= 0
}

// longest bounds the wait for replicas, also of a call with a later deadline. It is
// also the deadline of a command that had to wait for a lane, if its caller has none.
const longest = 3 * time.Second

// patience returns how long the server waits for its replicas, in milliseconds. It is
// less than the call has left, so that the server can still reply that too few have
// confirmed. It is never zero, because with a timeout of 0 WAIT waits without end.
func patience(ctx context.Context) int64 {
	left := longest
	if end, ok := ctx.Deadline(); ok {
		left = min(left, time.Until(end))
	}

	return max(1, (left * 4 / 5).Milliseconds())
}

// confirmed returns an error unless enough replicas have confirmed, by the reply to
// WAIT. wait is nil if no replica needs to confirm.
func (s *Store) confirmed(wait *resp.Command) error {
	if wait == nil {
		return nil
	}
	n, err := wait.Int64()
	switch {
	// There may be a reply to the hold. Without the reply to WAIT it is unknown whether
	// the replicas have the hold.
	case err != nil:
		return fmt.Errorf("replicas did not confirm: %w", err)
	case n < int64(s.replicas):
		return shortfall{n, s.replicas}
	}
	return nil
}

// shortfall reports that too few replicas have confirmed in time.
type shortfall struct {
	got  int64
	want int
}

func (e shortfall) Error() string {
	return fmt.Sprintf("%d of %d replicas confirmed in time", e.got, e.want)
}

// RedisError marks the error as a reply, as go-redis' own errors do: the server answers.
func (shortfall) RedisError() {}

// A lane is a connection that is in use for holds that replicas must confirm. WAIT
// blocks its connection until the replicas have what that connection wrote. If each
// hold had a connection of its own, many callers would take all of the pool, and
// renewals would queue behind them until healthy leases were lost. So there are few
// lanes. Holds that find no free lane wait, and then travel together, with one WAIT for
// all of them.
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
	met   atomic.Bool  // set by the reply or by the caller that leaves; the first one decides
	done  chan journey // has room for one
}

// journey is the outcome of a passenger.
type journey struct {
	Reply
	short error
}

// hold sends a command in a lane, and has the server's replicas confirm it. It returns
// the reply, and in short an error if too few have confirmed.
func (s *Store) hold(ctx context.Context, at *server, args []any) (v any, short, err error) {
	l := &at.lanes
	l.mu.Lock()
	if l.used < maxLanes {
		l.used++
		l.mu.Unlock()
		// The lane stays in use until the reply, and then goes to those that wait.
		defer s.pass(at)
		replies, short := s.pipeline(ctx, at, false, true, args)
		return replies[0].Value, short, replies[0].Err
	}

	// Join the queue with mu still held: a lane that becomes free now finds p.
	p := &passenger{args: args, done: make(chan journey, 1)}
	p.until, _ = ctx.Deadline()
	l.waiting = append(l.waiting, p)
	l.mu.Unlock()

	var j journey
	select {
	case j = <-p.done:
	case <-ctx.Done():
		// If the command was not sent yet, it is not sent any more.
		if !p.met.Swap(true) {
			return nil, nil, resp.ErrNoReply
		}
		j = <-p.done // the reply came first
	}
	return j.Value, j.short, j.Err
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
		// mu was held when the queue was checked and still is, so no caller queues for a
		// lane that is free.
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
	commands := make([][]any, len(there))
	for i, p := range there {
		commands[i] = p.args
	}
	replies, short := s.pipeline(ctx, at, false, true, commands...)

	for i, p := range there {
		// If the caller has left, it has reported an unknown outcome, and the reply
		// is dropped.
		if !p.met.Swap(true) {
			p.done <- journey{replies[i], short}
		}
	}
}
