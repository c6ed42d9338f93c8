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
	noLead = -1

	// leadTimeout is how long an attempt waits for the lead, at least.
	leadTimeout = 20 * time.Millisecond
)

var errNotAsked = errors.New("not asked")

// attempt is one vote of the nodes on a key, and the hold that it wins.
//
// A record belongs to one attempt: token#owner, or token~n#owner. So the clean-up
// of one attempt never removes a vote for another attempt with the same token.
type attempt struct {
	d       *driver
	c       backend.Claim
	lockKey string // on the nodes
	record  string
	prefix  string // of record; proves that a record belongs to this attempt
	again   bool   // an attempt with this token came before
	began   time.Time
	ballot  *ballot

	lead      int           // the node that is asked first, or noLead
	place     *queueState   // of the caller, for the lead
	leadVoted chan struct{} // closed when the lead has voted
	leadYes   bool          // the lead has voted yes; set before leadVoted is closed

	// Driver.mu guards the fields below.
	on       []onNode  // one element for each node
	fence    uint64    // of the hold, written to a quorum; 0 if the hold has none
	failed   bool      // the attempt holds nothing: nodes must release the record, and may still have it
	released bool      // Release was called: no command may write the record again
	expiry   time.Time // when the record has expired on every node
}

// onNode is the record of an attempt on one node.
type onNode struct {
	mayHold   bool          // the node may have it
	mayArrive bool          // a command of unknown outcome may still write it
	inFlight  chan struct{} // closed when the last command that writes it has ended
	proposal  uint64        // of a fence
	proof     proof         // whether it counts for a renewal
}

// newAttempt returns the attempt of that number with c's token.
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
	a.expiry = a.began.Add(c.TTL + c.Timeout)

	for i := range a.on {
		a.on[i].inFlight = make(chan struct{})
	}
	return a
}

// tryAcquire makes the nodes vote, and returns as soon as the votes decide the
// result. Calls in flight continue. If the attempt wins nothing, each of them
// releases its record when it ends.
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
		// Nodes that voted yes keep their record until cleanUp has released it.
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

// errLate is the error of an attempt that won too late.
var errLate = fmt.Errorf("a quorum answered after the term had ended: %w", os.ErrDeadlineExceeded)

// won reports whether redsync has counted a quorum of votes within the term. It returns false if
// the ballot is decided, redsync gives up, or ctx ends. If a node is silent for
// longer than usual, and a rival has a vote of another node, it gives up: otherwise the
// votes that this attempt has would block all others for as long as that node hangs.
func (a *attempt) won(ctx context.Context) bool {
	counted := make(chan error, 1) // has room, because won may return first
	// redsync does not get ctx: a call that ctx had ended could not learn whether it took the key.
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

// register adds an attempt to the driver, for as long as its commands are in
// flight or its hold lasts. It counts the caller as work. It returns false if
// Close has begun.
func (d *driver) register(a *attempt) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closing.Err() != nil {
		return false
	}
	d.work.Add(1)
	// A second attempt with the token replaces the note that cleanUp has left.
	d.attempts[a.c.Token] = a

	// Remove holds that expired without a Release. To sweep at twice the number that
	// the last sweep left costs a constant time for each attempt.
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
		// If the fence reaches too few nodes, it only makes the next fence larger.
		if g.Fence, err = a.raiseFence(ctx); err != nil {
			return backend.Grant{}, err
		}
	}
	// Writing the fence took time, and redsync does not know when the lead was asked.
	if time.Since(a.began) >= a.c.TTL-backend.Drift(a.c.TTL) {
		return backend.Grant{}, errLate
	}
	return g, nil
}

// askLead asks the lead for its vote before the other nodes. It reports whether
// redsync must ask the others: the lead has voted yes, or has not answered in
// time. If the lead is the only node, redsync still counts its vote.
func (a *attempt) askLead(ctx context.Context) bool {
	a.d.work.Go(func() { _, _ = a.askNode(a.lead) })

	n := a.d.nodes[a.lead]
	timeout := n.patience()
	select {
	case <-a.leadVoted:
	case <-a.ballot.done:
	case <-time.After(timeout):
		n.latency.Store(0) // it does not lead until it answers
		if n.needed() {
			break // without it there is no quorum
		}
		// Do not wait for this vote if rivals split the others.
		a.ballot.cast(a.lead, unknown, fmt.Errorf("%s: no answer within %v: %w", n.name, timeout, os.ErrDeadlineExceeded))
	case <-ctx.Done():
		a.ballot.decide(abandoned)
	}

	if a.ballot.result() == undecided {
		return true
	}
	for i := range a.d.nodes {
		// A Release that has found this attempt waits for the outcome on every
		// node.
		if i != a.lead {
			a.settle(i, failed, 0) // it is never asked
		}
	}
	return false
}

// leadVote waits for the vote of the lead, which askLead has asked.
func (a *attempt) leadVote() (bool, error) {
	select {
	case <-a.leadVoted:
		return a.leadYes, nil
	// The ballot may be decided before the lead votes.
	case <-a.ballot.done:
		return false, errNotAsked
	}
}

// askNode asks node i for its vote and casts it. It is called once for each node.
func (a *attempt) askNode(i int) (bool, error) {
	n := a.d.nodes[i]
	if err, hangs := n.suspicion(); hangs && !n.needed() {
		// The node may not answer for a whole Timeout. If the ballot waited for it, the
		// votes of this attempt would block other callers meanwhile.
		a.ballot.cast(i, unknown, err)
	}

	v, err := n.requestVote(a)
	if v == yes {
		// The record counts for renewals before the vote can decide the ballot.
		a.prove(i, a.began, a.c.TTL, 0)
	}
	// Decide before the vote is cast: one vote of no decides no ballot, but a refusal
	// by the lead ends the attempt before it takes votes elsewhere.
	if i == a.lead && v == no {
		a.ballot.decide(refused)
	}
	a.ballot.cast(i, v, err)
	if i == a.lead {
		a.leadYes = v == yes
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

// settle records the outcome of the acquire on node i. If the attempt has failed
// meanwhile, the node releases the record.
func (a *attempt) settle(i int, v vote, proposal uint64) {
	d := a.d
	d.mu.Lock()
	defer d.mu.Unlock()
	r := &a.on[i]
	r.mayHold, r.mayArrive, r.proposal = v == yes || v == unknown, v == unknown, proposal
	// A Release that waits for the channel then reads mayHold, so mayHold is set first.
	close(r.inFlight)
	// If cleanUp came before the outcome was known, it has left this node out.
	if a.failed {
		a.cleanUpLocked(i)
	}
}

// forgetLocked notes that a's token holds nothing. The driver then answers for the token itself, for
// as long as commands in flight may still write and remove its records: until then, the nodes could
// seem to hold it.
func (a *attempt) forgetLocked() {
	a.d.attempts[a.c.Token] = &attempt{failed: true, expiry: time.Now().Add(3 * a.c.Timeout)}
}

// cleanUp ends an attempt that did not get the key, and releases its records. If
// the outcome is unknown, the engine will release the token twice. The driver
// answers those releases itself. Otherwise an outage would fill the nodes with releases.
func (a *attempt) cleanUp() {
	d, token := a.d, a.c.Token
	d.mu.Lock()
	defer d.mu.Unlock()

	// Nodes in flight are released by settle, which sees failed.
	a.failed = true
	left := false
	for i := range d.nodes {
		left = left || a.on[i].mayHold
		a.cleanUpLocked(i)
	}

	// A Release may have removed the attempt, or a newer attempt may have the token.
	if d.attempts[token] != a {
		return
	}
	delete(d.attempts, token)
	// After a split vote the nodes that voted yes have the record until their release
	// arrives, and late votes of earlier attempts may come.
	if left || a.again || a.ballot.result() != refused {
		a.forgetLocked()
	}
}

// cleanUpLocked releases the record on node i in the background, if the node may
// have it.
func (a *attempt) cleanUpLocked(i int) {
	if !a.on[i].mayHold {
		return
	}
	channel := ""
	if i == a.lead {
		// This caller has left the queue, so the next waiter must be woken.
		channel = redisstore.DerivedKey("channel", a.c.Key)
	}
	r := &cleanup{c: a.c, call: releaseCall(a.c, a.prefix, channel)}
	if a.takeRecordLocked(i, r) {
		// The caller itself counts as work. So Close waits for this goroutine even if
		// Close has already begun.
		a.d.work.Go(func() { _ = a.d.nodes[i].cleanUp(r) })
	}
}

// takeRecordLocked is called before r releases the record on node i. It returns false if the
// node has no record, as it has for later callers. So one release at most is made for a record.
func (a *attempt) takeRecordLocked(i int, r *cleanup) bool {
	on := &a.on[i]
	r.answers, r.until = 1, a.expiry
	if on.mayArrive {
		// The first release may overtake the command that writes the record.
		r.answers = 2
	}
	mayHold := on.mayHold
	on.mayHold, on.mayArrive = false, false
	return mayHold
}

// settled returns a channel that is closed when no command in flight may still
// write the record of a to node i.
func (d *driver) settled(a *attempt, i int) <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return a.on[i].inFlight
}
