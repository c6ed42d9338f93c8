package redlock

import (
	"context"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/lazyctx"
	"github.com/hasplock/hasp/internal/redisstore"
)

// firstRetry is the pause after the first release that was not answered. The pause
// doubles with each retry.
const firstRetry = 50 * time.Millisecond

// nodeRelease is the release of a token on one node.
type nodeRelease struct {
	token string
	node  int
}

// Release removes the record of c.Token from all nodes, and publishes the release.
// It returns as soon as a quorum has answered. The other nodes are released in the
// background. With c.KeepUntil each node keeps a record until then, without the token.
// On a node that does not answer, the old record stays for its term.
func (d *Driver) Release(ctx context.Context, c backend.Claim) error {
	if err := d.checkTTL(time.Until(c.KeepUntil)); err != nil {
		return err
	}
	a, err := d.beginRelease(c)
	if err != nil {
		return err
	}
	defer d.work.Done()

	b := newBallot(d.nodes, holdRule)
	lead := d.leader(c.Key)
	ended := d.expectRelease(c.Key, lead)
	prefix := c.Token
	if c.Shared && a != nil {
		prefix = a.prefix // the node need not search its members
	}
	call := releaseCall(c, prefix, redisstore.DerivedKey("channel", c.Key), false) // the same for all nodes
	for i, n := range d.nodes {
		// This does not use redsync, which cannot tell a lost hold from an outage.
		d.work.Go(func() {
			v, err := n.releaseHold(c, a, call)
			if i == lead {
				ended()
			}
			b.cast(i, v, err)
		})
	}

	select {
	case <-b.done:
	case <-ctx.Done():
		// The calls go on, so that no node keeps the record.
		b.decide(abandoned)
	}
	return b.err()
}

// beginRelease prevents further commands for the hold of c. It returns the attempt
// that took the hold, or nil if the driver does not know of it. It counts the
// Release as work.
func (d *Driver) beginRelease(c backend.Claim) (*attempt, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, errClosed
	}
	a, lost := d.attemptOfLocked(c)
	if lost {
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
	answers, until := 1, time.Now().Add(c.TTL+c.Timeout)
	if a != nil {
		// A command in flight may still write the record. It ends within its Timeout.
		// Close waits for it; otherwise the record would stay for a term.
		<-n.d.settled(a, n.i)

		var mayHold, mayArrive bool
		if mayHold, mayArrive, until = n.d.takeRecord(a, n.i); !mayHold {
			return no, nil
		}
		if mayArrive {
			answers = 2
		}
	}

	began := time.Now()

	// A suspect node is not asked now, but in the background.
	err := n.admit()
	if err == nil {
		ctx := lazyctx.WithTimeout(context.Background(), nil, c.Timeout)
		err = n.release(ctx, c, call)
		ctx.End()
	}

	pause := firstRetry
	if err == nil || definite(err) {
		answers--
		// An earlier command may still write the record within its Timeout. So a
		// second release, if it is due, comes after that.
		pause = c.Timeout
	}
	if answers > 0 {
		n.releaseInBackground(repeatedRelease{c: c, call: call, answers: answers, pause: pause, until: until})
	}
	switch {
	case err == nil:
		return yes, nil
	case definite(err):
		return no, nil
	}
	return failed, n.nodeError(err, time.Since(began))
}

// takeRecord is called before the record of a is released on node i. It reports
// whether the node may have the record, whether a command of unknown outcome may
// still write it there, and until when the record may last. For later callers the
// node has no record.
func (d *Driver) takeRecord(a *attempt, i int) (mayHold, mayArrive bool, until time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()

	// Take and clear in one step, so that one release at most is made for the record.
	mayHold, mayArrive = a.mayHold[i], a.mayArrive[i]
	a.mayHold[i], a.mayArrive[i] = false, false
	return mayHold, mayArrive, a.expiry
}

// releaseInBackground runs r. If the token is already being released on the node,
// as after a repeated Release, it does nothing. The caller itself counts as work,
// so Close waits for r even if Close has already begun.
func (n *node) releaseInBackground(r repeatedRelease) {
	d := n.d
	d.mu.Lock()
	defer d.mu.Unlock()
	key := nodeRelease{r.c.Token, n.i}
	if d.releasing[key] {
		return
	}

	d.releasing[key] = true
	d.work.Go(func() {
		r.run(n)
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.releasing, key)
	})
}

// repeatedRelease releases a record on one node until the node has answered as
// often as needed. A command of unknown outcome may write the record after the
// first release, but not a Timeout later, when its connection is dead. So a second
// answered release removes it.
type repeatedRelease struct {
	c       backend.Claim
	call    redisstore.Call // of the script
	answers int             // how many releases must be answered
	pause   time.Duration   // before the first release
	until   time.Time       // when the record has expired on the node
}

// run repeats the release until it is done, the record has expired or Close has
// begun.
func (r repeatedRelease) run(n *node) {
	pause, retry := r.pause, firstRetry
	for {
		// Close does not wait for the pause, but it waits for one more try. It tries
		// even a node that has just not answered: perhaps one connection was dead.
		last := pause > 0 && !n.d.sleep(pause)
		var err error
		if !last {
			err = n.admit()
		}
		if err == nil {
			ctx, cancel := context.WithTimeout(context.Background(), r.c.Timeout)
			err = n.release(ctx, r.c, r.call)
			cancel()
		}

		pause = r.c.Timeout
		if err != nil && !definite(err) {
			// No answer: this release does not count. Try again sooner than a
			// Timeout, and more rarely each time.
			pause, retry = retry, min(2*retry, r.c.Timeout)
		} else if r.answers--; r.answers == 0 {
			return
		}
		if last || time.Now().After(r.until) {
			return // the record expires on the node
		}
	}
}

// releaseCall returns the arguments that release c where its record begins with prefix.
// The script publishes to channel, unless it is empty. If alone is true, it wakes the
// first waiter of the queue only.
func releaseCall(c backend.Claim, prefix, channel string, alone bool) redisstore.Call {
	message := c.Token
	if alone {
		message = ""
	}
	args := []any{prefix, channel, message}
	if c.Shared {
		args = append(args, c.Owner)
	}
	return redisstore.Call{
		Keys: append([]string{redisstore.LockKey(c.Key)}, queueKeys(c.Key)...),
		Args: args,
	}
}

// release releases c on the node by call, to which it adds the rest of the term if the
// key stays taken.
func (n *node) release(ctx context.Context, c backend.Claim, call redisstore.Call) error {
	script := releaseScript
	if c.Shared {
		script = releaseSharedScript
	} else if left := redisstore.Rest(c.KeepUntil); left > 0 {
		call.Args = append(slices.Clip(call.Args), left) // other nodes have the same arguments
	}
	began := time.Now()
	reply, err := n.store.Run(ctx, script, call)
	n.observe(ctx, began, err)

	// A reply above 1 says that others wait for the key. The next Acquire asks the lead
	// first, so they go first.
	if waiters, ok := reply.(int64); ok && waiters > 1 {
		n.d.refused(c.Key)
		reply = int64(1)
	}
	return n.store.Owned(reply, err)
}
