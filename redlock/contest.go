package redlock

import (
	"context"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

const (
	wantedFor = time.Second // how long a key counts as contended after a refusal
	maxWanted = 256         // how many contended keys are remembered
	maxRounds = 3           // how often acquire asks again for a key that may be free
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

	mu     sync.Mutex           // guards the field below
	wanted map[string]time.Time // by key, until when the key counts as contended
}

// refused notes that key is contended: another caller had it, or waits for it.
func (ct *contest) refused(key string) {
	ct.mu.Lock()
	defer ct.mu.Unlock()
	if len(ct.wanted) >= maxWanted {
		clear(ct.wanted) // forget all keys, because a search for the oldest key would take time
	}
	ct.wanted[key] = time.Now().Add(wantedFor)
}

// isContended reports whether another caller had the key, or waited for it, within the last second.
func (ct *contest) isContended(key string) bool {
	ct.mu.Lock()
	defer ct.mu.Unlock()
	return time.Now().Before(ct.wanted[key])
}

// attempt makes one attempt, which asks the node lead first, unless that is noLead. The first
// attempt with the token of c has number 0, so that each attempt has a record of its own. If w is
// not nil, the attempt keeps the place of w in the queue. attempt also returns the lead's answer
// about the queue.
func (ct *contest) attempt(
	ctx context.Context, c backend.Claim, number, lead int, w *waiting,
) (backend.Grant, int32, error) {
	a := &attempt{
		m:      ct.m,
		hs:     ct.hs,
		c:      c,
		h:      newHold(c, number, lead, ct.m),
		ballot: newBallot(ct.m.nodes, true),
		lead:   lead,
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
// the lead, which refuses even a free key if other callers wait for the key. acquire does not wait
// for a holder. But it asks a few times if only the queue has refused it, or if no caller seems to
// hold the key.
func (ct *contest) acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	// Ask the lead first if there are rivals. Rivals that ask the same node first do not split the
	// votes.
	lead := noLead
	if ct.isContended(c.Key) {
		lead = ct.m.leader()
	}

	g, answer, err := ct.attempt(ctx, c, 0, lead, nil)
	number := 1
	for ; answer == behindFree && isHeld(err) && number < 5; number++ { // at most four times
		// Only the queue has refused the key, which is free on the lead. Ask again, because the
		// first waiter may be about to take the key, or may have held it and still be in the queue.
		doze(ctx, minSleep<<number)
		g, answer, err = ct.attempt(ctx, c, number, lead, nil)
	}

	// The attempt was refused. Find out by which holder, or that there is none.
	for round := 0; isHeld(err); round++ {
		ct.refused(c.Key)
		s := askFor(ctx, ct.m, c, noLead)
		outage := s.outage(ctx)

		// Asking once more would say no more than this survey, unless the records change.
		isFinal := s.holder != nil || outage != nil || s.answers == len(ct.m.nodes)
		switch {
		case outage != nil && lead != noLead:
			// A refusal by the lead is not one by a quorum, which alone proves that the key is
			// held.
			return g, outage
		case s.unheld() && answer != behind && round < maxRounds:
			// Ask again, because the records that blocked this attempt, such as a rival's votes,
			// are about to be released. If only the queue refused the attempt, the first waiter has
			// not taken the free key, so that waiter has probably died. If several rivals ask again
			// at once, one of them nearly always wins.
			g, _, err = ct.attempt(ctx, c, number, noLead, nil)
			number++
		case isFinal, s.unheld(), round == maxRounds:
			// The attempt stays refused, by the holder if the survey has found one. Otherwise other
			// callers wait for the key, or the rounds are used up.
			return g, s.heldError()
		default:
			// Ask once more: a late node may be free, or a record may be about to be released.
			doze(ctx, min(minSleep<<round, leadTimeout))
		}
	}

	return g, err
}

// isHeld reports whether an attempt was refused.
func isHeld(err error) bool {
	_, held := err.(*backend.HeldError)
	return held
}
