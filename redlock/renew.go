package redlock

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// renewal is the renewal of one hold.
type renewal struct {
	hs     *holds
	i      int // the index in the claims of renew
	c      backend.Claim
	h      *hold // nil until adopt has set it
	ballot *ballot
	began  time.Time // by members.now
}

// renewAll makes renewals whose holds are set, with one batch for each node. It calls done for each
// renewal that the votes decide before ctx ends. The outcome of the others is unknown.
func renewAll(
	ctx context.Context, m *members, renewals []*renewal,
	done func(i int, g backend.Grant, err error),
) {
	if len(renewals) == 0 {
		return
	}

	// End the ballots that are undecided because ctx has ended or Close has begun. Votes that
	// arrive later must not lead to a repair, because another caller may hold the key by then.
	// Besides, renewOn waits for the end of each ballot.
	defer func() {
		for _, r := range renewals {
			r.ballot.decide(errAbandoned)
		}
	}()

	decided := make(chan *renewal, len(renewals)) // each renewal is decided once
	for _, n := range m.nodes {
		if !m.spawn(func() { renewOn(n, renewals, decided) }) {
			return // Close has begun, so leave the outcomes unknown
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

// renewOn renews holds on one node, casts the node's votes, and then repairs the node's records of
// the holds that a quorum has renewed. It sends each renewal that its vote decides to the channel
// decided. It continues after renewAll has returned.
func renewOn(n *node, renewals []*renewal, decided chan<- *renewal) {
	cast := func(r *renewal, vote error) {
		if r.ballot.cast(n.i, vote) {
			decided <- r // never blocks, because the channel has room for all renewals
		}
	}

	if why := n.admit(); why != nil {
		for _, r := range renewals {
			cast(r, why)
		}
		return
	}

	timeout := renewals[0].c.Timeout
	repairs := make([]func(), len(renewals)) // an element is nil if the node needs no repair
	_ = n.exchange(timeout, func(ctx context.Context) (err error) {
		calls := make([]redisstore.Call, len(renewals))
		for j, r := range renewals {
			// A record that does not count must not outlast the term that a quorum has granted, so
			// that another driver can tell such records (see adopt). A repair prolongs it.
			term := ""
			if r.hs.counts(r.h, n.i) {
				term = redisstore.Millis(r.c.TTL)
			}
			calls[j] = r.hs.renewCall(r.c, r.h, term)
		}

		n.store.RunEach(ctx, renewScript, calls, func(j int, reply any, e error) {
			var vote error
			if e != nil {
				err = e // the outcome of the exchange
				vote = n.nodeError(e, timeout)
			} else {
				prolongs := calls[j].Args[1] != "" // the term
				repairs[j], vote = renewals[j].answer(n, reply, prolongs)
			}
			cast(renewals[j], vote)
		})

		return err
	})

	// Repair only if a quorum has voted yes. The wait for that ends, because all nodes vote within
	// their Timeout.
	for j, repair := range repairs {
		if repair == nil {
			continue
		}
		<-renewals[j].ballot.done
		if renewals[j].ballot.result() == nil {
			repair()
		}
	}
}

// answer returns the node's vote that follows from a reply. If the node lacks the record, or its
// record does not count, answer also returns a function that repairs the node. The argument
// prolonged says that the call has prolonged the record if the node has it, which it does only if
// the record counted when the call was sent.
func (r *renewal) answer(n *node, reply any, prolonged bool) (repair func(), vote error) {
	found, _, clock, err := decodeRenewal(n, reply, r.c.Key)
	read := r.hs.m.now()
	switch {
	case err != nil:
		return nil, err
	case !found:
		r.hs.lose(r.h, n.i, r.began)
		return func() { r.repair(n, clock, read) }, errNo
	case !prolonged:
		err := n.errorf("has a record that counts from the next renewal on")
		return func() { r.repair(n, clock, read) }, err
	case !r.hs.counts(r.h, n.i):
		// The record has ceased to count during the call. A late command may have written it since.
		return nil, n.errorf("has a record that may be of a late command")
	}

	r.hs.count(r.h, n.i, r.began, r.c.TTL, 0)
	return nil, nil
}

// decodeRenewal decodes a reply of renew.lua. It returns whether the node has the record, the
// node's mark, and the node's time in ms. It returns an error if the reply is not valid, the node's
// fence counter cannot be used, or another server may have answered (see checkRun).
func decodeRenewal(
	n *node, reply any, key string,
) (found bool, mark string, clock int64, err error) {
	parts, _ := reply.([]any)
	if len(parts) == 1 && parts[0] == int64(-1) {
		return false, "", 0, noFence(n, key)
	}
	if len(parts) != 3 {
		return false, "", 0, n.store.Unexpected(reply)
	}
	found = parts[0] == int64(1)
	mark, ok := parts[1].(string)
	ok = ok && (found || parts[0] == int64(0))
	text, _ := parts[2].(string)
	clock, err = strconv.ParseInt(text, 10, 64)
	if !ok || err != nil || clock <= 0 {
		return false, "", 0, n.store.Unexpected(reply)
	}
	return found, mark, clock, n.checkRun(runOfMark(mark))
}

// noFence returns the error of a node whose fence counter has a value that is not a number. hasp
// never overwrites such a value.
func noFence(n *node, key string) error {
	const text = "%s: the value of %q is no fence counter; remove it, so that hasp can begin a new one"
	return fmt.Errorf(text, n.name, redisstore.DerivedKey("fence", key))
}

// repair starts a goroutine that writes the hold to a node. The command names the time, by the
// node's own clock, at which the record must end. So the record ends with the lease, however late
// the command arrives. The arguments are the node's clock in ms, as the node's reply had it, and
// the time read, at which the reply was read. The reply was on its way before that, so the record
// may end a little earlier than the lease, but never later.
func (r *renewal) repair(n *node, clock int64, read time.Time) {
	left := r.began.Add(r.c.TTL - backend.Drift(r.c.TTL)).Sub(read)
	if left <= 0 || !r.hs.m.begin() {
		return
	}
	defer r.hs.m.work.Done()
	if !r.hs.begin(r.h, n.i) {
		return
	}

	r.hs.m.work.Go(func() {
		end := strconv.FormatInt(clock+left.Milliseconds(), 10)
		written, err := n.run(r.c.Timeout, repairScript, redisstore.Call{
			Keys: []string{redisstore.LockKey(r.c.Key)},
			Args: []string{r.h.record, end},
		})
		if written == int64(1) {
			// The record counts only if attemptTime is left: see copyOn.
			r.hs.count(r.h, n.i, r.began, r.c.TTL, attemptTime)
		}
		// The vote is nil, so settle notes that the node may have the record, whatever err is.
		r.hs.settle(r.h, n.i, reply{unknown: err != nil && mayArrive(err)})
	})
}

// adopt sets r.h to the hold of a claim that another driver has taken, such as that of an earlier
// process. It asks all nodes for the record of the token that a quorum has. It ignores the records
// of the token's other attempts, because the driver that made these attempts is about to remove
// them. It returns an error if the hold is lost, is not found, or ends too soon.
//
// Which records count for the other driver is not known here. A record that does not count ends at
// most attemptTime after the term that a quorum has granted (see renewOn), or after the commands of
// the attempt. So if a record has twice attemptTime left, the records that count for that driver
// last for at least attemptTime. By then, any other attempt that has had votes of these nodes has
// ended. If less is left, adopt does not prolong the hold, because records that do not count would
// then seem to count.
func (r *renewal) adopt(ctx context.Context) error {
	c, m := r.c, r.hs.m
	began := m.now()
	isForeign := func(record string) bool { return !isOf(record, c.Token) }
	wait := func(surveys []*survey) time.Duration {
		s := surveys[0] // of the only key
		switch {
		case s.unheld():
			return 0
		case s.holder != nil:
			return leadTimeout // for late nodes, whose records count only if they are reported
		}

		return forever
	}
	s := m.query(ctx, []string{c.Key}, c.Timeout, isForeign, wait)[0]
	switch {
	case s.holder != nil: // adopted below
	case s.unheld():
		return backend.ErrLost
	case ctx.Err() != nil:
		return ctx.Err()
	default:
		return outage(s.errs)
	}

	record := s.holder.Record
	prefix, _, _ := strings.Cut(record, redisstore.Mark)
	h := foundHold(c, prefix+redisstore.Mark, m)
	h.record = record
	h.expiry = began.Add(r.hs.maxTTL + c.Timeout) // the term is not known, but is at most maxTTL

	// The counters may be larger than the fence of the hold, which is harmless.
	if fence := s.status().Fence; c.Fenced && fence <= maxFence {
		h.fence = fence
	}
	for i, f := range s.on {
		if f != nil && f.Record == record {
			r.hs.count(h, i, began, remaining(*f), 2*attemptTime)
		}
	}

	if h.counting(m.now()) < m.quorum() {
		return fmt.Errorf("the hold ends in %v: another program can resume it only if %v are left",
			remaining(*s.holder).Round(time.Millisecond), 2*attemptTime)
	}
	r.hs.add(h)
	r.h = h
	return nil
}
