package redlock

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// node is one of the masters.
type node struct {
	d     *Driver
	i     int
	store *redisstore.Store
	name  string // as the store's errors have it
	trip  atomic.Int64
	marks marks
	run   string // of the server; guarded by Driver.mu

	mu      sync.Mutex // guards all below
	suspect time.Time  // since when it has not answered; zero if it has
	refusal error      // why no connection to a suspect is made; nil if it hangs
	asked   time.Time  // when a suspect was asked the last time
}

// A node that has not answered for a whole Timeout is asked one thing at a
// time, so that callers do not gather before it. So is one that refuses
// connections, which takes longer to hear than an answer does, while the
// others suffice.
const probeEvery = 200 * time.Millisecond

// admit is nil if the node may be asked for a vote.
func (n *node) admit() error {
	if n.trusted() {
		return nil
	}
	needed := n.needed()
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	switch {
	case n.suspect.IsZero():
		return nil
	case now.Sub(n.asked) >= probeEvery, n.refusal != nil && needed:
		n.asked = now
		return nil
	case n.refusal != nil:
		return n.refusal
	}
	return fmt.Errorf("%s: no answer for %v: %w", n.name, now.Sub(n.suspect).Round(time.Millisecond), os.ErrDeadlineExceeded)
}

// needed reports whether the others may be no quorum.
func (n *node) needed() bool {
	well := 0
	for _, other := range n.d.nodes {
		if other != n && other.trusted() && other.marks.voting() {
			well++
		}
	}
	return well < n.d.quorum()
}

// heard notes how a call came out that was sent at began under ctx.
func (n *node) heard(ctx context.Context, began time.Time, err error) {
	silent := err != nil && (ctx.Err() != nil || isTimeout(err))
	refused := err != nil && !silent && unsent(err)
	if !silent && !refused && n.trusted() {
		if err == nil {
			n.measured(time.Since(began))
		}
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case !silent && !refused:
		n.suspect, n.refusal = time.Time{}, nil
		return
	case n.suspect.IsZero():
		n.suspect, n.asked = began, time.Now()
	}
	n.refusal = nil
	if refused {
		n.refusal = n.plain(err, 0)
	}
}

// trusted reports whether the node is not suspect.
func (n *node) trusted() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.suspect.IsZero()
}

// measured has trip follow the round trips of the node.
func (n *node) measured(took time.Duration) {
	old := time.Duration(n.trip.Load())
	if old == 0 {
		old = took
	}
	n.trip.Store(int64(max(old+(took-old)/8, 1)))
}

// take asks for the key, once.
func (n *node) take(a *attempt) (vote, error) {
	ctx, cancel := context.WithTimeout(context.Background(), a.c.Timeout)
	defer cancel()
	err := n.admit()
	if err == nil {
		err = n.marks.known(ctx, n)
	}
	if err != nil {
		a.voted(n.i, failed, 0)
		return failed, err
	}
	began := time.Now()
	v, fence, mark, err := n.send(ctx, a)
	n.heard(ctx, began, err)
	a.voted(n.i, v, fence)
	switch {
	case err != nil:
		return v, n.plain(err, time.Since(began))
	case v == yes:
		if err := n.votes(ctx, a, mark); err != nil {
			return unsure, err // the record is there all the same
		}
	}
	return v, nil
}

// send sends the one command or script that takes the key.
func (n *node) send(ctx context.Context, a *attempt) (v vote, fence uint64, mark string, err error) {
	if a.c.Fenced {
		return n.sendFenced(ctx, a)
	}
	// The mark after the lock: a node that loses its data in between has lost
	// its mark, too.
	replies := n.store.Together(ctx,
		[]any{"set", a.lock, a.record, "px", redisstore.Millis(a.c.TTL), "nx"},
		[]any{"get", markKey})
	set, get := replies[0], replies[1]
	switch {
	case set.Err != nil:
		return outcome(set.Err), 0, "", set.Err
	case set.Value == nil:
		return no, 0, "", nil
	case set.Value != "OK":
		return unsure, 0, "", n.store.Unexpected(set.Value)
	case get.Err != nil:
		return unsure, 0, "", get.Err
	}
	mark, _ = get.Value.(string)
	return yes, 0, mark, nil
}

// release gives the key back, if the record begins so.
func (n *node) release(ctx context.Context, c backend.Claim, begins, channel string) error {
	began := time.Now()
	reply, err := n.store.Run(ctx, releaseScript, redisstore.Call{
		Keys: []string{redisstore.LockKey(c.Key)},
		Args: []any{begins, channel, c.Token},
	})
	n.heard(ctx, began, err)
	if crowd, ok := reply.(int64); ok && crowd > 1 {
		n.d.released(c.Key, int(min(crowd-1, maxCrowd)))
		reply = int64(1)
	}
	return n.store.Owned(reply, err)
}

// outcome is the vote of a node whose call has failed.
func outcome(err error) vote {
	if answered(err) || unsent(err) {
		return failed
	}
	return unsure
}
