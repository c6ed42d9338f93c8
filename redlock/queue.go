package redlock

import (
	"context"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// The waiters of a key stand in a queue on the lead, the node that contended attempts
// ask first. The lead refuses a free key to a caller if another has waited longer. A
// release wakes the first waiter of the queue, and no other.
//
// The order is advice. The votes decide who holds the key, and they do not depend on
// the queue: clients that see another lead, older versions of hasp and redsync pass it.
// A waiter keeps its arrival when the lead changes, because it tells each lead how long
// it has waited.

// lookEvery is how often a waiter looks at the queue. A waiter that has not looked for a
// second, the window of turns.lua, counts as gone.
const lookEvery = 300 * time.Millisecond

// queueKeys returns the keys of the queue: when each waiter arrived, and when it last
// looked.
func queueKeys(key string) []string {
	return []string{redisstore.DerivedKey("turns", key), redisstore.DerivedKey("looks", key)}
}

// place is what the caller of one attempt tells the lead of itself, and what the lead
// answers.
type place struct {
	waiter string    // the name in the queue; empty for a caller that does not queue
	since  time.Time // when the waiter arrived
	answer atomic.Int32
}

// Answers of the lead.
const (
	unanswered int32 = iota
	behind           // refused, and another caller has waited longer
	next             // refused, and no other caller has waited longer
	granted          // the lead has voted yes, and the waiter has left the queue
)

// sendScript runs the script that takes the key. It proposes a fence for a fenced claim.
// On the lead, the script also keeps the queue.
func (n *node) sendScript(ctx context.Context, a *attempt) (v vote, fence uint64, id identity, err error) {
	counter := redisstore.DerivedKey("fence", a.c.Key)
	script, call := acquireScript, redisstore.Call{
		Keys: []string{a.lockKey, counter, markKey},
		Args: []any{a.record, redisstore.Millis(a.c.TTL)},
	}
	if n.i == a.lead {
		script = leadScript
		if a.c.Fenced {
			script = leadFenced
		}
		call.Keys = append(call.Keys, queueKeys(a.c.Key)...)
		waited := int64(0)
		if a.place.waiter != "" {
			waited = time.Since(a.place.since).Milliseconds()
		}
		call.Args = append(call.Args, a.place.waiter, waited)
	}
	reply, err := n.store.Run(ctx, script, call)
	if err != nil {
		return voteAfter(err), 0, id, err
	}

	switch parts, _ := reply.([]any); {
	case len(parts) == 4 && parts[0] == int64(1):
		text, _ := parts[1].(string)
		mark, ok := parts[2].(string)
		fence, err = strconv.ParseUint(text, 10, 64)
		if ok && err == nil && (fence > 0) == a.c.Fenced && fence <= maxFence {
			if n.i == a.lead {
				a.place.answer.Store(granted)
			}
			return yes, fence, identity{run: runOf(parts[3]), mark: mark}, nil
		}
	case n.i == a.lead && len(parts) == 3 && parts[0] == int64(0):
		mark, ok := parts[1].(string)
		if ok && (parts[2] == int64(0) || parts[2] == int64(1)) {
			a.place.answer.Store(behind + int32(parts[2].(int64)))
			return no, 0, identity{mark: mark}, nil
		}
	case n.i != a.lead && len(parts) == 2 && parts[0] == int64(0):
		if mark, ok := parts[1].(string); ok {
			return no, 0, identity{mark: mark}, nil
		}
	case len(parts) == 1 && parts[0] == int64(-1):
		return failed, 0, id, n.noFence(counter)
	}
	// The script may have granted the key before something replaced its reply.
	return unknown, 0, id, n.store.Unexpected(reply)
}

// leave removes a waiter from the queue on node i, in the background. If that fails, the
// waiter counts as gone a second after its last look.
func (d *Driver) leave(i int, c backend.Claim, waiter string) {
	n := d.nodes[i]
	d.spawn(func() {
		if n.admit() != nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), c.Timeout)
		defer cancel()
		began := time.Now()
		_, err := n.store.Run(ctx, leaveScript, redisstore.Call{
			Keys: append([]string{redisstore.LockKey(c.Key)}, queueKeys(c.Key)...),
			Args: []any{waiter, redisstore.DerivedKey("channel", c.Key)},
		})
		n.observe(ctx, began, err)
	})
}

// expectTold is called before a release. It returns a function for the release's end on
// the lead, which has then told whether others wait for the key.
func (d *Driver) expectTold(key string) (told func()) {
	ch := make(chan struct{})
	d.mu.Lock()
	d.untold[key] = ch
	d.mu.Unlock()
	return func() {
		close(ch)
		d.mu.Lock()
		defer d.mu.Unlock()
		// A later release of the key may have replaced it.
		if d.untold[key] == ch {
			delete(d.untold, key)
		}
	}
}

// awaitTold returns when the lead has answered the last release of the key, or does not
// answer in time. Release returns earlier, when any quorum has answered. Without this,
// who unlocks and locks again could pass the waiters each time.
func (d *Driver) awaitTold(ctx context.Context, key string) {
	d.mu.Lock()
	ch := d.untold[key]
	d.mu.Unlock()
	if ch == nil {
		return
	}
	timer := time.NewTimer(leadTimeout)
	defer timer.Stop()
	select {
	case <-ch:
	case <-timer.C:
	case <-ctx.Done():
	}
}
