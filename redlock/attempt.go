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

// errNotAsked is the vote of a node that was not asked, because the attempt had already ended.
var errNotAsked = errors.New("not asked")

// errLate is the error of an attempt that won after its term had ended.
var errLate = fmt.Errorf("a quorum answered after the term had ended: %w", os.ErrDeadlineExceeded)

// These are the answers of the lead. For a refusal, queue.lua returns the number here minus one.
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

	// asked[i] is closed when node i has been asked, and settle has stored its answer. The method
	// won sets asked.
	asked  []chan struct{}
	vote   error        // the lead's vote; set before voted is closed
	answer atomic.Int32 // the lead's answer, one of the constants above
}

// run asks the nodes to vote, and returns as soon as the votes decide the result. Calls in flight
// continue after that. If the attempt fails, all its records are released, those of calls in flight
// when these calls end.
func (a *attempt) run(ctx context.Context) (g backend.Grant, err error) {
	if err := a.hs.checkTTL(a.c.TTL); err != nil {
		return g, err
	}
	if !a.m.begin() {
		return g, errClosed
	}
	defer a.m.work.Done()
	a.hs.add(a.h)

	// Without a lead, all nodes are asked at once. Otherwise, a refusal by the lead ends the
	// attempt before the other nodes are asked.
	won := (a.lead == noLead || a.askLead(ctx)) && a.won(ctx)
	verdict := a.ballot.result()
	switch {
	case won:
		g.Fence, err = a.confirm(ctx)
	case verdict == errNo:
		err = &backend.HeldError{}
	case verdict == errNoQuorum,
		verdict == errAbandoned && ctx.Err() == context.DeadlineExceeded:
		err = a.ballot.failures()
	case ctx.Err() != nil:
		err = ctx.Err()
	default:
		// The ballot has no verdict, so redsync has given up. It does so if the term is over.
		err = errLate
	}

	if err != nil {
		a.hs.abandon(a.h)
	}
	return g, err
}

// won has redsync count the votes, and reports whether a quorum has voted yes within the term. It
// returns false if the ballot is decided first, redsync gives up, or ctx ends.
//
// won also refuses the attempt if a quorum has voted, but a win would need a node that has not
// answered in the usual time. Otherwise the votes for this attempt would block other callers while
// that node hangs.
func (a *attempt) won(ctx context.Context) bool {
	votes := make([]func() error, len(a.m.nodes))
	a.asked = make([]chan struct{}, len(a.m.nodes))
	for i, n := range a.m.nodes {
		if i == a.lead {
			// askLead has already asked the lead.
			votes[i] = a.leadVote
			a.asked[i] = a.voted
			continue
		}
		a.asked[i] = make(chan struct{})

		// Count the call as work here, not in the function. redsync may return before it runs the
		// function, and then Close would not wait for the call.
		a.m.work.Add(1)
		votes[i] = func() error {
			defer a.m.work.Done()
			defer close(a.asked[i])
			return a.ask(n)
		}
	}

	mutex := newMutex(a.c.Key, a.h.record, a.c.TTL, votes)
	counted := make(chan error, 1) // has room for the result, because won may return before redsync

	// Do not pass ctx, because its end must not stop the calls: the driver must learn whether they
	// have taken the key.
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

// askLead asks the lead for its vote before other nodes are asked. It returns true if the attempt
// goes on, because the lead has voted yes, or has not voted in the usual time. It returns false if
// the ballot is decided, such as by a refusal of the lead, or if ctx ends.
func (a *attempt) askLead(ctx context.Context) bool {
	n := a.m.nodes[a.lead]
	a.m.work.Go(func() { _ = a.ask(n) })

	select {
	case <-a.voted:
	case <-a.ballot.done: // the method ask decides the ballot just before it closes voted
	case <-time.After(n.patience()):
		n.latency.Store(0) // the node cannot lead until it has answered a call
	case <-ctx.Done():
		a.ballot.decide(errAbandoned)
	}

	return a.ballot.result() == errPending
}

// leadVote waits for the lead's vote, which askLead has requested, and returns it. If the ballot is
// decided before the lead votes, leadVote returns errNotAsked, because redsync must not wait for a
// vote that decides nothing.
func (a *attempt) leadVote() error {
	select {
	case <-a.voted:
		return a.vote
	case <-a.ballot.done:
		return errNotAsked
	}
}

// ask asks a node for its vote, casts that vote, and returns it. It is called at most once for each
// node.
func (a *attempt) ask(n *node) error {
	vote := a.requestVote(n)
	if vote == nil {
		// Call count before cast. The vote may win the key, and then a renewal may begin at once,
		// which needs records that count.
		a.hs.count(a.h, n.i, a.h.began, a.c.TTL, 0)
	}

	// A refusal by the lead ends the attempt, although the refusal of one node does not decide a
	// ballot by itself.
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

// requestVote asks a node for its vote, calls settle with the outcome, and returns the vote: nil
// for yes, errNo for no, or an error that says why the node's vote does not count.
func (a *attempt) requestVote(n *node) error {
	// Do not end the call with the caller's context. Even if the caller has left, the driver must
	// learn whether the call took the key, so that it can release the key.
	ctx := calls.WithTimeout(context.Background(), nil, a.c.Timeout)
	defer ctx.End()

	err := n.admit()
	if err == nil && n.standing.Load() == nil {
		// Load the standing before the vote, because checkVote and checkRefusal compare it with the
		// vote. Any known standing will do, so since is zero.
		_, err = n.refreshMark(ctx, time.Time{})
	}

	if err == nil && !a.hs.begin(a.h, n.i) {
		err = errNotAsked // the attempt has already failed
	}
	if err != nil {
		return err
	}

	began := time.Now()
	r := a.send(ctx, n)

	// Call settle at once, because a release may wait for it. checkVote below may call the node
	// again.
	a.hs.settle(a.h, n.i, r)

	switch r.vote {
	case nil:
		n.observe(began, nil)
		return n.checkVote(ctx, r.id, began) // if this fails, the node has the record all the same
	case errNo:
		n.observe(began, nil)
		return cmp.Or(n.checkRefusal(r.id.mark), errNo)
	}

	// The node has not voted.
	return n.observe(began, r.vote)
}

// mayArrive reports whether a command that has failed with err may have been executed, or may be
// executed later. It may not if the server has replied with err, or if the command was not sent.
func mayArrive(err error) bool { return !resp.IsReply(err) && !resp.IsUnsent(err) }

// send asks the node to take the key for this attempt. It needs the script for a fence, and for the
// queue of the lead. Otherwise it sends plain commands.
func (a *attempt) send(ctx context.Context, n *node) reply {
	if !a.c.Fenced && n.i != a.lead {
		r := a.sendPlain(ctx, n)

		// If the server has replied with an error, ask again by the script. A server that cannot
		// write, for example because it has no memory left, refuses SET even if the key is held.
		// Only the script finds out whether the key is held.
		if !resp.IsReply(r.vote) {
			return r
		}
	}

	return a.sendScript(ctx, n)
}

// sendPlain asks for a vote by plain commands, which cost the server less than a script. The
// commands are sent together over one connection, so one run of one server executes them in order.
// The GET comes after the SET. So if the node loses the record again with its data before the GET,
// the reply does not have the mark that the driver knows.
func (a *attempt) sendPlain(ctx context.Context, n *node) reply {
	commands := [][]string{
		{"set", redisstore.LockKey(a.c.Key), a.h.record, "px", redisstore.Millis(a.c.TTL), "nx"},
		{"get", markKey},
		{"info", "server"},
	}

	if n.store.NamesRun() {
		commands = commands[:2] // without INFO, because each reply names the run
	}
	replies := n.store.DoAll(ctx, commands...)
	set, get := replies[0], replies[1]
	last := replies[len(replies)-1] // the reply to INFO, or get
	mark, _ := get.Value.(string)
	id := standing{mark: mark, run: cmp.Or(last.Run, runOf(last.Value))}

	err := cmp.Or(get.Err, last.Err)
	switch {
	case set.Err != nil:
		return reply{vote: set.Err, unknown: mayArrive(set.Err)}
	case set.Value == nil:
		// This counts even if the other commands failed, because a refusal gives the key to no
		// caller.
		return reply{vote: errNo, id: id}
	case set.Value != "OK":
		return reply{vote: n.store.Unexpected(set.Value), unknown: true}
	case err != nil:
		// The node has the record, but the vote cannot be checked. Do not wrap err: the method send
		// would take a reply of the server for a failed SET.
		return reply{vote: fmt.Errorf("the vote cannot be checked: %v", err), unknown: true}
	}

	return reply{id: id}
}

// sendScript asks for a vote by a script. The script for the lead also keeps the queue.
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
		waited := "0" // a caller that does not queue ranks behind all waiters
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

// decode decodes a reply of the script, whose first element is 1 for yes, 0 for no, and -1 if the
// node can propose no fence. From the lead, decode also stores the answer about the queue. The
// result ok is false if the reply is none of these.
func (a *attempt) decode(n *node, found any) (r reply, ok bool) {
	parts, _ := found.([]any)
	switch {
	case len(parts) == 4 && parts[0] == int64(1):
		text, _ := parts[1].(string)
		proposal, err := strconv.ParseUint(text, 10, 64)
		r.proposal = proposal
		r.id.mark, ok = parts[2].(string)
		r.id.run = runOf(parts[3])
		isProposal := proposal <= maxFence && (proposal > 0) == a.c.Fenced
		ok = ok && err == nil && isProposal
		if ok && n.i == a.lead {
			a.answer.Store(leadYes)
		}
	case len(parts) == 2 && parts[0] == int64(0) && n.i != a.lead:
		r.vote = errNo
		r.id.mark, ok = parts[1].(string)
	case len(parts) == 3 && parts[0] == int64(0) && n.i == a.lead:
		r.vote = errNo
		r.id.mark, ok = parts[1].(string)
		says, isNumber := parts[2].(int64) // what the queue says, from 0 to 2
		ok = ok && isNumber && says >= 0 && says < int64(leadYes)-1
		if ok {
			a.answer.Store(int32(says) + 1)
		}
	case len(parts) == 1 && parts[0] == int64(-1):
		return reply{vote: noFence(n, a.c.Key)}, true
	}

	return r, ok
}

// confirm returns the fence of an attempt that has won its quorum, or an error if the attempt must
// not have the key.
//
// When the attempt wins, the answers of its quorum must be newer than attemptTime. The votes of a
// slower attempt may be lost by now, while repaired records of another hold count (see copyOn). So
// a slow attempt asks the nodes whether they still have its record, until the answers are new
// enough. An attempt with a fence asks at least once, because the nodes must store the fence.
func (a *attempt) confirm(ctx context.Context) (fence uint64, err error) {
	asked := a.h.began // when the nodes were last asked
	mustAsk := a.c.Fenced
	for {
		at := a.m.now()

		// Check the term here, because redsync counts neither the time that the lead took to vote,
		// nor the time of the questions below.
		if at.Sub(a.h.began) >= a.c.TTL-backend.Drift(a.c.TTL) {
			return 0, errLate
		}
		if !mustAsk && at.Sub(asked) < attemptTime {
			return fence, nil
		}
		asked = at
		mustAsk = false

		// If this fails, nodes may keep the fence. Then the next fence is larger than necessary,
		// which is harmless.
		if fence, err = a.hs.confirm(ctx, a.h, a.asked); err != nil {
			return 0, err
		}
	}
}
