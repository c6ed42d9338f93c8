package redlock

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

const (
	// firstRetry is the pause before the first round of a node's clean-ups. The pause doubles after
	// each round that the node does not answer.
	firstRetry = 50 * time.Millisecond

	// cleanupsAtOnce is the largest number of clean-ups that are sent to one node at once.
	cleanupsAtOnce = 64
)

// Release removes the record of c.Token from all nodes, and publishes the release. It returns as
// soon as a quorum has answered. After a hold of half a second or more, it also waits for the lead.
// The calls to the other nodes continue. If c.KeepUntil is set, the key stays taken on each node
// until that time, by a record without a holder. A node that does not answer keeps the old record.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	a, err := d.beginRelease(c)
	if err != nil {
		return err
	}
	defer d.work.Done()

	lead := noLead
	if a != nil && time.Since(a.began) >= wantedFor/2 {
		// Also wait for the lead, whose reply says whether callers wait. During a long hold, this
		// driver forgets that callers wait. If the holder then locks the key again at once, the
		// holder could overtake these callers each time.
		lead = d.leader(c.Key)
	}
	prefix := c.Token
	if c.Shared && a != nil {
		prefix = a.prefix // so that the node need not search the members of the set
	}
	call := releaseCall(c, prefix, redisstore.DerivedKey("channel", c.Key)) // the same for all nodes
	// Do not use redsync, which cannot tell a lost hold from an outage. If ctx ends, the calls
	// continue, so that all nodes release the record.
	err = d.poll(ctx, lead, func(n *node) (vote, error) { return n.releaseHold(c, a, call) })
	if err == nil && a != nil && a.again {
		// Make all later renewals of the token fail. Otherwise, late votes for an earlier attempt
		// and nodes that have not answered this release could together be a quorum for a renewal.
		d.mu.Lock()
		defer d.mu.Unlock()
		a.forgetLocked()
	}
	return err
}

// beginRelease prevents further repairs of the hold of c, and returns the attempt that took the
// hold. If this driver does not know the hold, the attempt is nil, and each node must search for
// the records of the token. The Release then counts as work.
func (d *driver) beginRelease(c backend.Claim) (*attempt, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closing.Err() != nil {
		return nil, errClosed
	}
	a := d.attempts[c.Token]
	if a != nil && a.failed {
		return nil, backend.ErrLost
	}

	d.work.Add(1)
	if a != nil {
		// No repair starts after this. releaseHold waits for a repair in flight.
		a.released = true
		delete(d.attempts, c.Token)
	}
	return a, nil
}

// releaseHold waits for the commands in flight for c on the node, and then sends the given call,
// which releases the hold of c there. If the outcome is unknown, a goroutine repeats the release.
// The attempt a is nil if the driver does not know the hold.
func (n *node) releaseHold(c backend.Claim, a *attempt, call redisstore.Call) (vote, error) {
	r := &cleanup{c: c, call: call, answers: 1, until: time.Now().Add(c.TTL + c.Timeout)}
	if a != nil {
		// Wait for commands in flight, which may still write the record. They end within their
		// Timeout.
		<-n.d.settled(a, n.i)

		n.d.mu.Lock()
		mayHold := a.takeRecordLocked(n.i, r)
		n.d.mu.Unlock()
		if !mayHold {
			return no, nil
		}
	}

	began := time.Now()
	err := n.cleanUp(r)
	switch {
	case err == nil:
		return yes, nil
	case backend.Definite(err):
		return no, nil
	}
	return failed, n.nodeError(err, time.Since(began))
}

// cleanup is the release of one record on one node. A command of unknown outcome may write the
// record after the first release. So the node must also answer a second release, which is sent a
// Timeout later. At that time, the connection of that command is dead, so the record cannot return.
type cleanup struct {
	c       backend.Claim
	call    redisstore.Call // a call of release.lua
	answers int             // how many releases must still be answered; the driver's mu guards it
	due     time.Time       // when the next release may be sent
	until   time.Time       // when the record will have expired on the node
}

// cleanUp sends the release r. If the node must answer another release after that, r is added to
// the node's clean-ups. Close waits for r in any case, because the caller counts as work.
func (n *node) cleanUp(r *cleanup) error {
	err := n.try(r, false)

	n.d.mu.Lock()
	defer n.d.mu.Unlock()
	if r.answers == 0 {
		return err
	}
	record := r.call.Args[0]
	if old := n.cleanups[record]; old != nil && old.answers > 0 {
		return err // an earlier Release has already left a clean-up of the record
	}
	if len(n.cleanups) == 0 {
		n.d.work.Go(n.repeatCleanups)
	}
	n.cleanups[record] = r
	return err
}

// try sends a release, unless the node is suspect. If the argument last is true, it asks even a
// suspect node, because perhaps only one connection was dead.
func (n *node) try(r *cleanup, last bool) error {
	if !last {
		if err := n.admit(); err != nil {
			return err
		}
	}
	call := r.call
	if left := redisstore.Rest(r.c.KeepUntil); left != "" && !r.c.Shared {
		call.Args = slices.Clone(call.Args) // the nodes share the slice
		call.Args[3] = left
	}

	reply, err := n.send(r.c.Timeout, releaseScript, call)
	// A reply above 1 says that other callers wait for the key. Let this driver's next Acquire ask
	// the lead first, so that this Acquire does not overtake these callers.
	if waiters, ok := reply.(int64); ok && waiters > 1 {
		n.d.refused(r.c.Key)
		reply = int64(1)
	}
	if err = n.store.Owned(reply, err); err == nil || backend.Definite(err) {
		n.d.mu.Lock()
		defer n.d.mu.Unlock()
		r.answers--
		// Send a second release a Timeout later, because an earlier command may still write the
		// record within its Timeout.
		r.due = time.Now().Add(r.c.Timeout)
	}
	return err
}

// repeatCleanups tries the node's clean-ups until none is left. For each node, at most one
// goroutine runs this method.
func (n *node) repeatCleanups() {
	pause, left := firstRetry, true
	for left {
		// Close ends the pause, and then waits for one last try of each clean-up.
		doze(n.d.closing, pause)
		last := n.d.closing.Err() != nil
		var due []*cleanup
		due, left = n.dueCleanups(last)

		next := firstRetry
		for some := range slices.Chunk(due, cleanupsAtOnce) {
			var answered atomic.Bool
			var wg sync.WaitGroup
			for _, r := range some {
				wg.Go(func() {
					if err := n.try(r, last); err == nil || backend.Definite(err) {
						answered.Store(true)
					}
				})
			}
			wg.Wait()
			if !answered.Load() {
				next = min(2*pause, some[0].c.Timeout) // the other clean-ups would get no answer either
				break
			}
		}
		pause = next
	}
}

// dueCleanups returns the clean-ups that are due, or all clean-ups if the argument last is true. It
// drops the clean-ups that are done or expired, and reports whether others remain for later.
func (n *node) dueCleanups(last bool) (due []*cleanup, left bool) {
	n.d.mu.Lock()
	defer n.d.mu.Unlock()
	now := time.Now()
	for record, r := range n.cleanups {
		done := r.answers == 0 || now.After(r.until)
		if !done && (last || !now.Before(r.due)) {
			due = append(due, r)
		}
		if done || last {
			delete(n.cleanups, record)
		}
	}
	return due, len(n.cleanups) > 0
}

// releaseCall returns the call of release.lua for the records of c that begin with the given
// prefix. The script publishes to the given channel, unless channel is empty.
func releaseCall(c backend.Claim, prefix, channel string) redisstore.Call {
	args := []string{prefix, channel, c.Token, ""}
	if c.Shared {
		args = append(args, c.Owner)
	}
	return redisstore.Call{
		Keys: append([]string{redisstore.LockKey(c.Key)}, queueKeys(c.Key)...),
		Args: args,
	}
}
