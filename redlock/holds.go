package redlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

const (
	// attemptTime is how old the answers of a quorum may be when an attempt wins. It is the same in
	// all programs, because the holders of other programs rely on it.
	attemptTime = time.Second

	// firstRetry is the pause before the first round of a node's clean-ups. The pause doubles after
	// each round that the node does not answer.
	firstRetry = 50 * time.Millisecond

	// cleanupsAtOnce is the largest number of clean-ups that are sent to one node at once.
	cleanupsAtOnce = 64

	// maxFence is the largest possible fence, because Lua's integers are exact only up to this
	// value.
	maxFence = 1 << 53
)

// holds keeps the records of this driver on the nodes: it renews and repairs them while they last,
// and removes them at the end.
type holds struct {
	m        *members
	fenceTTL time.Duration
	maxTTL   time.Duration
	wanted   func(key string) // is called if a release finds that other callers wait for the key

	mu       sync.Mutex           // guards the fields below, and the fields of holds that say so
	byToken  map[string]*hold     // attempts in flight, holds, and tokens that hold nothing
	sweepAt  int                  // the number of holds at which begin removes the expired ones
	cleanups []map[string]*copyOn // by node and prefix, releases to be repeated
}

func newHolds(m *members, o *Options, wanted func(key string)) *holds {
	hs := &holds{m: m, fenceTTL: o.FenceTTL, maxTTL: o.MaxTTL, wanted: wanted}
	hs.byToken = map[string]*hold{}
	for range m.nodes {
		hs.cleanups = append(hs.cleanups, map[string]*copyOn{})
	}
	return hs
}

// checkTTL returns an error if ttl is longer than max_ttl. A restarted node votes again when
// max_ttl has passed, so all earlier leases must have ended at that time.
func (hs *holds) checkTTL(ttl time.Duration) error {
	if ttl > hs.maxTTL {
		return invalid("a term of %v is longer than max_ttl, %v: ask for a shorter term, "+
			"or raise max_ttl in all programs", ttl, hs.maxTTL)
	}
	return nil
}

// add adds h, which stays while its commands are in flight or the hold lasts.
func (hs *holds) add(h *hold) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	// A later attempt with the same token replaces the entry that forgetLocked has left.
	hs.byToken[h.c.Token] = h

	// Remove holds that expired without a release. The next sweep follows when the map has over
	// twice as many holds as this sweep leaves, so the average cost of an attempt is constant.
	if len(hs.byToken) >= hs.sweepAt {
		at := hs.m.now()
		for token, old := range hs.byToken {
			if at.After(old.expiry) {
				delete(hs.byToken, token)
			}
		}
		hs.sweepAt = 2*len(hs.byToken) + 64
	}
}

// live reports whether the attempt of h is in flight or holds the key.
func (hs *holds) live(h *hold) bool {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	return !h.failed && !h.released
}

// settle records the outcome of the call that asked node i for its vote: whether the node may have
// the record, and whether the record may still arrive. It also starts the release of the record on
// that node, if the attempt has already failed.
func (hs *holds) settle(h *hold, i int, mayHold, mayArrive bool, proposal uint64) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	on := &h.on[i]
	on.mayHold = mayHold
	on.mayArrive = mayArrive
	on.proposal = proposal
	// Close on.inFlight last, because a release waits for this channel, and then reads on.mayHold.
	close(on.inFlight)
	// If abandon ran before this outcome was known, it has not released the record on this node.
	if h.failed {
		hs.cleanUpLocked(h, i)
	}
}

// settled returns a channel that is closed when the last command that writes the record to node i
// has ended.
func (hs *holds) settled(h *hold, i int) <-chan struct{} {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	return h.on[i].inFlight
}

// inFlight returns the holds of a key whose votes may arrive later.
func (hs *holds) inFlight(key string) (all []*hold) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	for _, h := range hs.byToken {
		if h.c.Key == key {
			all = append(all, h)
		}
	}
	return all
}

// forgetLocked records that a token holds nothing. Commands in flight may still write records, so
// the nodes could report that the token holds the key. Until these commands have ended, the driver
// itself refuses renewals and releases of the token.
func (hs *holds) forgetLocked(c backend.Claim) {
	hs.byToken[c.Token] = &hold{failed: true, expiry: hs.m.now().Add(3 * c.Timeout)}
}

// abandon ends an attempt that did not take the key, and releases its records. The release on the
// lead wakes the next waiter, because this caller has left the queue. After an unknown outcome, the
// engine releases the token twice. The driver itself answers these releases, because they would
// flood the nodes after an outage. The argument refused says that the outcome is known.
func (hs *holds) abandon(h *hold, refused bool) {
	hs.mu.Lock()
	defer hs.mu.Unlock()

	// For a call that is in flight, settle later reads h.failed, and releases the record there.
	h.failed = true
	left := false
	for i := range h.on {
		left = left || h.on[i].mayHold
		hs.cleanUpLocked(h, i)
	}

	// Stop if a release has removed this hold, or a newer attempt of the token has replaced it.
	if hs.byToken[h.c.Token] != h {
		return
	}
	delete(hs.byToken, h.c.Token)
	// Keep an entry for the token if nodes may store the record until its release arrives, or if
	// votes for earlier attempts with the token may still arrive.
	if left || h.again || !refused {
		hs.forgetLocked(h.c)
	}
}

// cleanUpLocked starts a goroutine that releases the record on node i, if the node may have it.
func (hs *holds) cleanUpLocked(h *hold, i int) {
	channel := ""
	if i == h.lead {
		channel = channelOf(h.c.Key)
	}
	if hs.takeLocked(h, i, h.c, releaseCall(h.c, h.prefix, channel)) {
		// Close waits for this goroutine in any case, because the caller counts as work.
		hs.m.work.Go(func() { _ = hs.cleanUp(hs.m.nodes[i], &h.on[i]) })
	}
}

// takeLocked prepares the release of the record on node i by a call for the claim c. It returns
// false if the node has no record, or if an earlier call has returned true. So a record is released
// at most once.
func (hs *holds) takeLocked(h *hold, i int, c backend.Claim, call redisstore.Call) bool {
	on := &h.on[i]
	if !on.mayHold {
		return false
	}
	on.claim = c
	on.call = call
	on.until = h.expiry
	on.answers = 1
	if on.mayArrive {
		// Wait for two answers, because the first release may overtake the write of the record.
		on.answers = 2
	}
	on.mayHold = false
	on.mayArrive = false
	return true
}

// release removes the record of c.Token from all nodes, and publishes the release. It returns as
// soon as a quorum has answered. If the hold was long, it also waits for the lead, which the
// function leader names. The calls to the other nodes continue. If c.KeepUntil is set, the key
// stays taken on each node until that time, by a record without a holder. A node that does not
// answer keeps the old record.
func (hs *holds) release(ctx context.Context, c backend.Claim, leader func(key string) int) error {
	if !hs.m.begin() {
		return errClosed
	}
	defer hs.m.work.Done()
	h, known := hs.beginRelease(c)
	if h == nil {
		return backend.ErrLost
	}

	lead := noLead
	if known && hs.m.now().Sub(h.began) >= wantedFor/2 {
		// Also wait for the lead, whose reply says whether callers wait. During a long hold, this
		// driver forgets that callers wait. If the holder then locks the key again at once, the
		// holder could overtake these callers each time.
		lead = leader(c.Key)
	}
	call := releaseCall(c, c.Token, channelOf(c.Key)) // the same for all nodes
	// Do not use redsync, which cannot tell a lost hold from an outage. If ctx ends, the calls
	// continue, so that all nodes release the record.
	err := hs.m.poll(ctx, lead, func(n *node) error { return hs.releaseOn(n, h, c, call) })
	if err == nil && h.again && known {
		// Make all later renewals of the token fail. Otherwise, late votes for an earlier attempt
		// and nodes that have not answered this release could together be a quorum for a renewal.
		hs.mu.Lock()
		defer hs.mu.Unlock()
		hs.forgetLocked(c)
	}
	return err
}

// beginRelease prevents further repairs of the hold of c, and returns the hold, or nil if the token
// holds nothing. If this driver does not know it, each node must search for the token's records.
func (hs *holds) beginRelease(c backend.Claim) (h *hold, known bool) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h = hs.byToken[c.Token]
	switch {
	case h == nil:
		return foundHold(c, c.Token, hs.m), false
	case h.failed:
		return nil, true
	}
	// No repair starts after this. releaseOn waits for a repair in flight.
	h.released = true
	delete(hs.byToken, c.Token)
	return h, true
}

// releaseOn waits for the commands in flight for h on the node, and then sends the given call,
// which releases the hold there. If the outcome is unknown, a goroutine repeats the release.
func (hs *holds) releaseOn(n *node, h *hold, c backend.Claim, call redisstore.Call) error {
	// Wait for commands in flight, which may still write the record. They end within their Timeout.
	<-hs.settled(h, n.i)

	hs.mu.Lock()
	taken := hs.takeLocked(h, n.i, c, call)
	hs.mu.Unlock()
	if !taken {
		return errNo
	}
	err := hs.cleanUp(n, &h.on[n.i])
	if errors.Is(err, backend.ErrLost) {
		return errNo
	}
	return err
}

// cleanUp sends a release. If the node must answer another release after that, the record is added
// to the node's clean-ups. Close waits for these in any case, because the caller counts as work.
func (hs *holds) cleanUp(n *node, on *copyOn) error {
	err := hs.try(n, on, false)

	hs.mu.Lock()
	defer hs.mu.Unlock()
	if on.answers == 0 {
		return err
	}
	all := hs.cleanups[n.i]
	prefix := on.call.Args[0]
	if old := all[prefix]; old != nil && old.answers > 0 {
		return err // an earlier release has already left a clean-up of the record
	}
	if len(all) == 0 {
		hs.m.work.Go(func() { hs.repeatCleanups(n) })
	}
	all[prefix] = on
	return err
}

// try sends a release, unless the node is suspect. If the argument last is true, it asks even a
// suspect node, because perhaps only one connection was dead.
func (hs *holds) try(n *node, on *copyOn, last bool) error {
	c, call := on.claim, on.call
	if !c.KeepUntil.IsZero() {
		call.Args = slices.Clone(call.Args) // the nodes share the slice
		call.Args[3] = redisstore.Rest(c.KeepUntil)
	}

	send := n.call
	if last {
		send = n.exchange
	}
	lost := false
	err := send(c.Timeout, func(ctx context.Context) error {
		reply, err := n.store.Run(ctx, releaseScript, call)
		// A reply of 2 says that other callers wait for the key.
		if reply == int64(2) {
			hs.wanted(c.Key)
			reply = int64(1)
		}
		err = n.store.Owned(reply, err)
		lost = errors.Is(err, backend.ErrLost)
		if lost {
			return nil // the node has answered
		}
		return err
	})
	if err != nil {
		return err
	}
	hs.mu.Lock()
	defer hs.mu.Unlock()
	on.answers--
	// Send a second release a Timeout later, because an earlier command may still write the record
	// within its Timeout.
	on.due = time.Now().Add(c.Timeout)
	if lost {
		return backend.ErrLost
	}
	return nil
}

// repeatCleanups tries the node's clean-ups until none is left. For each node, at most one
// goroutine runs this method.
func (hs *holds) repeatCleanups(n *node) {
	pause, left := firstRetry, true
	for left {
		// Close ends the pause, and then waits for one last try of each clean-up.
		doze(hs.m.closing, pause)
		last := hs.m.closing.Err() != nil
		var due []*copyOn
		due, left = hs.dueCleanups(n.i, last)

		next := firstRetry
		for some := range slices.Chunk(due, cleanupsAtOnce) {
			if !hs.tryAll(n, some, last) {
				next = min(2*pause, some[0].claim.Timeout) // the others would get no answer either
				break
			}
		}
		pause = next
	}
}

// tryAll sends releases together, and reports whether the node has answered one of them.
func (hs *holds) tryAll(n *node, some []*copyOn, last bool) bool {
	var answered atomic.Bool
	var wg sync.WaitGroup
	for _, on := range some {
		wg.Go(func() {
			if err := hs.try(n, on, last); err == nil || errors.Is(err, backend.ErrLost) {
				answered.Store(true)
			}
		})
	}
	wg.Wait()
	return answered.Load()
}

// dueCleanups returns the clean-ups that are due, or all clean-ups if the argument last is true. It
// drops the clean-ups that are done or expired, and reports whether others remain for later.
func (hs *holds) dueCleanups(i int, last bool) (due []*copyOn, left bool) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	at := time.Now()
	for prefix, on := range hs.cleanups[i] {
		done := on.answers == 0 || hs.m.now().After(on.until)
		if !done && (last || !at.Before(on.due)) {
			due = append(due, on)
		}
		if done || last {
			delete(hs.cleanups[i], prefix)
		}
	}
	return due, len(hs.cleanups[i]) > 0
}

// confirm asks the nodes for the record of an attempt that has won, and returns nil if a quorum has
// it. It also stores the fence of the attempt on these nodes, if there is one.
//
// A fence is the largest proposal of the nodes that voted for the holder. Before the key is
// granted, a quorum of nodes that have the holder's record must store the fence. A node without the
// record may already have made its proposal for the next holder, so it does not count. Each renewal
// writes the fence to all nodes again, in case they lose their data one by one.
func (hs *holds) confirm(ctx context.Context, h *hold) (fence uint64, err error) {
	hs.mu.Lock()
	if h.c.Fenced {
		// All proposals of the quorum are known, because settle runs before a node's vote is cast.
		for _, on := range h.on {
			h.fence = max(h.fence, on.proposal)
		}
	}
	fence = h.fence // from now on, renewals write the fence to all nodes
	hs.mu.Unlock()

	err = hs.m.poll(ctx, noLead, func(n *node) error {
		// Wait for a vote in flight, because the node counts only if it has the record.
		<-hs.settled(h, n.i)
		reply, err := n.run(h.c.Timeout, renewScript, hs.renewCall(h.c, h, ""))
		if err != nil {
			return err
		}
		found, mark, clock, err := decodeRenewal(n, reply, h.c.Key)
		from, _, marked := timesOf(mark)
		switch {
		case err != nil:
			return err
		case !found:
			return fmt.Errorf("%s: does not have the lock any more, or never had it", n.name)
		case !marked || from > clock:
			// It has lost its data since it voted, and a late command has brought the record.
			return fmt.Errorf("%s: has lost its data, so its lock does not count", n.name)
		}
		return nil
	})
	if err != nil && ctx.Err() != nil {
		// Nodes may still store the fence, which is harmless.
		return 0, ctx.Err()
	}
	return fence, err
}

// renewCall returns the call of renew.lua for c. It prolongs the hold to a term, which is empty if
// the hold must not be prolonged.
func (hs *holds) renewCall(c backend.Claim, h *hold, term string) redisstore.Call {
	fence := ""
	hs.mu.Lock()
	if h.fence > 0 {
		fence = strconv.FormatUint(h.fence, 10)
	}
	hs.mu.Unlock()
	return redisstore.Call{
		Keys: []string{redisstore.LockKey(c.Key), markKey, redisstore.DerivedKey("fence", c.Key)},
		Args: []string{h.prefix, term, fence, redisstore.Millis(hs.fenceTTL)},
	}
}

// renew asks all nodes to prolong the holds, with one batch for each node. A hold is renewed if a
// quorum has records of it that count (see copyOn). Then the nodes without such a record are
// repaired. If the driver does not know a hold, it first reads the record from the nodes.
func (hs *holds) renew(
	ctx context.Context, cs []backend.Claim, done func(i int, g backend.Grant, err error),
) {
	var renewals []*renewal
	var adopting sync.WaitGroup
	defer adopting.Wait() // done must not be called after renew has returned
	for i, c := range cs {
		r, err := hs.newRenewal(i, c)
		switch {
		case err != nil:
			done(i, backend.Grant{}, err)
		case r.h != nil:
			renewals = append(renewals, r)
		default:
			// Use a goroutine, so that the other renewals need not wait for the nodes' reports.
			adopting.Go(func() {
				if err := r.adopt(ctx); err != nil {
					done(i, backend.Grant{}, err)
				} else {
					renewAll(ctx, hs.m, []*renewal{r}, done)
				}
			})
		}
	}
	renewAll(ctx, hs.m, renewals, done)
}

// newRenewal returns a renewal of the hold of c, or an error if the term is too long or the hold is
// lost. The renewal has no hold yet if the driver does not know it, or if too few records count,
// because another driver may have renewed the hold since.
func (hs *holds) newRenewal(i int, c backend.Claim) (*renewal, error) {
	if err := hs.checkTTL(c.TTL); err != nil {
		return nil, err
	}

	hs.mu.Lock()
	defer hs.mu.Unlock()
	h := hs.byToken[c.Token]
	if h != nil && h.failed {
		return nil, backend.ErrLost
	}
	r := &renewal{hs: hs, i: i, c: c, ballot: newBallot(hs.m.names, false), began: hs.m.now()}
	if h != nil && h.counting(r.began) >= hs.m.quorum() {
		r.h = h
		// Raise the expiry now, because nodes may prolong their records even if the renewal fails.
		if expiry := r.began.Add(c.TTL + c.Timeout); expiry.After(h.expiry) {
			h.expiry = expiry
		}
	}
	return r, nil
}

// counts reports whether the record on node i counts for a renewal that is sent or answered now.
func (hs *holds) counts(h *hold, i int) bool {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	return hs.m.now().Before(h.on[i].counts)
}

// count notes that the record on node i counts until began+ttl minus the drift. It does nothing if
// less than the duration spare is left until that time, or if a renewal that began later did not
// find the record.
func (hs *holds) count(h *hold, i int, began time.Time, ttl, spare time.Duration) {
	end := began.Add(ttl - backend.Drift(ttl))
	hs.mu.Lock()
	defer hs.mu.Unlock()
	on := &h.on[i]
	if end.Sub(hs.m.now()) >= spare && !began.Before(on.lost) && end.After(on.counts) {
		on.counts = end
	}
	on.mayHold = on.mayHold || !h.failed && !h.released // another driver may have repaired the node
}

// lose notes that a renewal, which began at the given time, has not found the record on node i.
func (hs *holds) lose(h *hold, i int, began time.Time) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h.on[i].counts = time.Time{}
	h.on[i].lost = began
}

// beginRepair returns a channel to close when a repair of node i has ended, or nil if the repair
// must not begin. A release either prevents the repair, or waits for it and then removes the record.
func (hs *holds) beginRepair(h *hold, i int) (ended chan struct{}) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	on := &h.on[i]
	select {
	case <-on.inFlight:
	default:
		return nil // another command that writes the record is in flight
	}
	if h.released || h.failed {
		return nil
	}
	ended = make(chan struct{})
	on.inFlight = ended
	on.mayHold = true
	return ended
}

// mayArrive notes that a command of unknown outcome may still write the record to node i.
func (hs *holds) mayArrive(h *hold, i int) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h.on[i].mayArrive = true
}

// isOf reports whether a record is of an attempt with the given token.
func isOf(record, token string) bool {
	rest, ok := strings.CutPrefix(record, token)
	return ok && (strings.HasPrefix(rest, redisstore.Mark) || strings.HasPrefix(rest, "~"))
}
