package redlock

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

const (
	// attemptTime is how old the answers of a quorum may be when an attempt wins. It is the same in
	// all programs, because the holders of other programs rely on it.
	attemptTime = time.Second

	// firstRetry is the pause before a release is repeated. The pause doubles after each release
	// that the node does not answer.
	firstRetry = 50 * time.Millisecond

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

	mu      sync.Mutex       // guards the fields below, and the fields of holds that say so
	byToken map[string]*hold // attempts in flight, holds, and tokens that hold nothing
	sweepAt int              // the number of holds at which add removes the expired ones
}

func newHolds(m *members, o *Options, wanted func(key string)) *holds {
	return &holds{
		m:        m,
		fenceTTL: o.FenceTTL,
		maxTTL:   o.MaxTTL,
		wanted:   wanted,
		byToken:  map[string]*hold{},
	}
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

	// A later attempt with the same token replaces the one that has failed.
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

// begin notes that a command is about to write the record to node i. It returns false if the
// command must not be sent, because the attempt has failed, because the hold is released, or because
// another such command is in flight. A release either prevents the command, or waits for it and then
// removes the record.
func (hs *holds) begin(h *hold, i int) bool {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	on := &h.on[i]
	if h.failed || h.released || on.inFlight != nil {
		return false
	}
	on.inFlight = make(chan struct{})
	return true
}

// settle records the outcome of the command that begin has announced. It also starts the release of
// the record on that node, if the attempt has already failed.
func (hs *holds) settle(h *hold, i int, r reply) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	on := &h.on[i]
	on.mayHold = on.mayHold || r.vote == nil || r.unknown
	on.mayArrive = on.mayArrive || r.unknown
	on.proposal = max(on.proposal, r.proposal)
	close(on.inFlight)
	on.inFlight = nil

	// If abandon ran before this outcome was known, it has not released the record on this node.
	if h.failed {
		hs.cleanUpLocked(h, i)
	}
}

// await waits until no command that writes the record to node i is in flight.
func (hs *holds) await(h *hold, i int) {
	hs.mu.Lock()
	inFlight := h.on[i].inFlight
	hs.mu.Unlock()
	if inFlight != nil {
		<-inFlight
	}
}

// abandon ends an attempt that did not take the key, and releases its records. The release on the
// lead wakes the next waiter, because this caller has left the queue.
//
// The hold stays in the map until its commands have ended, because these may still write records,
// so that the nodes report that the token holds the key. Until then, the driver itself refuses
// renewals and releases of the token. After an unknown outcome, the engine releases the token
// twice, which would flood the nodes after an outage.
func (hs *holds) abandon(h *hold) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h.failed = true // settle reads this for the calls in flight, and releases their records
	for i := range h.on {
		hs.cleanUpLocked(h, i)
	}
}

// end ends this driver's holds of a key, because Break removes their records. Votes that arrive later
// are released, as after a failed attempt.
func (hs *holds) end(key string) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	for _, h := range hs.byToken {
		// Leave out the attempts that have not won yet, which Break need not end.
		if h.c.Key == key && h.counting(hs.m.now()) >= hs.m.quorum() {
			h.failed = true
		}
	}
}

// cleanUpLocked starts a goroutine that releases the record on node i, if the node may have it.
func (hs *holds) cleanUpLocked(h *hold, i int) {
	channel := ""
	if i == h.lead {
		channel = channelOf(h.c.Key)
	}
	if r := hs.takeLocked(h, i, h.c, h.prefix, channel); r != nil {
		// Close waits for this goroutine in any case, because the caller counts as work.
		hs.m.work.Go(func() { _ = hs.remove(r) })
	}
}

// takeLocked returns the removal of the record on node i for the claim c. It returns nil if the node
// has no record, or if an earlier call has returned the removal. So a record is removed at most once.
func (hs *holds) takeLocked(h *hold, i int, c backend.Claim, prefix, channel string) *removal {
	on := &h.on[i]
	if !on.mayHold {
		return nil
	}
	n := hs.m.nodes[i]
	r := &removal{n: n, claim: c, prefix: prefix, channel: channel, until: h.expiry, answers: 1}
	if on.mayArrive {
		r.answers = 2
	}
	on.mayHold = false
	return r
}

// release removes the record of c.Token from all nodes, and publishes the release. It returns as
// soon as a quorum has answered. The calls to the other nodes continue. If c.KeepUntil is set, the
// key stays taken on each node until that time, by a record without a holder. A node that does not
// answer keeps the old record.
func (hs *holds) release(ctx context.Context, c backend.Claim) error {
	if !hs.m.begin() {
		return errClosed
	}
	defer hs.m.work.Done()
	h, known := hs.beginRelease(c)
	if h == nil {
		return backend.ErrLost
	}

	if known && hs.m.now().Sub(h.began) >= wantedFor/2 {
		// During a long hold, this driver forgets that callers wait. So let the next caller ask the
		// lead. If the holder locked the key again at once, it could overtake these callers each
		// time.
		hs.wanted(c.Key)
	}

	// Do not use redsync, which cannot tell a lost hold from an outage. If ctx ends, the calls
	// continue, so that all nodes release the record.
	err := hs.m.poll(ctx, false, func(n *node) error { return hs.releaseOn(n, h, c) })
	if err == nil && h.again && known {
		// Make all later renewals of the token fail. Otherwise, late votes for an earlier attempt
		// and nodes that have not answered this release could together be a quorum for a renewal.
		hs.mu.Lock()
		defer hs.mu.Unlock()
		hs.byToken[c.Token] = &hold{failed: true, expiry: h.expiry}
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

// releaseOn waits for the commands in flight for h on the node, and then releases the hold there. If
// the outcome is unknown, a goroutine repeats the release.
func (hs *holds) releaseOn(n *node, h *hold, c backend.Claim) error {
	// Wait for commands in flight, which may still write the record. They end within their Timeout.
	hs.await(h, n.i)

	hs.mu.Lock()
	r := hs.takeLocked(h, n.i, c, c.Token, channelOf(c.Key))
	hs.mu.Unlock()
	if r == nil {
		return errNo
	}
	return hs.remove(r)
}

// remove removes a record, and returns nil, errNo if the node did not have it, or an error. If the
// node must answer another release after that, a goroutine repeats it. Close waits for that
// goroutine in any case, because the caller counts as work.
func (hs *holds) remove(r *removal) error {
	vote := hs.try(r, r.n.call)
	if r.answers > 0 {
		hs.m.work.Go(func() { hs.repeat(r, vote) })
	}
	return vote
}

// repeat repeats a release until the node has answered often enough, or the record has expired. The
// argument vote is the outcome of the release before.
func (hs *holds) repeat(r *removal, vote error) {
	pause := firstRetry
	for r.answers > 0 && hs.m.now().Before(r.until) {
		if vote == nil || vote == errNo {
			pause = r.claim.Timeout
		}

		// Close ends the pause. Then try once more, even if the node is suspect, because perhaps
		// only one connection was dead.
		doze(hs.m.closing, pause)
		if hs.m.closing.Err() != nil {
			_ = hs.try(r, r.n.exchange)
			return
		}
		vote = hs.try(r, r.n.call)
		pause = min(2*pause, r.claim.Timeout)
	}
}

// try sends a release by the function send, and returns what remove returns.
func (hs *holds) try(
	r *removal, send func(time.Duration, func(context.Context) error) error,
) (vote error) {
	c := r.claim
	call := redisstore.Call{
		Keys: keysOf(c.Key),
		Args: []string{r.prefix, r.channel, c.Token, redisstore.Rest(c.KeepUntil)},
	}
	err := send(c.Timeout, func(ctx context.Context) error {
		reply, err := r.n.store.Run(ctx, releaseScript, call)

		// A reply of 2 says that other callers wait for the key.
		if reply == int64(2) {
			hs.wanted(c.Key)
			reply = int64(1)
		}
		err = r.n.store.Owned(reply, err)
		if errors.Is(err, backend.ErrLost) {
			vote = errNo
			return nil // the node has answered
		}
		return err
	})

	if err != nil {
		return err
	}
	r.answers--
	return vote
}

// confirm asks the nodes for the record of an attempt that has won, and returns nil if a quorum has
// it. It also stores the fence of the attempt on these nodes, if there is one.
//
// A fence is the largest proposal of the nodes that voted for the holder. Before the key is
// granted, a quorum of nodes that have the holder's record must store the fence. A node without the
// record may already have made its proposal for the next holder, so it does not count. Each renewal
// writes the fence to all nodes again, in case they lose their data one by one.
//
// The channel asked[i] is closed when node i has been asked for its vote.
func (hs *holds) confirm(ctx context.Context, h *hold, asked []chan struct{}) (
	fence uint64, err error) {
	hs.mu.Lock()
	if h.c.Fenced {
		// All proposals of the quorum are known, because settle runs before a node's vote is cast.
		for _, on := range h.on {
			h.fence = max(h.fence, on.proposal)
		}
	}

	fence = h.fence // from now on, renewals write the fence to all nodes
	hs.mu.Unlock()

	err = hs.m.poll(ctx, false, func(n *node) error {
		// Wait for the node's vote, because the node counts only if it has the record. redsync may
		// have counted a quorum before it asked this node.
		<-asked[n.i]
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
			return n.errorf("does not have the lock any more, or never had it")
		case !marked || from > clock:
			// It has lost its data since it voted, and a late command has brought the record.
			return n.errorf("has lost its data, so its lock does not count")
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

// isOf reports whether a record is of an attempt with the given token.
func isOf(record, token string) bool {
	rest, ok := strings.CutPrefix(record, token)
	return ok && (strings.HasPrefix(rest, redisstore.Mark) || strings.HasPrefix(rest, "~"))
}
