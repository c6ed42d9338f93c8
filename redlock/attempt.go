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
	"github.com/hasplock/hasp/internal/calls"
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

// reply is what a request for a node's vote has led to.
type reply struct {
	vote     error    // nil for yes, errNo for no, or an error that says why there is no vote
	unknown  bool     // the node may have the record, or receive it later
	id       standing // the run and the mark of the server; a refusal may contain only the mark
	proposal uint64   // the fence that the node proposes; 0 without one
}

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
	voted  chan struct{} // closed when the lead has voted

	// asked[i] is closed when node i has been asked, and settle has stored its answer. The method won
	// sets it.
	asked  []chan struct{}
	vote   error        // the lead's vote; set before voted is closed
	answer atomic.Int32 // what the lead says about the queue
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
		a.hs.abandon(a.h)
	}
	return g, err
}

// won reports whether redsync has counted a quorum of votes within the term. It returns false if
// the ballot is decided first, redsync gives up, or ctx ends. It also ends the attempt as refused
// if a quorum has voted, but a win would need a node that has not answered in the usual time.
// Otherwise the votes for this attempt would block other callers while that node hangs.
func (a *attempt) won(ctx context.Context) bool {
	votes := make([]func() error, len(a.m.nodes))
	a.asked = make([]chan struct{}, len(a.m.nodes))
	for i, n := range a.m.nodes {
		if i == a.lead {
			votes[i] = a.leadVote
			a.asked[i] = a.voted
			continue
		}
		a.asked[i] = make(chan struct{})

		// Count the call as work here. redsync may return before the call's goroutine starts, so
		// that Close would not wait for that goroutine.
		a.m.work.Add(1)
		votes[i] = func() error {
			defer a.m.work.Done()
			defer close(a.asked[i])
			return a.ask(n)
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

// askLead asks the lead for its vote before other nodes are asked. It returns true if the lead has
// voted yes or has not answered in time, so that redsync must count votes. Then redsync asks the
// other nodes, if there are any, and also counts the lead's vote.
func (a *attempt) askLead(ctx context.Context) bool {
	n := a.m.nodes[a.lead]
	a.m.work.Go(func() { _ = a.ask(n) })

	select {
	case <-a.voted:
	case <-a.ballot.done:
	case <-time.After(n.patience()):
		n.latency.Store(0) // the node cannot lead until it has answered a call
	case <-ctx.Done():
		a.ballot.decide(errAbandoned)
	}

	return a.ballot.result() == errPending
}

// leadVote waits for the lead's vote, which askLead has requested.
func (a *attempt) leadVote() error {
	select {
	case <-a.voted:
		return a.vote
	// The ballot may be decided before the lead votes.
	case <-a.ballot.done:
		return errNotAsked
	}
}

// ask asks a node for its vote, and casts that vote. It is called at most once for each node.
func (a *attempt) ask(n *node) error {
	vote := a.requestVote(n)
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
	ctx := calls.WithTimeout(context.Background(), nil, a.c.Timeout)
	defer ctx.End()

	err := n.admit()
	if err == nil && n.standing.Load() == nil {
		// Load the mark before the vote, because checkVote compares the vote with the mark. An old
		// mark will do.
		_, err = n.refreshMark(ctx, time.Time{})
	}

	if err == nil && !a.hs.begin(a.h, n.i) {
		err = errNotAsked
	}
	if err != nil {
		return err
	}

	began := time.Now()
	r := a.send(ctx, n)

	// Call settle before checkVote, which may call the node again, because a release may wait for
	// the outcome of the vote.
	a.hs.settle(a.h, n.i, r)

	switch r.vote {
	case nil:
		n.observe(began, nil)
		return n.checkVote(ctx, r.id, began) // if this fails, the record is there all the same
	case errNo:
		n.observe(began, nil)
		return cmp.Or(n.checkRefusal(r.id.mark), errNo)
	}

	return n.observe(began, r.vote)
}

// mayArrive reports whether a command that has failed with err may have been executed, or may still
// be.
func mayArrive(err error) bool { return !resp.IsReply(err) && !resp.IsUnsent(err) }

// send sends the commands or the script that take the key. The script for the lead also maintains
// the queue.
func (a *attempt) send(ctx context.Context, n *node) reply {
	if !a.c.Fenced && n.i != a.lead {
		r := a.sendPlain(ctx, n)

		// A server that cannot write, for example because it has no memory left, refuses SET even
		// if the key is held. Only the script finds out whether the key is held.
		if r.unknown || !resp.IsReply(r.vote) {
			return r
		}
	}

	return a.sendScript(ctx, n)
}

// sendPlain asks for a vote by plain commands, which cost the server less than a script. The
// commands are sent together over one connection, so one run of one server executes them in order.
// If the node loses its data after the SET, the GET does not find the mark that the driver knows.
func (a *attempt) sendPlain(ctx context.Context, n *node) reply {
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
	mark, _ := get.Value.(string)
	id := standing{mark: mark, run: cmp.Or(last.Run, runOf(last.Value))}

	switch err := cmp.Or(get.Err, last.Err); {
	case set.Err != nil:
		return reply{vote: set.Err, unknown: mayArrive(set.Err)}
	case set.Value == nil:
		return reply{vote: errNo, id: id} // counts whatever the mark is: it gives the key to nobody
	case set.Value != "OK":
		return reply{vote: n.store.Unexpected(set.Value), unknown: true}
	case err != nil:
		// The record is there, but the vote cannot be checked. Do not wrap err, because a reply of
		// the server would say that the vote failed.
		return reply{vote: fmt.Errorf("the vote cannot be checked: %v", err), unknown: true}
	}

	return reply{id: id}
}

// sendScript asks for a vote by a script.
func (a *attempt) sendScript(ctx context.Context, n *node) reply {
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
		call.Keys = append(call.Keys, keysOf(key)[1:]...)
		waited := "0"
		if a.waiter != "" {
			waited = strconv.FormatInt(time.Since(a.since).Milliseconds(), 10)
		}
		call.Args = append(call.Args, a.waiter, waited)
	}

	found, err := n.store.Run(ctx, script, call)
	if err != nil {
		return reply{vote: err, unknown: mayArrive(err)}
	}
	if r, ok := a.decode(n, found); ok {
		return r
	}

	// The outcome is unknown, because a script with an unexpected reply may have taken the key.
	return reply{vote: n.store.Unexpected(found), unknown: true}
}

// decode decodes a reply of the script. From the lead, it stores what the queue says.
func (a *attempt) decode(n *node, found any) (r reply, ok bool) {
	parts, _ := found.([]any)
	switch {
	case len(parts) == 4 && parts[0] == int64(1):
		text, _ := parts[1].(string)
		proposal, err := strconv.ParseUint(text, 10, 64)
		r.proposal = proposal
		r.id.mark, ok = parts[2].(string)
		r.id.run = runOf(parts[3])
		ok = ok && err == nil && proposal <= maxFence && (proposal > 0) == a.c.Fenced
		if ok && n.i == a.lead {
			a.answer.Store(leadYes)
		}
	case len(parts) == 2 && parts[0] == int64(0) && n.i != a.lead:
		r.vote = errNo
		r.id.mark, ok = parts[1].(string)
	case len(parts) == 3 && parts[0] == int64(0) && n.i == a.lead:
		r.vote = errNo
		r.id.mark, ok = parts[1].(string)
		says, isNumber := parts[2].(int64)
		ok = ok && isNumber && says >= 0 && says < int64(leadYes)-1
		a.answer.Store(int32(says) + 1)
	case len(parts) == 1 && parts[0] == int64(-1):
		return reply{vote: noFence(n, a.c.Key)}, true
	}

	return r, ok
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
		if fence, err = a.hs.confirm(ctx, a.h, a.asked); err != nil {
			return 0, err
		}
	}
}
