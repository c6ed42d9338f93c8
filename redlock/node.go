package redlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/lazyctx"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// probeEvery is the shortest time between two calls to a suspect node, so that callers rarely wait
// for that node. A node is suspect if a call to it has timed out, or if it refuses or closes every
// connection. But if a quorum needs a node that refuses connections, callers ask it at any time.
const probeEvery = 200 * time.Millisecond

// node is one of the masters.
type node struct {
	d       *driver
	i       int // the index in d.nodes
	store   *redisstore.Store
	name    string       // as the store's errors name it
	latency atomic.Int64 // smoothed answer time in ns; 0 means unknown, and then the node cannot lead
	marks   marks

	cleanups map[string]*cleanup // releases to be repeated, by record or token; d.mu guards this map

	mu           sync.Mutex // guards the fields below
	suspectSince time.Time  // when the first call without an answer began; zero if the node is not suspect
	refusal      error      // the error of a suspect node that refuses connections; nil if the node hangs
	probed       time.Time  // when the suspect node was last asked
	disconnects  int        // how many successive calls failed because the connection was closed
}

// admit returns nil if the node may be asked now. Otherwise it returns why the node is suspect.
func (n *node) admit() error {
	why, hangs := n.suspicion()
	// If a node refuses connections but a quorum needs it, ask the node at once. Call needed before
	// n.mu is locked, because needed locks other nodes.
	if why == nil || !hangs && n.needed() {
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	// Check and set probed with mu held, so that only one of many callers asks the node.
	if now := time.Now(); now.Sub(n.probed) >= probeEvery {
		n.probed = now
		return nil
	}
	return why
}

// suspicion returns why the node is suspect, or nil if it is not. It also reports whether the
// suspect node hangs. A suspect node that does not hang refuses connections.
func (n *node) suspicion() (why error, hangs bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.suspectSince.IsZero() || n.refusal != nil {
		return n.refusal, false
	}
	return fmt.Errorf("%s: no answer for %v: %w", n.name, time.Since(n.suspectSince).Round(time.Millisecond), os.ErrDeadlineExceeded), true
}

// healthy reports whether the node is not suspect.
func (n *node) healthy() bool {
	why, _ := n.suspicion()
	return why == nil
}

// needed reports whether a quorum needs this node, because too few others are healthy and vote.
func (n *node) needed() bool {
	voting := 0
	for _, other := range n.d.nodes {
		// The count may be out of date, because each node is locked separately. This is harmless,
		// because the count decides only which nodes callers wait for.
		if other != n && other.healthy() && other.marks.voting() {
			voting++
		}
	}
	return voting < n.d.quorum()
}

// observe records the outcome of a call, which had the context ctx and was sent at the time began.
func (n *node) observe(ctx context.Context, began time.Time, err error) {
	var timeout net.Error // the deadline of a connection may pass a moment before that of ctx
	late := err != nil && (ctx.Err() != nil || errors.As(err, &timeout) && timeout.Timeout())
	refuses := err != nil && !late && resp.IsUnsent(err)
	closed := err != nil && !late && !refuses && disconnected(err)
	if late || refuses || closed {
		n.latency.Store(0) // the node cannot lead until it has answered a call
	}

	n.mu.Lock()
	defer n.mu.Unlock()
	if closed {
		// After a restart, all connections of the pool may be dead. If more successive calls fail
		// than the pool has connections, the server itself closes the connections.
		n.disconnects++
		refuses = n.disconnects > connections
	}
	if !late && !refuses {
		if !closed {
			n.disconnects = 0
		}
		if err == nil && n.suspectSince.IsZero() {
			took := time.Since(began)
			old := cmp.Or(time.Duration(n.latency.Load()), took)
			n.latency.Store(int64(max(old+(took-old)/8, 1)))
		}
		n.suspectSince, n.refusal = time.Time{}, nil
		return
	}

	if n.suspectSince.IsZero() {
		n.suspectSince, n.probed = began, time.Now()
	}
	n.refusal = nil
	if refuses {
		n.refusal = n.nodeError(err, 0)
	}
}

// patience returns how long a caller waits for this node before going on without it.
func (n *node) patience() time.Duration {
	return max(leadTimeout, 8*time.Duration(n.latency.Load()))
}

// patience returns how long a caller waits for the slowest node.
func (d *driver) patience() (most time.Duration) {
	for _, n := range d.nodes {
		most = max(most, n.patience())
	}
	return most
}

// ask runs a script on the node, unless admit returns an error.
func (n *node) ask(timeout time.Duration, script *redisstore.Script, call redisstore.Call) (any, error) {
	if err := n.admit(); err != nil {
		return nil, err
	}
	reply, err := n.send(timeout, script, call)
	if err != nil {
		return nil, n.nodeError(err, timeout)
	}
	return reply, nil
}

// send runs a script on the node. No caller's context ends the call, because the outcome also
// shows whether the node answers at all.
func (n *node) send(timeout time.Duration, script *redisstore.Script, call redisstore.Call) (any, error) {
	ctx := lazyctx.WithTimeout(context.Background(), nil, timeout)
	defer ctx.End()
	began := time.Now()
	reply, err := n.store.Run(ctx, script, call)
	n.observe(ctx, began, err)
	return reply, err
}

// requestVote asks the node for its vote, and calls a.settle with the outcome.
func (n *node) requestVote(a *attempt) (vote, error) {
	// Do not end the call with the caller's context. Even if the caller has left, the driver must
	// learn whether the call took the key, so that it can release the key.
	ctx := lazyctx.WithTimeout(context.Background(), nil, a.c.Timeout)
	defer ctx.End()

	err := n.admit()
	if err == nil && n.marks.current.Load() == nil {
		// Load the mark before the vote, because checkVote compares the vote with the mark. An old
		// mark will do.
		_, err = n.refreshMark(ctx, time.Time{})
	}
	if err == nil && !a.active() {
		err = errNotAsked // otherwise the record would have to be released at once
	}
	if err != nil {
		a.settle(n.i, failed, 0)
		return failed, err
	}

	began := time.Now()
	v, fence, id, err := n.sendAcquire(ctx, a)
	n.observe(ctx, began, err)
	// Call settle before checkVote, which may call the node again, because a Release may wait for
	// the outcome of the vote.
	a.settle(n.i, v, fence)

	switch {
	case err != nil:
		return v, n.nodeError(err, time.Since(began))
	case v == yes:
		if err := n.checkVote(ctx, a, id, began); err != nil {
			return unknown, err // the vote does not count, but the record is there
		}
	case v == no:
		// Every use of a node must leave a mark there. So a node that has no mark, although other
		// nodes have one, has lost its data or was never used.
		if s := n.marks.current.Load(); s.mark != id.mark || id.run != "" && s.run != id.run {
			n.refreshInBackground(a.c.Timeout)
		}
		if other := n.d.impostor(n, runOfMark(id.mark)); other != nil {
			return failed, sameServerError{n.name, other.name}
		}
	}
	return v, nil
}

// nodeError turns the error of a call into the error of this node. The result matches no definite
// error and no context error, because one node does not decide the outcome of a call.
func (n *node) nodeError(err error, took time.Duration) error {
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%s: no answer within %v: %w", n.name, took.Round(time.Millisecond), os.ErrDeadlineExceeded)
	case backend.Definite(err):
		// Do not wrap err, so that callers do not take it for the verdict of a quorum.
		return fmt.Errorf("%v", err)
	}
	return err
}

// disconnected reports whether err says that the connection was closed.
func disconnected(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrClosedPipe) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// voteAfter returns the vote of a node whose call failed with err.
func voteAfter(err error) vote {
	if resp.IsReply(err) || resp.IsUnsent(err) {
		return failed
	}

	// The command may have been sent, so the node may have executed it.
	return unknown
}
