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
	// attemptTime is how old the answers of a quorum may be when an attempt wins. It must be the
	// same in all programs, because the holders in other programs rely on it (see copyOn).
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
	byToken map[string]*hold // attempts in flight, holds, and failed attempts until they expire
	sweepAt int              // the number of holds at which add removes the expired ones
}

// newHolds returns an empty set of holds. The function wanted is that of the field.
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

// add adds h to byToken, where it stays until it is released, or until a sweep after its expiry.
func (hs *holds) add(h *hold) {
	hs.mu.Lock()
	defer hs.mu.Unlock()

	// If the token has had an attempt before, that attempt has failed, and h replaces it.
	hs.byToken[h.c.Token] = h

	// Remove holds that expired without a release. The next sweep follows when the map has more
	// than twice as many holds as this sweep leaves. So the average cost of an attempt is constant.
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

// begin notes that a command is about to write the record to node i. The caller must then call
// settle with its outcome. begin returns false if the command must not be sent: the attempt has
// failed, the hold is released, or another such command is in flight. Because of begin, a release
// either prevents the command, or waits for it and then removes the record.
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

	// abandon has run while the command was in flight, so it has not released the record on this
	// node.
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
// The failed hold stays in byToken until a sweep after its expiry. Meanwhile the driver itself
// answers renewals and releases of the token with ErrLost. It must not ask the nodes: commands in
// flight may still write records, so that the nodes would report that the token holds the key.
// Besides, the engine releases a token twice after an unknown outcome, which would flood the nodes
// after an outage.
func (hs *holds) abandon(h *hold) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h.failed = true // so settle releases the records of the calls in flight
	for i := range h.on {
		hs.cleanUpLocked(h, i)
	}
}

// end ends this driver's holds of a key, because Break removes their records. So their renewals
// fail. If a vote for such a hold is still in flight, settle releases its record when it arrives.
func (hs *holds) end(key string) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	for _, h := range hs.byToken {
		// A hold with fewer counting records is an attempt that has not won. Break need not end it.
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
		// work.Go is safe, because the caller already counts as work (see members.begin).
		hs.m.work.Go(func() { _ = hs.remove(r) })
	}
}

// takeLocked returns the removal of the record of h on node i. The removal is for the claim c,
// removes a record that begins with prefix, and publishes to channel. takeLocked returns nil if the
// node has no record, or if an earlier call has returned the removal. So only one caller removes a
// record.
func (hs *holds) takeLocked(h *hold, i int, c backend.Claim, prefix, channel string) *removal {
	on := &h.on[i]
	if !on.mayHold {
		return nil
	}
	n := hs.m.nodes[i]
	r := &removal{n: n, claim: c, prefix: prefix, channel: channel, until: h.expiry, answers: 1}
	if on.mayArrive {
		r.answers = 2 // the record may arrive after the first release
	}
	on.mayHold = false
	return r
}

// release removes the record of c.Token from all nodes, and publishes the release. It returns as
// soon as a quorum has answered. The calls to the other nodes continue. If c.KeepUntil is set, the
// key stays taken on each node until that time, by a record without a holder. A node that does not
// answer keeps the old record. If too few nodes have the record, release returns ErrLost.
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
		// During a long hold, this driver forgets that other callers wait. Assume that some do, so
		// that this driver's next attempt asks the lead first. Otherwise a holder that locks the
		// key again at once could overtake the waiters each time.
		hs.wanted(c.Key)
	}

	// Do not use redsync, which cannot tell a lost hold from an outage. If ctx ends, the calls
	// continue, so that all nodes release the record.
	err := hs.m.poll(ctx, false, func(n *node) error { return hs.releaseOn(n, h, c) })
	if err == nil && h.again && known {
		// Nodes may still get records of the token, by late votes for an earlier attempt, or keep
		// them, if they have not answered this release. Together they could be a quorum for a
		// renewal. So make all later renewals of the token fail.
		hs.mu.Lock()
		defer hs.mu.Unlock()
		hs.byToken[c.Token] = &hold{failed: true, expiry: h.expiry}
	}

	return err
}

// beginRelease prevents further repairs of the hold of c, and returns the hold. If the driver knows
// that the token holds nothing, h is nil. If the driver does not know the token, known is false,
// and h is a hold whose release removes every record of the token.
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

// releaseOn releases the hold h on the node, and returns what remove returns.
func (hs *holds) releaseOn(n *node, h *hold, c backend.Claim) error {
	// A command in flight may still write the record. It ends within its Timeout.
	hs.await(h, n.i)

	hs.mu.Lock()
	r := hs.takeLocked(h, n.i, c, c.Token, channelOf(c.Key)) // of all attempts with this token
	hs.mu.Unlock()
	if r == nil {
		return errNo
	}
	return hs.remove(r)
}

// remove sends a release of a record. It returns nil if the node had the record, errNo if it did
// not, and an error if the node did not answer. If the node must answer another release, a
// goroutine repeats the release. Close waits for that goroutine, because the caller counts as work.
func (hs *holds) remove(r *removal) error {
	vote := hs.try(r, r.n.call)
	if r.answers > 0 {
		hs.m.work.Go(func() { hs.repeat(r, vote) })
	}
	return vote
}

// repeat repeats a release until the node has answered often enough, or the record has expired. The
// argument vote is the result of the first release, as remove returns it.
func (hs *holds) repeat(r *removal, vote error) {
	pause := firstRetry
	for r.answers > 0 && hs.m.now().Before(r.until) {
		if vote == nil || vote == errNo {
			pause = r.claim.Timeout // the node has answered: see removal.answers
		}

		// Close ends the pause. Then try a last time, even if the node is suspect, because perhaps
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

// try sends a release by the function send, which is call or exchange of the node. It returns what
// remove returns. If the node has answered, try counts the answer.
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
			// The node does not have the record. For send this is no error, because the node has
			// answered.
			vote = errNo
			return nil
		}
		return err
	})

	if err != nil {
		return err
	}
	r.answers--
	return vote
}

// confirm asks the nodes for the record of an attempt that has won. The error is nil if a quorum
// has the record. confirm also stores the fence of the attempt on these nodes, and returns the
// fence. If the claim is not Fenced, the fence is 0, and nothing is stored.
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
		// From now on, renewCall writes the fence to all nodes.
		for _, on := range h.on {
			h.fence = max(h.fence, on.proposal)
		}
	}

	fence = h.fence
	hs.mu.Unlock()

	err = hs.m.poll(ctx, false, func(n *node) error {
		// Wait until the node was asked for its vote, because the quorum may have been complete
		// before. If this call overtook the vote, it would not find the record.
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
			// The node has no mark, or does not vote yet. So it has lost its data since it voted,
			// and a late command has brought the record.
			return n.errorf("has lost its data, so its lock does not count")
		}

		return nil
	})

	if err != nil && ctx.Err() != nil {
		err = ctx.Err() // which has ended the poll
	}
	return fence, err
}

// renewCall returns the call of renew.lua for c and its hold h. The call prolongs the hold to term,
// in ms. If term is empty, it does not prolong the hold. The call also stores the fence of h, if
// any.
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
	defer adopting.Wait() // because done must not be called after renew has returned
	for i, c := range cs {
		r, err := hs.newRenewal(i, c)
		switch {
		case err != nil:
			done(i, backend.Grant{}, err)
		case r.h != nil:
			renewals = append(renewals, r)
		default:
			// The hold must be read from the nodes first. Use a goroutine, so that the other
			// renewals need not wait for that.
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

// newRenewal returns the renewal of the hold of c, which has the index i in renew. It returns an
// error if the term is too long or the hold is lost. The field h of the renewal is nil if the
// driver does not know the hold, or if too few of its records count. In the second case, another
// driver may have renewed the hold since.
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
	r := &renewal{hs: hs, i: i, c: c, ballot: newBallot(hs.m.nodes, false), began: hs.m.now()}
	if h != nil && h.counting(r.began) >= hs.m.quorum() {
		r.h = h

		// Raise the expiry before the renewal, because nodes may prolong their records even if the
		// renewal fails.
		if expiry := r.began.Add(c.TTL + c.Timeout); expiry.After(h.expiry) {
			h.expiry = expiry
		}
	}

	return r, nil
}

// counts reports whether the record of h on node i counts now (see copyOn).
func (hs *holds) counts(h *hold, i int) bool {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	return hs.m.now().Before(h.on[i].countsUntil)
}

// count notes that the record of h on node i counts until began+ttl minus the drift. The record was
// written, prolonged or read by a call that began at the time began. The record does not count if
// less than the duration spare is left until then, or if a renewal that began later did not find
// it.
func (hs *holds) count(h *hold, i int, began time.Time, ttl, spare time.Duration) {
	end := began.Add(ttl - backend.Drift(ttl))
	hs.mu.Lock()
	defer hs.mu.Unlock()
	on := &h.on[i]
	if end.Sub(hs.m.now()) >= spare && !began.Before(on.lost) && end.After(on.countsUntil) {
		on.countsUntil = end
	}

	// The node has the record, even if this driver has not written it, because another driver may
	// have repaired the node. After a release, do not set mayHold again, because the record is
	// removed once.
	on.mayHold = on.mayHold || !h.failed && !h.released
}

// lose notes that a renewal, which began at the given time, has not found the record on node i.
func (hs *holds) lose(h *hold, i int, began time.Time) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h.on[i].countsUntil = time.Time{}
	h.on[i].lost = began
}

// isOf reports whether a record belongs to an attempt with the given token: it is token#owner or
// token~n#owner.
func isOf(record, token string) bool {
	rest, ok := strings.CutPrefix(record, token)
	return ok && (strings.HasPrefix(rest, redisstore.Mark) || strings.HasPrefix(rest, "~"))
}
