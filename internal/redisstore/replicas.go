package redisstore

import (
	"context"
	"fmt"
	"slices"
	"sync"
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

// longest bounds the wait for replicas, also of a call with a later deadline.
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

// confirm replaces the replies of commands that took a hold by an error, unless enough
// replicas have confirmed, by the reply to WAIT. The master has the holds, but a failover
// could lose them.
func (s *Store) confirm(replies []Reply, wait Reply) {
	err := wait.Err
	n, ok := wait.Value.(int64)
	switch {
	case err != nil:
		err = fmt.Errorf("replicas did not confirm: %w", err)
	case !ok:
		err = resp.Unexpected(wait.Value, s.secrets...)
	case n < int64(s.replicas):
		err = resp.ReplyError(fmt.Sprintf("%d of %d replicas confirmed in time", n, s.replicas))
	default:
		return
	}
	for i, r := range replies {
		if r.Err == nil && !tookNothing(r.Value) {
			replies[i] = Reply{Err: err}
		}
	}
}

// waitBatch sends the holds that replicas must confirm. WAIT blocks its connection until the
// replicas have what that connection wrote. If each hold had a connection of its own, many
// callers would take all of the pool, and renewals would queue behind them until healthy
// leases were lost. So the holds that come while a WAIT is under way travel together after
// it, with one WAIT for all of them.
type waitBatch struct {
	mu      sync.Mutex // guards all below
	moving  bool       // a goroutine sends what waits
	waiting []*item
}

// item is a command that waits for its reply.
type item struct {
	ctx  context.Context // of the caller
	args []any
	done chan Reply // has room for one, for a caller that has left
}

// hold sends a command, and has the replicas of the server confirm it.
func (l *waitBatch) hold(ctx context.Context, s *Store, at *server, args []any) Reply {
	it := &item{ctx, args, make(chan Reply, 1)}
	l.mu.Lock()
	l.waiting = append(l.waiting, it)
	if !l.moving {
		l.moving = true
		go l.move(s, at)
	}
	l.mu.Unlock()

	select {
	case r := <-it.done:
		return r
	case <-ctx.Done():
		// If the command was not sent yet, it is not sent any more.
		return Reply{Err: resp.ErrNoReply}
	}
}

// move sends what waits, until nothing does.
func (l *waitBatch) move(s *Store, at *server) {
	for {
		l.mu.Lock()
		some := l.waiting
		l.waiting = nil
		// mu is still held, so a caller that comes later starts move again.
		l.moving = len(some) > 0
		l.mu.Unlock()
		if len(some) == 0 {
			return
		}
		s.sendTogether(at, some)
	}
}

// sendTogether sends the commands whose callers still wait, in one pipeline.
func (s *Store) sendTogether(at *server, some []*item) {
	// A caller that leaves after this check has an unknown outcome.
	some = slices.DeleteFunc(some, func(it *item) bool { return it.ctx.Err() != nil })
	if len(some) == 0 {
		return
	}

	// No caller's cancellation ends the call, because other callers share it. It ends with
	// the last of them, but never so late that a dead connection stops the holds for long.
	end, last := time.Now().Add(longest), time.Time{}
	commands := make([][]any, len(some))
	for i, it := range some {
		commands[i] = it.args
		until, ok := it.ctx.Deadline()
		if !ok || until.After(end) {
			until = end
		}
		if until.After(last) {
			last = until
		}
	}
	ctx, cancel := context.WithDeadline(context.Background(), last)
	defer cancel()
	replies := s.pipeline(ctx, at, false, true, commands...)

	for i, it := range some {
		it.done <- replies[i]
	}
}
