package redlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/lazyctx"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/resp"
)

var errNotAsked = errors.New("not asked")

// errLate is the error of an attempt that won after its term had ended.
var errLate = fmt.Errorf("a quorum answered after the term had ended: %w", os.ErrDeadlineExceeded)

// These are the answers of the lead. queue.lua returns the number of a refusal minus one.
const (
	unanswered int32 = iota
	behind           // the lead votes no, and another caller has waited longer
	next             // the lead votes no, and no other caller has waited longer
	behindFree       // like behind, but the key is free on the lead
	leadYes          // the lead votes yes, and the waiter has left the queue
)

// attempt is one try to take a key by a vote of the nodes.
type attempt struct {
	m      *members
	hs     *holds
	c      backend.Claim
	h      *hold // of c, from this attempt on
	ballot *ballot

	lead   int           // the node that is asked first, or noLead
	waiter string        // the name in the queue; empty for a caller that does not queue
	since  time.Time     // when the waiter arrived
	shun   func(i int)   // is called if the lead cannot keep the queue
	voted  chan struct{} // closed when the lead has voted
	vote   error         // the lead's vote; set before voted is closed
	answer atomic.Int32  // what the lead says about the queue
}

// run asks the nodes to vote, and returns as soon as the votes decide the result. Calls in flight
// continue after that. If the attempt fails, the records that these calls may have written are
// released when the calls end.
func (a *attempt) run(ctx context.Context) (g backend.Grant, err error) {
	if err := a.hs.checkTTL(a.c.TTL); err != nil {
		return g, err
	}
	if !a.m.begin() {
		return g, errClosed
	}
	defer a.m.work.Done()
	a.hs.add(a.h)

	won := (a.lead == noLead || a.askLead(ctx)) && a.won(ctx)
	verdict := a.ballot.result()
	switch {
	case won:
		g.Fence, err = a.confirm(ctx)
	case verdict == errNo:
		// abandon below releases the records on the nodes that voted yes.
		err = &backend.HeldError{}
	case verdict == errNoQuorum:
		err = a.ballot.failures()
	case ctx.Err() != nil:
		err = ctx.Err()
	default:
		err = errLate
	}
	if err != nil {
		a.hs.abandon(a.h, verdict == errNo)
	}
	return g, err
}

// won reports whether redsync has counted a quorum of votes within the term. It returns false if
// the ballot is decided first, redsync gives up, or ctx ends. It also ends the attempt as refused
// if a quorum has voted, but a win would need a node that has not answered in the usual time.
// Otherwise the votes for this attempt would block other callers while that node hangs.
func (a *attempt) won(ctx context.Context) bool {
	votes := make([]func() (bool, error), len(a.m.nodes))
	for i, n := range a.m.nodes {
		if i == a.lead {
			votes[i] = a.leadVote
			continue
		}
		// Count the call as work here. redsync may return before the call's goroutine starts, so
		// that Close would not wait for that goroutine.
		a.m.work.Add(1)
		votes[i] = func() (bool, error) {
			defer a.m.work.Done()
			return asVote(a.ask(n))
		}
	}
	mutex := newMutex(a.c.Key, a.h.record, a.c.TTL, votes)
	counted := make(chan error, 1) // has room for one result, because won may return before redsync
	// Do not pass ctx, because the driver must learn whether a call has taken the key.
	a.m.work.Go(func() { counted <- mutex.TryLockContext(context.Background()) })

	patience := a.m.patience()
	for {
		select {
		case err := <-counted:
			return err == nil
		case <-a.ballot.done:
			return false
		case <-time.After(patience):
			a.ballot.refuseIfSplit()
		case <-ctx.Done():
			a.ballot.decide(errAbandoned)
			return false
		}
	}
}

// asVote returns a vote as redsync wants it.
func asVote(vote error) (bool, error) {
	if vote == errNo {
		return false, nil
	}
	return vote == nil, vote
}

// askLead asks the lead for its vote before other nodes are asked. It returns true if the lead has
// voted yes or has not answered in time, so that redsync must count votes. Then redsync asks the
// other nodes, if there are any, and also counts the lead's vote.
func (a *attempt) askLead(ctx context.Context) bool {
	n := a.m.nodes[a.lead]
	a.m.work.Go(func() { _ = a.ask(n) })

	timeout := n.patience()
	select {
	case <-a.voted:
	case <-a.ballot.done:
	case <-time.After(timeout):
		n.latency.Store(0) // the node cannot lead until it has answered a call
		if n.needed() {
			break // there is no quorum without this node
		}
		// Count this node as silent for now. If rivals split the other votes, the ballot would
		// otherwise wait for the lead.
		a.ballot.cast(a.lead, n.noAnswer(timeout))
	case <-ctx.Done():
		a.ballot.decide(errAbandoned)
	}

	if !a.ballot.isDecided() {
		return true
	}
	for i := range a.m.nodes {
		// Call settle for the nodes that are never asked, because a release waits for the outcome
		// on every node.
		if i != a.lead {
			a.hs.settle(a.h, i, false, false, 0)
		}
	}
	return false
}

// leadVote waits for the lead's vote, which askLead has requested.
func (a *attempt) leadVote() (bool, error) {
	select {
	case <-a.voted:
		return asVote(a.vote)
	// The ballot may be decided before the lead votes.
	case <-a.ballot.done:
		return false, errNotAsked
	}
}

// ask asks a node for its vote, and casts that vote. It is called at most once for each node.
func (a *attempt) ask(n *node) (vote error) {
	if why, hangs := n.suspicion(); hangs && !n.needed() {
		// Do not let the ballot wait for a node that hangs, because the votes for this attempt
		// would block other callers during that wait.
		a.ballot.cast(n.i, why)
	}

	vote = a.requestVote(n)
	if vote == nil {
		// Count the record before the vote: after the last vote a renewal may begin, which needs
		// records that count.
		a.hs.count(a.h, n.i, a.h.began, a.c.TTL, 0)
	}
	// If the lead refuses, end the attempt before other nodes vote. Decide the ballot here, because
	// the refusal of a single node does not decide it.
	if n.i == a.lead && vote == errNo {
		a.ballot.decide(errNo)
	}
	a.ballot.cast(n.i, vote)
	if n.i == a.lead {
		a.vote = vote
		close(a.voted)
	}
	return vote
}

// requestVote asks a node for its vote, and calls settle with the outcome.
func (a *attempt) requestVote(n *node) error {
	// Do not end the call with the caller's context. Even if the caller has left, the driver must
	// learn whether the call took the key, so that it can release the key.
	ctx := lazyctx.WithTimeout(context.Background(), nil, a.c.Timeout)
	defer ctx.End()

	err := n.admit()
	if err == nil && n.standing.Load() == nil {
		// Load the mark before the vote, because checkVote compares the vote with the mark. An old
		// mark will do.
		_, err = n.refreshMark(ctx, time.Time{})
	}
	if err == nil && !a.hs.live(a.h) {
		err = errNotAsked // otherwise the record would have to be released at once
	}
	if err != nil {
		a.hs.settle(a.h, n.i, false, false, 0)
		return err
	}

	began := time.Now()
	id, proposal, known, err := a.send(ctx, n)
	mayHold := err == nil || !known
	if err == errNo {
		n.observe(ctx, began, nil)
	} else {
		n.observe(ctx, began, err)
	}
	// Call settle before checkVote, which may call the node again, because a release may wait for
	// the outcome of the vote.
	a.hs.settle(a.h, n.i, mayHold, !known, proposal)

	switch err {
	case nil:
		// If this fails, the record is there all the same.
		return n.checkVote(ctx, id, began)
	case errNo:
		if err := n.checkRefusal(id); err != nil {
			return err
		}
		return errNo
	}
	return n.nodeError(err, time.Since(began))
}

// mayArrive reports whether a command that has failed with err may have been executed, or may still
// be.
func mayArrive(err error) bool { return !resp.IsReply(err) && !resp.IsUnsent(err) }

// send sends the commands or the script that take the key. It returns the vote, the run and the
// mark of the server that voted, and the proposed fence if the claim is fenced. If the result known
// is false, the node may have the record. The script for the lead also maintains the queue.
func (a *attempt) send(
	ctx context.Context, n *node,
) (id standing, proposal uint64, known bool, err error) {
	if !a.c.Fenced && n.i != a.lead {
		id, known, err = a.sendPlain(ctx, n)
		// A server that cannot write, for example because it has no memory left, refuses SET even
		// if the key is held. Only the script finds out whether the key is held.
		if !known || !resp.IsReply(err) {
			return id, 0, known, err
		}
	}
	return a.sendScript(ctx, n)
}

// sendPlain asks for a vote by plain commands, which cost the server less than a script. The
// commands are sent together over one connection, so one run of one server executes them in order.
// If the node loses its data after the SET, the GET does not find the mark that the driver knows.
func (a *attempt) sendPlain(ctx context.Context, n *node) (id standing, known bool, err error) {
	commands := [][]string{
		{"set", redisstore.LockKey(a.c.Key), a.h.record, "px", redisstore.Millis(a.c.TTL), "nx"},
		{"get", markKey},
		{"info", "server"},
	}
	if n.store.NamesRun() {
		commands = commands[:2]
	}
	replies := n.store.DoAll(ctx, commands...)
	set, get, last := replies[0], replies[1], replies[len(replies)-1]
	id.mark, _ = get.Value.(string)
	id.run = cmp.Or(last.Run, runOf(last.Value))

	switch {
	case set.Err != nil:
		return id, !mayArrive(set.Err), set.Err
	case set.Value == nil:
		return id, true, errNo // this counts whatever the mark is, because it gives the key to nobody
	case set.Value != "OK":
		return id, false, n.store.Unexpected(set.Value)
	case get.Err != nil || last.Err != nil:
		// The record is there, but the vote cannot be checked. Do not return a reply of the server,
		// which would say that the vote failed.
		return id, false, fmt.Errorf("%w: %v", errNotChecked, cmp.Or(get.Err, last.Err))
	}
	return id, true, nil
}

// errNotChecked is the error of a vote whose node has not told its mark or its run.
var errNotChecked = errors.New("the vote cannot be checked")

// sendScript asks for a vote by a script.
func (a *attempt) sendScript(
	ctx context.Context, n *node,
) (id standing, proposal uint64, known bool, err error) {
	counterTTL := ""
	if a.c.Fenced {
		counterTTL = redisstore.Millis(a.hs.fenceTTL)
	}
	key := a.c.Key
	script, call := acquireScript, redisstore.Call{
		Keys: []string{redisstore.LockKey(key), redisstore.DerivedKey("fence", key), markKey},
		Args: []string{a.h.record, redisstore.Millis(a.c.TTL), counterTTL},
	}
	if n.i == a.lead {
		script = leadScript
		call.Keys = append(call.Keys, queueKeys(key)...)
		waited := "0"
		if a.waiter != "" {
			waited = strconv.FormatInt(time.Since(a.since).Milliseconds(), 10)
		}
		call.Args = append(call.Args, a.waiter, waited)
	}
	reply, err := n.store.Run(ctx, script, call)
	if err != nil {
		known = !mayArrive(err)
		if n.i == a.lead && known {
			a.shun(n.i) // this node cannot keep the queue, so no waiter would be woken
		}
		return id, 0, known, err
	}

	parts, _ := reply.([]any)
	switch {
	case len(parts) == 4 && parts[0] == int64(1):
		text, _ := parts[1].(string)
		mark, ok := parts[2].(string)
		proposal, err = strconv.ParseUint(text, 10, 64)
		ok = ok && err == nil && proposal <= maxFence
		if ok && (proposal > 0) == a.c.Fenced {
			if n.i == a.lead {
				a.answer.Store(leadYes)
			}
			return standing{run: runOf(parts[3]), mark: mark}, proposal, true, nil
		}
	case len(parts) >= 2 && parts[0] == int64(0):
		mark, ok := parts[1].(string)
		if ok && a.understands(n, parts[2:]) {
			return standing{mark: mark}, 0, true, errNo
		}
	case len(parts) == 1 && parts[0] == int64(-1):
		if n.i == a.lead {
			a.shun(n.i)
		}
		return id, 0, true, noFence(n, key)
	}
	// The outcome is unknown, because a script with an unexpected reply may have taken the key.
	return id, 0, false, n.store.Unexpected(reply)
}

// understands stores what the lead says about the queue to a caller that it has refused. The result
// is false if the script never says this.
func (a *attempt) understands(n *node, says []any) bool {
	if n.i != a.lead {
		return len(says) == 0
	}
	if len(says) != 1 {
		return false
	}
	answer, ok := says[0].(int64)
	if !ok || answer < 0 || answer >= int64(leadYes)-1 {
		return false
	}
	a.answer.Store(int32(answer) + 1)
	return true
}

// confirm returns the fence of an attempt that has won its quorum, or an error if the attempt must
// not have the key.
//
// The votes of a slow attempt may be lost by now, while repaired records of another hold count (see
// copyOn). So a slow attempt asks the nodes again, until the answers are new enough. An attempt
// with a fence asks them in any case.
func (a *attempt) confirm(ctx context.Context) (fence uint64, err error) {
	asked := a.h.began
	for first := true; ; first = false {
		at := a.m.now()
		// Check the term again, because redsync leaves out the time for the lead's vote and for
		// these questions.
		if at.Sub(a.h.began) >= a.c.TTL-backend.Drift(a.c.TTL) {
			return 0, errLate
		}
		done := !first || !a.c.Fenced
		if done && at.Sub(asked) < attemptTime {
			return fence, nil
		}
		asked = at
		// If this fails, the next fence is larger than necessary, which is harmless.
		if fence, err = a.hs.confirm(ctx, a.h); err != nil {
			return 0, err
		}
	}
}
