package redlock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

const (
	// noLead is the lead of an attempt that asks all nodes at once.
	noLead   = -1
	allNodes = -2 // in place of a lead: poll waits for the answers of all nodes

	// leadTimeout is the smallest limit on the time that an attempt waits for the lead.
	leadTimeout = 20 * time.Millisecond
)

var errNotAsked = errors.New("not asked")

// attempt is one try to take a key by a vote of the nodes. If it wins, it then represents the hold.
//
// Each attempt has a record of its own, token#owner or token~n#owner, so that the clean-up of
// one attempt never removes a vote for another attempt with the same token.
type attempt struct {
	d       *driver
	c       backend.Claim
	lockKey string // the name of c.Key on the nodes
	record  string
	prefix  string // the start of the record; no record of another attempt begins with it
	again   bool   // an earlier attempt may have had the same token
	began   time.Time
	ballot  *ballot

	commands [][]string // the commands of sendPlain

	lead      int           // the node that is asked first, or noLead
	place     *queueState   // the caller's name in the queue on the lead, and the lead's answer
	leadVoted chan struct{} // closed when the lead has voted
	leadYes   bool          // the lead has voted yes; set before leadVoted is closed
	leadErr   error         // why the lead does not vote; set before leadVoted is closed

	// The driver's mu guards the fields below.
	on       []onNode  // one element for each node
	fence    uint64    // the fence of the hold; 0 if the hold has none
	failed   bool      // the attempt holds nothing, so each node must release the record
	released bool      // Release was called, so no command may write the record again
	expiry   time.Time // when the record will have expired on every node
}

// onNode is the driver's knowledge about an attempt's record on one node.
type onNode struct {
	mayHold   bool          // the node may have the record
	mayArrive bool          // a command of unknown outcome may still write the record
	inFlight  chan struct{} // closed when the last command that writes the record has ended
	proposal  uint64        // the fence that the node has proposed
	proof     proof         // whether the record counts for a renewal
}

// newAttempt returns an attempt for c. The first attempt with c's token has number 0.
func (d *driver) newAttempt(c backend.Claim, number, lead int, p *queueState) *attempt {
	a := &attempt{
		d:         d,
		c:         c,
		lockKey:   redisstore.LockKey(c.Key),
		prefix:    c.Token + redisstore.Mark,
		began:     time.Now(),
		ballot:    newBallot(d.nodes, acquireRule),
		lead:      lead,
		place:     p,
		leadVoted: make(chan struct{}),
		on:        make([]onNode, len(d.nodes)),
	}

	if a.again = number > 0; a.again {
		a.prefix = c.Token + "~" + strconv.Itoa(number) + redisstore.Mark
	}
	a.record = a.prefix + c.Owner
	a.commands = [][]string{{"set", a.lockKey, a.record, "px", redisstore.Millis(c.TTL), "nx"}, {"get", markKey}, {"info", "server"}}
	a.expiry = a.began.Add(c.TTL + c.Timeout)

	for i := range a.on {
		a.on[i].inFlight = make(chan struct{})
	}
	return a
}

// tryAcquire asks the nodes to vote, and returns as soon as the votes decide the result. Calls in
// flight continue after that. If the attempt has failed, the records that these calls may have
// written are released when the calls end.
func (d *driver) tryAcquire(ctx context.Context, c backend.Claim, number, lead int, p *queueState) (backend.Grant, error) {
	if err := d.checkTTL(c.TTL); err != nil {
		return backend.Grant{}, err
	}

	a := d.newAttempt(c, number, lead, p)
	if !d.register(a) {
		return backend.Grant{}, errClosed
	}
	defer d.work.Done()

	var g backend.Grant
	var err error
	switch {
	case (lead == noLead || a.askLead(ctx)) && a.won(ctx):
		g, err = a.grant(ctx)
	case a.ballot.result() == refused:
		// cleanUp below releases the records on the nodes that voted yes.
		err = &backend.HeldError{}
	case a.ballot.result() == noQuorum:
		err = a.ballot.failures()
	case ctx.Err() != nil:
		err = ctx.Err()
	default:
		err = errLate
	}
	if err != nil {
		a.cleanUp()
	}
	return g, err
}

// errLate is the error of an attempt that won after its term had ended.
var errLate = fmt.Errorf("a quorum answered after the term had ended: %w", os.ErrDeadlineExceeded)

// won reports whether redsync has counted a quorum of votes within the term. It returns false if
// the ballot is decided first, redsync gives up, or ctx ends. It also ends the attempt as refused
// if a quorum has voted, but a win would need a node that has not answered in the usual time.
// Otherwise the votes for this attempt would block other callers while that node hangs.
func (a *attempt) won(ctx context.Context) bool {
	counted := make(chan error, 1) // has room for one result, because won may return before redsync
	// Do not pass ctx, because the driver must learn whether a call has taken the key.
	a.d.work.Go(func() { counted <- a.redsyncMutex().TryLockContext(context.Background()) })

	patience := a.d.patience()
	for {
		select {
		case err := <-counted:
			return err == nil
		case <-a.ballot.done:
			return false
		case <-time.After(patience):
			a.ballot.refuseIfSplit()
		case <-ctx.Done():
			a.ballot.decide(abandoned)
			return false
		}
	}
}

// register adds an attempt to d.attempts, where the attempt stays while its commands are in flight
// or its hold lasts. The caller then counts as work that Close waits for. The result is false if
// Close has begun.
func (d *driver) register(a *attempt) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closing.Err() != nil {
		return false
	}
	d.work.Add(1)
	// A later attempt with the same token replaces the entry that forgetLocked has left.
	d.attempts[a.c.Token] = a

	// Remove holds that expired without a Release. The next sweep follows when the map has over
	// twice as many attempts as this sweep leaves, so the average cost of an attempt is constant.
	if len(d.attempts) >= d.sweepAt {
		now := time.Now()
		for token, old := range d.attempts {
			if now.After(old.expiry) {
				delete(d.attempts, token)
			}
		}
		d.sweepAt = 2*len(d.attempts) + 64
	}
	return true
}

// grant returns the grant of an attempt that has won its quorum.
func (a *attempt) grant(ctx context.Context) (g backend.Grant, err error) {
	if a.c.Fenced {
		// If this fails, the next fence is larger than necessary, which is harmless.
		if g.Fence, err = a.raiseFence(ctx); err != nil {
			return backend.Grant{}, err
		}
	}
	// Check the term again, because redsync leaves out the time for the lead's vote and the fence.
	if time.Since(a.began) >= a.c.TTL-backend.Drift(a.c.TTL) {
		return backend.Grant{}, errLate
	}
	return g, nil
}

// askLead asks the lead for its vote before other nodes are asked. It returns true if the lead has
// voted yes or has not answered in time, so that redsync must count votes. Then redsync asks the
// other nodes, if there are any, and also counts the lead's vote.
func (a *attempt) askLead(ctx context.Context) bool {
	a.d.work.Go(func() { _, _ = a.askNode(a.lead) })

	n := a.d.nodes[a.lead]
	timeout := n.patience()
	select {
	case <-a.leadVoted:
	case <-a.ballot.done:
	case <-time.After(timeout):
		n.latency.Store(0) // the node cannot lead until it has answered a call
		if n.needed() {
			break // there is no quorum without this node
		}
		// Count this vote as unknown for now. If rivals split the other votes, the ballot would
		// otherwise wait for the lead.
		a.ballot.cast(a.lead, unknown, fmt.Errorf("%s: no answer within %v: %w", n.name, timeout, os.ErrDeadlineExceeded))
	case <-ctx.Done():
		a.ballot.decide(abandoned)
	}

	if a.ballot.result() == undecided {
		return true
	}
	for i := range a.d.nodes {
		// Call settle for the nodes that are never asked, because a Release waits for the outcome
		// on every node.
		if i != a.lead {
			a.settle(i, failed, 0)
		}
	}
	return false
}

// leadVote waits for the lead's vote, which askLead has requested.
func (a *attempt) leadVote() (bool, error) {
	select {
	case <-a.leadVoted:
		return a.leadYes, a.leadErr // without leadErr, redsync would count a refusal
	// The ballot may be decided before the lead votes.
	case <-a.ballot.done:
		return false, errNotAsked
	}
}

// askNode asks node i for its vote, and casts that vote. It is called at most once for each node.
func (a *attempt) askNode(i int) (bool, error) {
	n := a.d.nodes[i]
	if err, hangs := n.suspicion(); hangs && !n.needed() {
		// Do not let the ballot wait for a node that hangs, because the votes for this attempt
		// would block other callers during that wait.
		a.ballot.cast(i, unknown, err)
	}

	v, err := n.requestVote(a)
	if v == yes {
		// Call prove before cast: after the last vote a renewal may begin, and it counts only proven records.
		a.prove(i, a.began, a.c.TTL, 0)
	}
	// If the lead refuses, end the attempt before other nodes vote. Decide the ballot here, because
	// the refusal of a single node does not decide it.
	if i == a.lead && v == no {
		a.ballot.decide(refused)
	}
	a.ballot.cast(i, v, err)
	if i == a.lead {
		a.leadYes, a.leadErr = v == yes, err
		close(a.leadVoted)
	}

	return v == yes, err
}

// active reports whether the attempt is in flight or holds the key.
func (a *attempt) active() bool {
	a.d.mu.Lock()
	defer a.d.mu.Unlock()
	return !a.failed && !a.released
}

// settle records the outcome of the call that asked node i for its vote. It also starts the release
// of the record on that node, if the attempt has already failed.
func (a *attempt) settle(i int, v vote, proposal uint64) {
	d := a.d
	d.mu.Lock()
	defer d.mu.Unlock()
	r := &a.on[i]
	r.mayHold, r.mayArrive, r.proposal = v == yes || v == unknown, v == unknown, proposal
	// Close r.inFlight last, because a Release waits for this channel, and then reads r.mayHold.
	close(r.inFlight)
	// If cleanUp ran before this outcome was known, it has not released the record on this node.
	if a.failed {
		a.cleanUpLocked(i)
	}
}

// forgetLocked records that the token of the attempt a holds nothing. Commands in flight may still
// write records, so the nodes could report that the token holds the key. Until these commands have
// ended, the driver itself refuses renewals and releases of the token.
func (a *attempt) forgetLocked() {
	a.d.attempts[a.c.Token] = &attempt{failed: true, expiry: time.Now().Add(3 * a.c.Timeout)}
}

// cleanUp ends an attempt that did not acquire the key, and releases its records. After an unknown
// outcome, the engine releases the token twice. The driver itself answers these releases, because
// they would flood the nodes after an outage.
func (a *attempt) cleanUp() {
	d, token := a.d, a.c.Token
	d.mu.Lock()
	defer d.mu.Unlock()

	// For a call that is in flight, a.settle later reads a.failed, and releases the record there.
	a.failed = true
	left := false
	for i := range d.nodes {
		left = left || a.on[i].mayHold
		a.cleanUpLocked(i)
	}

	// Stop if a Release has removed this attempt, or a newer attempt of the token has replaced it.
	if d.attempts[token] != a {
		return
	}
	delete(d.attempts, token)
	// Keep an entry for the token if nodes may store the record until its release arrives, or if
	// votes for earlier attempts with the token may still arrive.
	if left || a.again || a.ballot.result() != refused {
		a.forgetLocked()
	}
}

// cleanUpLocked starts a goroutine that releases the record on node i, if the node may have it.
func (a *attempt) cleanUpLocked(i int) {
	if !a.on[i].mayHold {
		return
	}
	channel := ""
	if i == a.lead {
		// Wake the next waiter, because this caller has left the queue.
		channel = redisstore.DerivedKey("channel", a.c.Key)
	}
	r := &cleanup{c: a.c, call: releaseCall(a.c, a.prefix, channel)}
	if a.takeRecordLocked(i, r) {
		// Close waits for this goroutine in any case, because the caller counts as work.
		a.d.work.Go(func() { _ = a.d.nodes[i].cleanUp(r) })
	}
}

// takeRecordLocked prepares r to release the record on node i. It returns false if the node has no
// record, or if an earlier call has returned true. So a record is released at most once.
func (a *attempt) takeRecordLocked(i int, r *cleanup) bool {
	on := &a.on[i]
	r.answers, r.until = 1, a.expiry
	if on.mayArrive {
		// Wait for two answers, because the first release may overtake the write of the record.
		r.answers = 2
	}
	mayHold := on.mayHold
	on.mayHold, on.mayArrive = false, false
	return mayHold
}

// settled returns a channel that is closed when the last command that writes the record of the
// attempt a to node i has ended.
func (d *driver) settled(a *attempt, i int) <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return a.on[i].inFlight
}
