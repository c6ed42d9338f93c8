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
	// firstRetry is the pause before the first round of a node's clean-ups. It doubles with
	// each round that the node does not answer.
	firstRetry = 50 * time.Millisecond

	// cleanupsAtOnce is how many clean-ups are sent to one node at once.
	cleanupsAtOnce = 64
)

// Release removes the record of c.Token from all nodes, and publishes the release.
// It returns as soon as a quorum has answered, and after a long hold, the lead. The other
// nodes are released in the background. With c.KeepUntil each node keeps a record until then, without the token.
// On a node that does not answer, the old record stays for its term.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	a, err := d.beginRelease(c)
	if err != nil {
		return err
	}
	defer d.work.Done()

	lead := noLead
	if a != nil && time.Since(a.began) >= wantedFor/2 {
		// What the lead said of waiters at the last release may be forgotten before the next
		// Acquire. So learn it now: otherwise a caller that locks again at once could overtake
		// the waiters each time.
		lead = d.leader(c.Key)
	}
	prefix := c.Token
	if c.Shared && a != nil {
		prefix = a.prefix // the node need not search its members
	}
	call := releaseCall(c, prefix, redisstore.DerivedKey("channel", c.Key)) // the same for all nodes
	// This does not use redsync, which cannot tell a lost hold from an outage. If ctx ends, the
	// calls go on, so that no node keeps the record.
	err = d.poll(ctx, lead, func(n *node) (vote, error) { return n.releaseHold(c, a, call) })
	if err == nil && a != nil && a.again {
		// A late vote of an earlier attempt, and a node that has not answered yet, could make a
		// quorum for a renewal.
		d.mu.Lock()
		defer d.mu.Unlock()
		a.forgetLocked()
	}
	return err
}

// beginRelease prevents further commands for the hold of c. It returns the attempt
// that took the hold, or nil if the driver does not know of it. It counts the
// Release as work.
func (d *driver) beginRelease(c backend.Claim) (*attempt, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closing.Err() != nil {
		return nil, errClosed
	}
	a := d.attempts[c.Token] // nil if the driver does not know of it
	if a != nil && a.failed {
		return nil, backend.ErrLost
	}

	d.work.Add(1)
	if a != nil {
		// From here on no repair starts. releaseHold waits for one in flight.
		a.released = true
		delete(d.attempts, c.Token)
	}
	return a, nil
}

// releaseHold releases c on the node by call, after the commands in flight there for c.
// If the outcome is unknown, it repeats the release in the background. A is nil if the
// driver does not know the hold.
func (n *node) releaseHold(c backend.Claim, a *attempt, call redisstore.Call) (vote, error) {
	r := &cleanup{c: c, call: call, answers: 1, until: time.Now().Add(c.TTL + c.Timeout)}
	if a != nil {
		// A command in flight may still write the record. It ends within its Timeout.
		// Close waits for it; otherwise the record would stay for a term.
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

// cleanup is the release of one record on one node. A command of unknown outcome may write
// the record after the first release, but not a Timeout later, when its connection is dead. So
// a second answered release removes it.
type cleanup struct {
	c       backend.Claim
	call    redisstore.Call // of the script
	answers int             // how many releases must still be answered; Driver.mu guards it
	due     time.Time       // when the next release may be sent
	until   time.Time       // when the record has expired on the node
}

// cleanUp sends a release. If the node must answer another one, r joins the node's clean-ups.
// The caller counts as work, so Close waits for r even if Close has already begun.
func (n *node) cleanUp(r *cleanup) error {
	err := n.try(r, false)

	n.d.mu.Lock()
	defer n.d.mu.Unlock()
	if r.answers == 0 {
		return err
	}
	record := r.call.Args[0].(string)
	if old := n.cleanups[record]; old != nil && old.answers > 0 {
		return err // this is a repeated Release
	}
	if len(n.cleanups) == 0 {
		n.d.work.Go(n.repeatCleanups)
	}
	n.cleanups[record] = r
	return err
}

// try sends a release, unless the node is suspect. The last try goes even to a node that has
// just not answered: perhaps one connection was dead.
func (n *node) try(r *cleanup, last bool) error {
	if !last {
		if err := n.admit(); err != nil {
			return err
		}
	}
	call := r.call
	if left := redisstore.Rest(r.c.KeepUntil); left > 0 && !r.c.Shared {
		call.Args = slices.Clone(call.Args) // other nodes have the same arguments
		call.Args[3] = left
	}

	reply, err := n.send(r.c.Timeout, releaseScript, call)
	// A reply above 1 says that others wait for the key. The next Acquire asks the lead
	// first, so they go first.
	if waiters, ok := reply.(int64); ok && waiters > 1 {
		n.d.refused(r.c.Key)
		reply = int64(1)
	}
	if err = n.store.Owned(reply, err); err == nil || backend.Definite(err) {
		n.d.mu.Lock()
		defer n.d.mu.Unlock()
		r.answers--
		// An earlier command may still write the record within its Timeout. So a second
		// release, if it is due, comes after that.
		r.due = time.Now().Add(r.c.Timeout)
	}
	return err
}

// repeatCleanups makes the node's clean-ups until none is left. There is one such goroutine
// for each node, however many records an outage has left there.
func (n *node) repeatCleanups() {
	pause, left := firstRetry, true
	for left {
		// Close does not wait for the pause, but it waits for one more try of each.
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
				next = min(2*pause, some[0].c.Timeout) // the others would get no answer either
				break
			}
		}
		pause = next
	}
}

// dueCleanups returns the clean-ups that are due, or all if this is their last try. It
// reports whether the node has any for a later round. The results of the last round are known.
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

// releaseCall returns the arguments that release c where its record begins with prefix.
// The script publishes to channel, unless it is empty.
func releaseCall(c backend.Claim, prefix, channel string) redisstore.Call {
	args := []any{prefix, channel, c.Token, ""}
	if c.Shared {
		args = append(args, c.Owner)
	}
	return redisstore.Call{
		Keys: append([]string{redisstore.LockKey(c.Key)}, queueKeys(c.Key)...),
		Args: args,
	}
}
