package redlock

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// renewal is the renewal of one hold.
type renewal struct {
	i      int // the index in the claims of Renew
	c      backend.Claim
	a      *attempt // the attempt that represents the hold; nil until adopt has set it
	ballot *ballot
	began  time.Time
}

// flaw says why a node does not count for a renewal. The node lacks the record, or its record does
// not count. The flaw is zero if the node counts, or has not answered.
type flaw struct {
	r     *renewal
	clock int64     // the node's time in ms if it lacks the record; 0 if its record does not count
	read  time.Time // when the reply with clock arrived
}

// proof says whether the record on a node counts for a renewal. It counts if the node's vote
// counted, and the node has had the record ever since.
//
// Not every record that a node has counts. Suppose that the record expired, the node voted for
// another caller, and then lost that vote with its data. If a late command stored the record again,
// both callers would count the node (see RENEW_ANYWHERE in lab/model/redlock.pml).
//
// A record that does not count will count from the next renewal on, if the node had it at least one
// Timeout before the end of a term that a quorum has granted. If the node has voted for another
// caller, that caller's attempt lasts at most one Timeout. So the attempt ends before the other
// nodes of the quorum are free.
type proof struct {
	until time.Time // the time until which the node has the record, if it keeps its data
	lost  time.Time // when the last renewal that did not find the record began
}

// Renew asks all nodes to prolong the holds, with one batch for each node. A hold is renewed if a
// quorum has records of it that count (see proof). Renew then repairs the nodes that lack the
// record. If the driver does not know a hold, Renew first reads its record from the nodes.
func (d *driver) Renew(ctx context.Context, cs []backend.Claim, done func(i int, g backend.Grant, err error)) {
	var renewals []*renewal
	var adopting sync.WaitGroup
	defer adopting.Wait() // done must not be called after Renew has returned
	for i, c := range cs {
		r, err := d.newRenewal(i, c)
		switch {
		case err != nil:
			done(i, backend.Grant{}, err)
		case r.a != nil:
			renewals = append(renewals, r)
		default:
			// Use a goroutine, so that the other renewals need not wait for the nodes' reports.
			adopting.Go(func() {
				if err := d.adopt(ctx, r); err != nil {
					done(i, backend.Grant{}, err)
				} else {
					d.renew(ctx, []*renewal{r}, done)
				}
			})
		}
	}
	d.renew(ctx, renewals, done)
}

// renew makes the given renewals, in which the attempts are set.
func (d *driver) renew(ctx context.Context, renewals []*renewal, done func(i int, g backend.Grant, err error)) {
	if len(renewals) == 0 {
		return
	}

	// End the ballots. Votes that arrive later must not lead to a repair, because another caller
	// may hold the key when they arrive. If Close has begun, no votes decide the ballots.
	defer func() {
		for _, r := range renewals {
			r.ballot.decide(abandoned)
		}
	}()

	decided := make(chan *renewal, len(renewals)) // each renewal is decided once
	for _, n := range d.nodes {
		// If Close has begun, do not call done, so that the outcome of these claims is unknown.
		if !d.spawn(func() { n.renew(renewals, decided) }) {
			return
		}
	}

	for range renewals {
		select {
		case r := <-decided:
			done(r.i, backend.Grant{}, r.ballot.err())
		case <-ctx.Done():
			return
		}
	}
}

// newRenewal returns a renewal of the hold of c, or an error if the term is too long or the hold is
// lost. The attempt is nil if the driver does not know the hold, or has no proofs of a quorum any
// more, because another driver may have renewed the hold since.
func (d *driver) newRenewal(i int, c backend.Claim) (*renewal, error) {
	if err := d.checkTTL(c.TTL); err != nil {
		return nil, err
	}

	d.mu.Lock()
	defer d.mu.Unlock()
	a := d.attempts[c.Token]
	if a != nil && a.failed {
		return nil, backend.ErrLost
	}
	r := &renewal{i: i, c: c, ballot: newBallot(d.nodes, holdRule), began: time.Now()}
	past := func(on onNode) bool { return !r.began.Before(on.proof.until) }
	if a != nil && len(slices.DeleteFunc(slices.Clone(a.on), past)) >= d.quorum() {
		r.a = a
		// Raise a.expiry now, because some nodes may prolong their records even if the renewal fails.
		if expiry := r.began.Add(c.TTL + c.Timeout); expiry.After(a.expiry) {
			a.expiry = expiry
		}
	}
	return r, nil
}

// adopt sets r.a to an attempt with the record of the token that a quorum has. Records of other
// attempts do not count, because the driver that made these attempts is about to remove them.
func (d *driver) adopt(ctx context.Context, r *renewal) error {
	c, began := r.c, time.Now()
	sum := func(all []report) survey {
		return d.sum(all, 0, false, func(record string) bool { return !isOf(record, c.Token) })
	}
	s := sum(d.query(ctx, []string{c.Key}, c.Timeout, func(all []report) time.Duration {
		if s := sum(all); s.holder != nil || s.unheld() {
			return 0
		}
		return forever
	}, "1000000000")) // all members of a shared record
	switch {
	case s.holder != nil:
	case s.unheld():
		return backend.ErrLost
	case ctx.Err() != nil:
		return ctx.Err()
	default:
		return outage(s.errs)
	}

	record := records(*s.holder)[0]
	r.a = d.newAttempt(c, 1, noLead, nil)
	token, _, _ := strings.Cut(record, redisstore.Mark)
	r.a.record, r.a.prefix = record, token+redisstore.Mark
	// The fence may be larger than that of the hold, which is harmless.
	if fence := s.status().Fence; c.Fenced && fence <= maxFence {
		r.a.fence = fence
	}
	r.a.expiry = began.Add(d.opts.MaxTTL + c.Timeout)
	for i, f := range s.on {
		close(r.a.on[i].inFlight)
		r.a.on[i].mayHold = true // also if the node has not answered
		if f != nil && slices.Contains(records(*f), record) {
			r.a.prove(i, began, min(remaining(*f), c.Timeout), 0) // the present renewal proves it for longer
		}
	}
	if !d.register(r.a) {
		return errClosed
	}
	d.work.Done()
	return nil
}

// isOf reports whether a record is of an attempt with the given token.
func isOf(record, token string) bool {
	rest, ok := strings.CutPrefix(record, token)
	return ok && (strings.HasPrefix(rest, redisstore.Mark) || strings.HasPrefix(rest, "~"))
}

// renew renews holds on one node. It continues after Renew has returned.
func (n *node) renew(renewals []*renewal, decided chan<- *renewal) {
	timeout := renewals[0].c.Timeout
	// Do not end the call with Renew's context, because a late answer still shows whether the node
	// needs a repair.
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()

	var flaws []flaw
	answered := make([]bool, len(renewals))
	cast := func(j int, v vote, err error) {
		answered[j] = true
		if renewals[j].ballot.cast(n.i, v, err) {
			decided <- renewals[j] // never blocks
		}
	}

	calls := make([]redisstore.Call, len(renewals))
	for j, r := range renewals {
		calls[j] = n.renewCall(r.c, r.a, r.c.TTL)
	}
	n.store.RunEach(ctx, renewScript, calls, func(j int, reply any, err error) {
		v, f, err := n.renewed(renewals[j], reply, err)
		if f.r != nil {
			flaws = append(flaws, f)
		}
		cast(j, v, err)
	})

	// RunEach does not report calls that received no reply in time. The outcome of these calls is
	// unknown, so they do not count as refusals.
	for j := range renewals {
		if !answered[j] {
			cast(j, failed, fmt.Errorf("%s: no answer within %v: %w", n.name, timeout, os.ErrDeadlineExceeded))
		}
	}

	// If a quorum has renewed a hold, repair this node if it lacks the record. If its record did
	// not count, the record will count from now on, if at least one Timeout of the term is left.
	// Each ballot is decided in time, because all nodes vote within their Timeout.
	for _, f := range flaws {
		<-f.r.ballot.done
		switch {
		case f.r.ballot.result() != won:
		case f.clock > 0:
			n.repair(f)
		default:
			f.r.a.prove(n.i, f.r.began, f.r.c.TTL, f.r.c.Timeout)
		}
	}
}

// renewed returns the vote that follows from the outcome of a renewal on the node. If the node does
// not count for the hold, the flaw says why.
func (n *node) renewed(r *renewal, reply any, err error) (vote, flaw, error) {
	if err != nil {
		return failed, flaw{}, n.nodeError(err, r.c.Timeout)
	}
	holds, now, err := n.decodeRenewal(reply, r.c)
	switch {
	case err != nil:
		return failed, flaw{}, err
	case !holds:
		n.d.mu.Lock()
		r.a.on[n.i].proof = proof{lost: r.began}
		n.d.mu.Unlock()
		return no, flaw{r, now, time.Now()}, nil
	case !r.a.proven(n.i):
		return failed, flaw{r: r}, fmt.Errorf("%s: has a record that counts from the next renewal on", n.name)
	}
	r.a.prove(n.i, r.began, r.c.TTL, 0)
	return yes, flaw{}, nil
}

// proven reports whether the record on node i counts for a renewal that has just been answered.
func (a *attempt) proven(i int) bool {
	a.d.mu.Lock()
	defer a.d.mu.Unlock()
	return time.Now().Before(a.on[i].proof.until)
}

// prove notes that the record on node i counts until began+ttl minus the drift. It does nothing if
// less than the duration spare is left until that time, or if a renewal that began later did not
// find the record.
func (a *attempt) prove(i int, began time.Time, ttl, spare time.Duration) {
	end := began.Add(ttl - backend.Drift(ttl))
	a.d.mu.Lock()
	defer a.d.mu.Unlock()
	if p := &a.on[i].proof; time.Until(end) >= spare && !began.Before(p.lost) && end.After(p.until) {
		p.until = end
	}
	a.on[i].mayHold = !a.failed && !a.released || a.on[i].mayHold // another driver may have repaired the node
}

// renewCall returns the call of renew.lua that prolongs the hold of c to the term ttl. The attempt
// a represents the hold.
func (n *node) renewCall(c backend.Claim, a *attempt, ttl time.Duration) redisstore.Call {
	fence := ""
	a.d.mu.Lock()
	if a.fence > 0 {
		fence = strconv.FormatUint(a.fence, 10)
	}
	a.d.mu.Unlock()
	call := redisstore.Call{
		Keys: []string{redisstore.LockKey(c.Key), markKey, redisstore.DerivedKey("fence", c.Key)},
		Args: []string{a.prefix, redisstore.Millis(ttl), fence, redisstore.Millis(n.d.opts.FenceTTL)},
	}
	if c.Shared {
		call.Args = append(call.Args, c.Owner)
	}
	return call
}

// decodeRenewal decodes a reply of renew.lua to a call for c. It returns whether the node has the
// hold, and if not, the node's time in ms. If the mark in the reply names another run than the
// node's known mark, decodeRenewal returns an error, because the server of another node may have
// answered, and would count twice. A new run that has the old mark is not noticed.
func (n *node) decodeRenewal(reply any, c backend.Claim) (holds bool, now int64, err error) {
	parts, _ := reply.([]any)
	if len(parts) == 1 && parts[0] == int64(-1) {
		return false, 0, n.noFence(c.Key)
	}
	ok, run := false, ""
	if len(parts) > 1 {
		run, ok = parts[1].(string)
	}
	switch {
	case len(parts) == 2 && parts[0] == int64(1):
		holds = true
	case len(parts) == 3 && parts[0] == int64(0):
		text, _ := parts[2].(string)
		now, err = strconv.ParseInt(text, 10, 64)
		ok = ok && err == nil && now > 0
	default:
		ok = false
	}
	if !ok {
		return false, 0, n.store.Unexpected(reply)
	}

	s := n.marks.current.Load()
	if s == nil || run != runOfMark(s.mark) {
		n.refreshInBackground(c.Timeout)
	}
	if s != nil && run != "" && run != runOfMark(s.mark) {
		return false, 0, fmt.Errorf("%s: was restarted, or another server answers at its address", n.name)
	}
	return holds, now, nil
}

// repair writes a hold to the node. The record ends with the lease, however late the command
// arrives, because the command names the time on the node's own clock at which the record ends.
func (n *node) repair(f flaw) {
	d, r, a, ended := n.d, f.r, f.r.a, make(chan struct{})
	end := r.began.Add(r.c.TTL - backend.Drift(r.c.TTL))
	// The node read its clock before f.read. So the record ends with the lease, or earlier by the
	// time that the reply took to arrive.
	left := end.Sub(f.read)

	// Hold d.mu until the repair counts as in flight, so that a Release either prevents the repair,
	// or waits for it and then removes the record.
	d.mu.Lock()
	defer d.mu.Unlock()

	select {
	case <-a.on[n.i].inFlight:
	default:
		return // another command that writes the record is in flight
	}

	if a.released || a.failed || left <= 0 || d.closing.Err() != nil {
		return
	}
	a.on[n.i].inFlight, a.on[n.i].mayHold = ended, true
	d.work.Go(func() {
		defer close(ended)
		call := redisstore.Call{Keys: []string{a.lockKey}, Args: []string{a.record, strconv.FormatInt(f.clock+left.Milliseconds(), 10)}}
		if r.c.Shared {
			call.Args = append(call.Args, "1")
		}
		reply, err := n.send(r.c.Timeout, repairScript, call)
		if reply == int64(1) {
			a.prove(n.i, r.began, r.c.TTL, r.c.Timeout)
		}
		if err != nil && voteAfter(err) == unknown {
			d.mu.Lock()
			// The command may still arrive. Set mayArrive before the channel ended is closed,
			// because a Release that waits for this channel then reads mayArrive.
			a.on[n.i].mayArrive = true
			d.mu.Unlock()
		}
	})
}
