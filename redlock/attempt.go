package redlock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/go-redsync/redsync/v4/redis"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

const (
	// nobody leads an attempt that asks all nodes at once.
	nobody = -1

	// leadPatience is how long the lead is waited for, at least.
	leadPatience = 20 * time.Millisecond

	// firstRetry is how long after a release that was not answered the next
	// one is sent; that pause doubles each time.
	firstRetry = 50 * time.Millisecond
)

var errUnasked = errors.New("not asked")

// attempt is one vote of all nodes on a key, and the hold that comes of it.
type attempt struct {
	d      *Driver
	c      backend.Claim
	lock   string // the key on the nodes
	record string
	begins string // of the record: what proves it to be of this attempt
	ballot *ballot
	began  time.Time

	lead   int           // asked first, or nobody
	spoken chan struct{} // closed when the lead has voted

	// Guarded by Driver.mu. By node:
	there    []bool          // may have the record
	doubt    []bool          // a command on its way may still put it there
	fences   []uint64        // proposed
	fence    uint64          // of the hold, written to a quorum; 0 if it has none
	busy     []chan struct{} // closed when the command under way that may put it there has ended
	over     bool            // it has come to nothing: whatever the nodes have is to be given back
	released bool            // nothing is to be given to a node any more
	until    time.Time       // the longest that the record may last on any node
}

// newAttempt is the number-th attempt with a token, which has a record of its
// own, so that what is given back of one is never of another.
func (d *Driver) newAttempt(c backend.Claim, number, lead int) *attempt {
	n := len(d.nodes)
	a := &attempt{d: d, c: c, lock: redisstore.LockKey(c.Key), begins: c.Token + mark, began: time.Now(), lead: lead,
		ballot: newBallot(d.nodes, taking), spoken: make(chan struct{}),
		there: make([]bool, n), doubt: make([]bool, n), fences: make([]uint64, n), busy: make([]chan struct{}, n)}
	if number > 0 {
		a.begins = c.Token + "~" + strconv.Itoa(number) + mark
	}
	a.record = a.begins + c.Owner
	a.until = a.began.Add(c.TTL + c.Timeout)
	for i := range a.busy {
		a.busy[i] = make(chan struct{})
	}
	return a
}

// attempt has the nodes vote, and returns as soon as that is decided. What is
// under way then goes on, and is given back where it came to nothing.
func (d *Driver) attempt(ctx context.Context, c backend.Claim, number, lead int) (backend.Grant, error) {
	if c.TTL > d.maxTTL {
		return backend.Grant{}, fmt.Errorf("%w: a term of %v is longer than max_ttl, which is %v", backend.ErrInvalid, c.TTL, d.maxTTL)
	}
	a := d.newAttempt(c, number, lead)
	if !d.note(a) {
		return backend.Grant{}, errClosed
	}
	defer d.work.Done()
	counted := make(chan error, 1)
	if lead == nobody || a.leads(ctx) {
		d.work.Go(func() {
			counted <- mutex(c, a.record, a.pools()).TryLockContext(context.Background())
		})
		select {
		case <-a.ballot.done:
		case <-ctx.Done():
			a.ballot.end(left)
		}
	}
	switch a.ballot.result() {
	case won:
		g, err := a.won(ctx, <-counted)
		if err != nil {
			a.giveBack()
		}
		return g, err
	case refused:
		if a.ballot.has(yes) {
			d.splits.Add(1)
		}
		a.giveBack()
		return backend.Grant{}, &backend.HeldError{}
	case broken:
		a.giveBack()
		return backend.Grant{}, a.ballot.failures()
	}
	a.giveBack()
	return backend.Grant{}, ctx.Err()
}

// won is what remains to be done for an attempt that has its quorum, by
// redsync's count: too late is an error.
func (a *attempt) won(ctx context.Context, counted error) (backend.Grant, error) {
	var g backend.Grant
	if counted == nil && a.c.Fenced {
		var err error
		if g.Fence, err = a.raise(ctx); err != nil {
			return backend.Grant{}, err
		}
	}
	if counted != nil || time.Since(a.began) >= a.c.TTL-backend.Drift(a.c.TTL) {
		return backend.Grant{}, fmt.Errorf("the quorum came after its term had ended: %w", os.ErrDeadlineExceeded)
	}
	return g, nil
}

// pools are the nodes for redsync. What it did not win it gives back; so do we,
// when it has landed.
func (a *attempt) pools() []redis.Pool {
	pools := make([]redis.Pool, len(a.d.nodes))
	for i := range pools {
		take := func(string, time.Duration) (bool, error) { return a.word() }
		if i != a.lead {
			a.d.work.Add(1)
			take = func(string, time.Duration) (bool, error) {
				defer a.d.work.Done()
				return a.vote(i)
			}
		}
		pools[i] = &pool{take: take, give: func() (bool, error) { return false, errUnasked }}
	}
	return pools
}

// leads asks the lead for its vote before the other nodes. It reports whether
// redsync must ask the others: the lead has voted yes, or has not answered in
// time. If the lead is the only node, redsync still counts its vote.
func (a *attempt) leads(ctx context.Context) bool {
	a.d.work.Go(func() { _, _ = a.vote(a.lead) })
	n := a.d.nodes[a.lead]
	patience := max(leadPatience, 8*time.Duration(n.trip.Load()))
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-a.spoken:
	case <-a.ballot.done:
	case <-timer.C:
		n.trip.Store(0) // it does not lead until it answers
		if n.needed() {
			break // without it there is no quorum
		}
		// Rivals who split the other votes are not to wait for this one.
		a.ballot.cast(a.lead, unsure, fmt.Errorf("%s: no answer within %v: %w", n.name, patience, os.ErrDeadlineExceeded))
	case <-ctx.Done():
		a.ballot.end(left)
	}
	if v := a.ballot.result(); v == open || v == won {
		return true
	}
	for i := range a.d.nodes {
		if i != a.lead {
			a.voted(i, failed, 0)
		}
	}
	return false
}

// word is the vote of the lead, which has been asked.
func (a *attempt) word() (bool, error) {
	select {
	case <-a.spoken:
	case <-a.ballot.done:
	}
	if a.ballot.of(a.lead) != yes {
		return false, errUnasked
	}
	return true, nil
}

// vote asks node i. It is called once.
func (a *attempt) vote(i int) (bool, error) {
	n := a.d.nodes[i]
	if err := n.doubted(); err != nil && !n.needed() {
		// It may not answer for a whole Timeout, in which the votes of this attempt
		// would be in the way of others.
		a.ballot.cast(i, unsure, err)
	}
	v, err := n.take(a)
	if i == a.lead && v == no {
		a.ballot.end(refused)
	}
	a.ballot.cast(i, v, err)
	if i == a.lead {
		close(a.spoken)
	}
	if v != yes && err == nil {
		err = backend.ErrHeld
	}
	return v == yes, err
}

// wanted reports whether the attempt is in flight or holds the key.
func (a *attempt) wanted() bool {
	a.d.mu.Lock()
	defer a.d.mu.Unlock()
	return !a.over && !a.released
}

// voted notes what came of the command on node i, and has it given back if the
// attempt is over.
func (a *attempt) voted(i int, v vote, fence uint64) {
	d := a.d
	d.mu.Lock()
	defer d.mu.Unlock()
	a.there[i], a.doubt[i], a.fences[i] = v == yes || v == unsure, v == unsure, fence
	close(a.busy[i])
	if a.over {
		a.undoLocked(i)
	}
}

// giveBack ends an attempt that did not get the key, and releases its records. If
// the outcome is unknown, the engine will release the token twice. The driver
// remembers the token meanwhile and answers those releases itself. Otherwise an
// outage would fill the nodes with releases.
func (a *attempt) giveBack() {
	d, token := a.d, a.c.Token
	d.mu.Lock()
	defer d.mu.Unlock()
	a.over = true
	for i := range d.nodes {
		a.undoLocked(i)
	}
	if d.attempts[token] != a {
		return
	}
	delete(d.attempts, token)
	// After a split vote nodes that said yes may have the record for a moment yet.
	// Asked about the token, they could not agree.
	if a.ballot.result() != refused || a.ballot.has(yes) {
		d.attempts[token] = &attempt{over: true, until: time.Now().Add(3 * a.c.Timeout)}
	}
}

// undoLocked has node i give back what it may have.
func (a *attempt) undoLocked(i int) {
	if !a.there[i] {
		return
	}
	times := 1
	if a.doubt[i] {
		times = 2
	}
	a.there[i], a.doubt[i] = false, false
	d, n, c, begins, until := a.d, a.d.nodes[i], a.c, a.begins, a.until
	// The caller itself counts as work. So Close waits for this goroutine even if
	// Close has already begun.
	d.work.Go(func() { n.undo(c, begins, "", times, 0, until) })
}

// undo releases what an attempt may have left on the node, until that was
// answered as often as times says: a command of unknown outcome may land after
// the first release, but not a Timeout later, when its connection is dead.
func (n *node) undo(c backend.Claim, begins, channel string, times int, pause time.Duration, until time.Time) {
	retry := firstRetry
	for {
		// Close does not wait for the pause, but it waits for one more try. It tries
		// even a node that has just not answered: perhaps one connection was dead.
		last := pause > 0 && !n.d.sleep(pause)
		var err error
		if !last {
			err = n.admit()
		}
		if err == nil {
			ctx, cancel := context.WithTimeout(context.Background(), c.Timeout)
			err = n.release(ctx, c, begins, channel)
			cancel()
		}
		pause = c.Timeout
		if err != nil && !definite(err) {
			pause, retry = retry, min(2*retry, c.Timeout)
		} else if times--; times == 0 {
			return
		}
		if last || time.Now().After(until) {
			return // the record expires on the node
		}
	}
}
