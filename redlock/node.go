package redlock

import (
	"cmp"
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
	}
	return n.doubtedLocked()
}

// doubted returns why the node is suspect, or nil if it is not.
func (n *node) doubted() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.doubtedLocked()
}

func (n *node) doubtedLocked() error {
	if n.suspect.IsZero() || n.refusal != nil {
		return n.refusal
	}
	return fmt.Errorf("%s: no answer for %v: %w", n.name, time.Since(n.suspect).Round(time.Millisecond), os.ErrDeadlineExceeded)
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
	if silent || refused || broke(err) {
		n.trip.Store(0) // it does not lead until it answers
	}
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
		err = n.learn(ctx)
	}
	if err == nil && !a.wanted() {
		err = errUnasked // a vote would only have to be released
	}
	if err != nil {
		a.voted(n.i, failed, 0)
		return failed, err
	}
	began := time.Now()
	v, fence, b, err := n.send(ctx, a)
	n.heard(ctx, began, err)
	a.voted(n.i, v, fence)
	switch {
	case err != nil:
		return v, n.plain(err, time.Since(began))
	case v == yes:
		if err := n.votes(ctx, a, b); err != nil {
			return unsure, err // the record is there all the same
		}
	case v == no:
		n.saw(b, a.c.Timeout)
	}
	return v, nil
}

// learn asks for the node's standing, unless it is already known. It leaves no
// record behind, so Close cancels it.
func (n *node) learn(ctx context.Context) error {
	if n.marks.at.Load() != nil {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(n.d.life, cancel)()
	return n.marks.known(ctx, n)
}

// send sends the commands or the script that take the key.
func (n *node) send(ctx context.Context, a *attempt) (v vote, fence uint64, b bearing, err error) {
	if a.c.Fenced {
		return n.sendFenced(ctx, a)
	}
	// Read the mark after taking the lock: a node that loses its data in between
	// also loses its mark. Read the run over the same connection, because another
	// connection may lead to another server.
	replies := n.store.Together(ctx,
		[]any{"set", a.lock, a.record, "px", redisstore.Millis(a.c.TTL), "nx"},
		[]any{"get", markKey},
		[]any{"info", "server"})
	set, get, info := replies[0], replies[1], replies[2]
	b.mark, _ = get.Value.(string)
	b.run = runOf(info.Value)
	switch {
	case set.Err != nil:
		return outcome(set.Err), 0, b, set.Err
	case set.Value == nil:
		return no, 0, b, nil
	case set.Value != "OK":
		return unsure, 0, b, n.store.Unexpected(set.Value)
	case get.Err != nil || info.Err != nil:
		return unsure, 0, b, cmp.Or(get.Err, info.Err)
	}
	return yes, 0, b, nil
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
