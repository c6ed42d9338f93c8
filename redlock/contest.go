package redlock

import (
	"context"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

const (
	wantedFor = time.Second      // how long a key counts as contended after a refusal
	maxWanted = 256              // the most keys that are remembered; others may split votes
	shunFor   = 10 * time.Second // how long a shunned node must not lead
	maxRounds = 3                // how often acquire asks again for a key that was free
)

// contest takes keys that other callers may want as well. It knows which keys are contended, and
// which node leads.
//
// The waiters of a key stand in a queue on the lead, the node that contended attempts ask first.
// The lead refuses a free key to a caller if another caller has waited longer. A release wakes the
// first waiter of the queue.
//
// The order is not guaranteed, because the queue can only let the lead refuse a caller. Some
// callers do not stand in the queue, and may acquire the key first: callers that chose another
// lead, callers that have met no contention, and redsync. When the lead changes, waiters keep their
// order, because each waiter tells the new lead how long it has waited.
//
// Other designs were worse. Without a queue, a release woke all waiters, which cost 100 to 180
// commands for each hold with 64 Clients. Queues on several nodes could disagree on the first
// waiter. A single channel for all waiters halved the rate of holds.
type contest struct {
	id string // part of the names of the channels that wake this driver's waiters
	m  *members
	hs *holds

	mu      sync.Mutex             // guards the fields below
	wanted  map[string]time.Time   // by key, until when the key counts as contended
	shunned map[string][]time.Time // by key and node, until when the node must not lead
}

// refused records that another caller had the key, or waits for it.
func (ct *contest) refused(key string) { ct.want(key, wantedFor) }

// want makes a key count as contended at least for the duration d.
func (ct *contest) want(key string, d time.Duration) {
	ct.mu.Lock()
	defer ct.mu.Unlock()
	if _, ok := ct.wanted[key]; !ok && len(ct.wanted) >= maxWanted {
		// Forget all keys, because a search for the oldest key would take time.
		clear(ct.wanted)
		clear(ct.shunned)
	}
	if until := time.Now().Add(d); until.After(ct.wanted[key]) {
		ct.wanted[key] = until
	}
}

// shun prevents node i from leading for the time shunFor. A node is shunned if its record blocks
// only callers that ask this node first; if it lacks the holder's record, so that the release wakes
// no waiter there; or if it cannot keep a queue.
func (ct *contest) shun(key string, i int) {
	ct.want(key, shunFor)
	ct.mu.Lock()
	defer ct.mu.Unlock()
	if ct.shunned[key] == nil {
		ct.shunned[key] = make([]time.Time, len(ct.m.nodes))
	}
	ct.shunned[key][i] = time.Now().Add(shunFor)
}

// leader returns the node that contended attempts at the key ask first, or noLead.
func (ct *contest) leader(key string) int {
	return ct.m.leader(func(i int) bool { return ct.mayLead(key, i) })
}

// mayLead reports whether node i is not shunned.
func (ct *contest) mayLead(key string, i int) bool {
	ct.mu.Lock()
	defer ct.mu.Unlock()
	shunned := ct.shunned[key]
	return shunned == nil || time.Now().After(shunned[i])
}

// rivalled reports whether another caller had the key, or waited for it, within the last second. It
// also returns true while a node is shunned.
func (ct *contest) rivalled(key string) bool {
	ct.mu.Lock()
	defer ct.mu.Unlock()
	until, ok := ct.wanted[key]
	if ok && !time.Now().Before(until) {
		delete(ct.wanted, key)
		delete(ct.shunned, key)
		ok = false
	}
	return ok
}

// attempt makes one attempt. The first attempt with c's token has number 0. If w is not nil, the
// attempt keeps its place in the queue. The result also has the lead's answer.
func (ct *contest) attempt(
	ctx context.Context, c backend.Claim, number, lead int, w *waiting,
) (backend.Grant, int32, error) {
	a := &attempt{
		m:      ct.m,
		hs:     ct.hs,
		c:      c,
		h:      newHold(c, number, lead, ct.m),
		ballot: newBallot(ct.m.names, true),
		lead:   lead,
		shun:   func(i int) { ct.shun(c.Key, i) },
		voted:  make(chan struct{}),
	}
	if w != nil {
		a.waiter = w.waiter
		a.since = w.began
	}
	g, err := a.run(ctx)
	return g, a.answer.Load(), err
}

// acquire takes c.Key if it is free on a quorum of the nodes. It asks all nodes at once, unless
// other callers wanted the key within the last second. In that case, it first asks only one node,
// the lead, which refuses even a free key if other callers wait for the key. It does not wait, but
// asks a few times if only the queue refused it, or if no caller seems to hold the key.
func (ct *contest) acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	// Rivals that ask the same node first do not split the votes.
	lead := noLead
	if ct.rivalled(c.Key) {
		lead = ct.leader(c.Key)
	}

	g, answer, err := ct.attempt(ctx, c, 0, lead, nil)
	number := 1
	for pause := minSleep; answer == behindFree && isHeld(err) && pause < leadTimeout; pause *= 2 {
		// Only the queue has refused the key, which is free on the lead. Ask again, because the
		// first waiter may be about to take the key, or may have held it and still be in the queue.
		doze(ctx, pause)
		g, answer, err = ct.attempt(ctx, c, number, lead, nil)
		number++
	}
	for round := 0; isHeld(err); round++ {
		ct.refused(c.Key)
		s := askClearly(ctx, ct.m, c)

		switch err := s.outage(ctx); {
		case err != nil && lead != noLead:
			return backend.Grant{}, err // only the lead has refused, not a quorum
		case s.holder != nil, !s.unheld(), round == maxRounds:
			return backend.Grant{}, s.heldError()
		case answer == behind:
			// Give up, because one of the callers that wait for the key receives it next.
			return backend.Grant{}, s.heldError()
		}

		// Ask again, because the records that blocked this attempt, such as a rival's votes, are
		// about to be released. If only the queue refused the attempt, the first waiter has not
		// taken the free key, so that waiter has probably died. If several rivals ask again at
		// once, one of them nearly always wins.
		g, _, err = ct.attempt(ctx, c, number, noLead, nil)
		number++
	}
	return g, err
}

// isHeld reports whether an attempt was refused.
func isHeld(err error) bool {
	_, held := err.(*backend.HeldError)
	return held
}
