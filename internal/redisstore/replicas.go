package redisstore

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// Replicas returns how many replicas must confirm a hold. If another client hands a key over, the
// strategy of the new holder must send a renewal, so that the replicas confirm the hold.
func (s *Store) Replicas() int { return s.replicas }

// tookNothing reports whether a reply means that the command took no hold. For commands with kept
// set, [Store.Send] lists these replies.
func tookNothing(reply any) bool {
	if all, ok := reply.([]any); ok && len(all) > 0 {
		reply = all[0]
	}
	n, ok := reply.(int64)
	return reply == nil || ok && n <= 0
}

// pipeline sends commands to a server, each once, in one pipeline. If kept is true, the replicas
// must confirm the commands that took a hold. It leaves other replies and errors unchanged, for
// Store.outcome.
func (s *Store) pipeline(ctx context.Context, at *server, kept bool, commands ...[]string) []Reply {
	if !kept || s.replicas == 0 {
		return at.Pipeline(ctx, commands...)
	}

	// WAIT must be in the same pipeline, because it covers only writes of its own connection.
	n := len(commands)
	wait := []string{"wait", strconv.Itoa(s.replicas), strconv.FormatInt(patience(ctx), 10)}
	replies := at.Pipeline(ctx, append(slices.Clip(commands), wait)...)
	s.confirm(replies[:n], replies[n])
	return replies[:n]
}

// The constant longest limits the wait for replicas, even if the call has a later deadline.
const longest = 3 * time.Second

// patience returns how long the server waits for its replicas, in milliseconds. This time is less
// than the time until ctx's deadline, so that the server can still reply that too few have
// confirmed. It is never 0, because a WAIT with a timeout of 0 has no limit.
func patience(ctx context.Context) int64 {
	left := longest
	if end, ok := ctx.Deadline(); ok {
		left = min(left, time.Until(end))
	}

	return max(1, (left * 4 / 5).Milliseconds())
}

// confirm checks the reply to WAIT, which is the argument wait. If too few replicas have confirmed,
// confirm puts an error in place of the reply of each command that took a hold. The master has
// these holds, but a failover could lose them.
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

// waitBatch sends the holds that replicas must confirm. WAIT blocks its connection. If each hold
// had a connection of its own, many callers would use the whole pool, and renewals would queue
// behind them until healthy leases were lost. Therefore holds that are requested during a WAIT are
// sent together after that WAIT, with one WAIT for all these holds.
type waitBatch struct {
	mu      sync.Mutex // guards the fields below
	moving  bool       // a goroutine runs the method move
	waiting []*item
}

// item is a command that waits for its reply.
type item struct {
	ctx  context.Context // of the caller
	args []string
	done chan Reply // has room for one, so that move does not block if the caller has left
}

// hold sends a command, waits until the replicas have confirmed it, and returns its reply.
func (l *waitBatch) hold(ctx context.Context, s *Store, at *server, args []string) Reply {
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
		// If the method move has not taken the command yet, the command will not be sent.
		return Reply{Err: resp.ErrNoReply}
	}
}

// move sends the commands that wait, batch after batch, until no command waits.
func (l *waitBatch) move(s *Store, at *server) {
	for {
		l.mu.Lock()
		some := l.waiting
		l.waiting = nil
		// Set moving while mu is held. If move ends here, the next caller then starts move again.
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
	// If a caller leaves after this check, the outcome of its command is unknown.
	some = slices.DeleteFunc(some, func(it *item) bool { return it.ctx.Err() != nil })
	if len(some) == 0 {
		return
	}

	// The cancellation of one caller must not end this pipeline, because other callers share it.
	// The pipeline ends at the latest deadline of its callers, or after the duration longest, so
	// that a dead connection does not block later holds for long.
	end, last := time.Now().Add(longest), time.Time{}
	commands := make([][]string, len(some))
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
	for i, r := range s.pipeline(ctx, at, true, commands...) {
		some[i].done <- r
	}
}
