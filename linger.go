package hasp

import (
	"context"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

// A key lingers if its last lease had WithLinger and was unlocked, and the Client keeps the hold
// for its own next caller. Then the hold has one lease that belongs to no caller: the ghost. The
// line counts the ghost as a caller. The ghost is renewed and lost as any lease, but no event names
// it. The next caller takes its place (reuseLocked). If no caller comes in time, or the hold does
// not suit the next caller, the hold ends, and the reaper releases its token (endLingerLocked).
//
// The time of WithLinger counts from the grant of the hold, not from the last Unlock. So other
// Clients wait for that time at most, however busy this Client is, and the gap after the row lets
// them in (endedLocked).

// unrecalled is the longest linger of a key that other Clients cannot recall.
const unrecalled = 50 * time.Millisecond

// lingerFor returns how long the hold may linger after its grant for a caller with r.
func (h *hold) lingerFor(r *request) time.Duration {
	c := h.c
	switch _, recalls := c.store.driver.(backend.Recaller); {
	case c.traits.Reach == backend.Process, r.shared, r.slots > 0:
		return 0
	case !recalls:
		return min(r.linger, unrecalled)
	case h.line.recalled, h.line.sought, !strings.HasPrefix(h.claim.Token, backend.RecallMark):
		return min(r.linger, rowTime)
	}
	return r.linger
}

// lingerLocked makes the ghost keep the hold, whose last lease was unlocked. It returns false if
// the key must be released.
func (h *hold) lingerLocked(key string) bool {
	c, end := h.c, h.granted.add(h.linger)
	if h.line.hold != h || h.line.callers > 1 || c.closing.Err() != nil || !h.passableLocked() || c.clock.now() >= end {
		return false
	}
	if h.ghost == nil {
		h.ghost = &Lease{hold: h, key: key, parent: context.Background(), since: h.granted, maxHold: never}
	}
	h.lingers = end
	h.leases = append(h.leases, h.ghost)
	h.joined++
	c.renewer.scheduleLocked(h)
	return true
}

// reuseLocked gives the hold, which lingers, to a caller. If the hold does not suit the caller, it
// ends. Then the ticket says to wait for the release, and to join again.
func (h *hold) reuseLocked(t *turn) ticket {
	now, _ := h.c.clock.read() // the machine may have slept since the last lease was unlocked
	if h.line.rowOverLocked(now) || !h.suitsLocked(t.r, now) {
		freed := make(chan struct{})
		h.endLingerLocked(freed)
		return ticket{do: joinAgain, freed: freed}
	}
	h.lingers = 0
	h.leases = h.leases[:0]
	return ticket{do: haveLease, lease: h.addLeaseLocked(t.ctx, t.r, now)}
}

// endLingerLocked ends a hold that lingers. The reaper releases the token, so that many keys need
// few goroutines, and then closes freed, if that is not nil.
func (h *hold) endLingerLocked(freed chan struct{}) {
	h.ghost.state.Store(released)
	h.lingers, h.leases = 0, nil
	h.c.renewer.unscheduleLocked(h)
	h.line.endedLocked(h)
	h.c.reaper.addLocked(&reap{claim: h.claim, times: reapOnce, freed: freed}, max(h.kept.sub(h.c.clock.now()), 0))
}

// breaks ends the linger of a key that this Client breaks, because its next caller must not get the
// broken hold.
func (q *queue) breaks(key string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if ln := q.lines[key]; ln != nil && ln.hold != nil && ln.hold.lingers != 0 {
		ln.hold.endLingerLocked(nil)
	}
}

// recalls receives the messages by which callers of other Clients ask this Client for keys that may
// linger.
type recalls struct {
	*store
	queue *queue

	// All below is guarded by mu.
	id      string  // the ID to which other Clients send messages; empty until this Client receives them
	asked   bool    // Recalls is in flight or has succeeded
	askNext instant // when to call Recalls again, after it has failed
}

// mark returns the token of a claim whose hold may linger. The ID in its mark says which Client a
// refused caller asks for the key. If this Client does not receive messages yet, the token has no
// mark, and mark begins to receive them.
func (r *recalls) mark(token string) string {
	d, ok := r.driver.(backend.Recaller)
	if !ok {
		return token
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := r.clock.now(); !r.asked && now >= r.askNext {
		id := token[:8]
		r.asked, r.askNext = true, now.add(listenPoll)
		r.spawnLocked(func() {
			ctx, cancel := context.WithTimeout(context.Background(), r.opts.Timeout)
			defer cancel()
			err := d.Recalls(ctx, id, r.received)
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.asked = err == nil; r.asked {
				r.id = id
			}
		})
	}
	if r.id == "" {
		return token
	}
	return backend.RecallMark + r.id + backend.RecallMark + token
}

// received receives a message: a caller of another Client was refused key. If callers of this Client
// use the key in a busy loop, received may wait long for mu. So it leaves the key where the next
// Unlock of the loop finds it.
func (r *recalls) received(key string) {
	r.queue.recalled <- key // if there is a key, the call that left it handles it soon
	r.mu.Lock()
	defer r.mu.Unlock()
	r.queue.recallLocked()
}

// recallLocked handles a message, if one has come: the row of its key ends sooner. The message may
// come before the reply to the attempt that took the key.
func (q *queue) recallLocked() {
	var ln *line
	select {
	case key := <-q.recalled:
		ln = q.lines[strings.TrimPrefix(key, q.opts.Prefix)]
	default:
	}
	if ln == nil {
		return // no message has come, or it came after the end of the hold
	}
	ln.recalled = true
	if h := ln.hold; h != nil {
		h.linger = min(h.linger, rowTime)
		if h.lingers != 0 {
			h.lingers = min(h.lingers, h.granted.add(rowTime))
			h.c.renewer.scheduleLocked(h)
		}
	}
}
