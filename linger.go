package hasp

import (
	"context"
	"time"

	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/line"
)

// passLocked keeps h, whose last lease was unlocked, for the next caller of this Client: a caller
// in line gets it, or the key lingers. It returns false if h must be released. The argument key is
// the key as the caller of that lease gave it.
func (h *hold) passLocked(key string) bool {
	return h.handOverLocked() || h.MayLinger && h.lingerLocked(key)
}

// handOverLocked gives h, whose last lease was unlocked, to the next caller in line. It returns
// false, and h must be released, if nobody waits, if h is not the hold of the line any more, if
// other Clients should get a turn, or if the next caller cannot use h. A hand-over needs no call to
// the store, because the store knows only the token of the hold, and has confirmed the hold a
// moment ago.
func (h *hold) handOverLocked() bool {
	ln := h.line
	next := ln.First()
	if next == nil {
		return false
	}
	now := h.renewer.clock.Now()
	t := next.Caller.(*turn)
	if !ln.Holds(&h.Hold) || ln.RowOver(now) || !h.suitsLocked(t.r, now) {
		return false
	}
	ln.Give(next, h.addLeaseLocked(t.ctx, t.r, now))
	return true
}

// suitsLocked reports whether a caller with the request r may get h: h is what r asks for, and the
// store has confirmed h a moment ago.
func (h *hold) suitsLocked(r *request, now clock.Instant) bool {
	switch {
	case !h.passableLocked():
		return false
	case r.ttl != h.claim.TTL || r.wantsOwnHold():
		return false
	case h.renewer.closing.Err() != nil:
		return false
	}

	// It does not matter when a hold that may linger was confirmed, because RowOver ends its row
	// when Fresh has passed since its grant.
	fresh := h.MayLinger || time.Duration(now-h.confirmed) < line.Fresh
	return fresh && now < h.Deadline()
}

// passableLocked reports whether a later caller may get h: h is renewed, was not extended or
// broken, and no caller has asked for a fence, a max hold or a min hold.
func (h *hold) passableLocked() bool {
	bounded := h.limit != clock.Never || h.keep != 0
	if h.unpassed || h.claim.Fenced || bounded {
		return false
	}
	return h.renewal == renews
}

// A key lingers if its last lease had WithLinger and was unlocked, and the Client keeps the hold
// for its own next caller. Then the hold has one lease that belongs to no caller: the ghost. The
// line counts it as a caller. The ghost is renewed and lost like any lease, but no event names it.
// The next caller replaces the ghost (reuseLocked). If no caller comes in time, or the next caller
// cannot use the hold, the hold ends, and the reaper releases its token (endLingerLocked).
//
// A key lingers until line.Fresh after the grant of the hold, not after the last Unlock. So other
// Clients wait for at most that time, however busy this Client is, and the gap after the row lets
// them in (endedLocked).

// lingerLocked lets the ghost keep the hold, whose last lease was unlocked. It returns false if the
// key must be released.
func (h *hold) lingerLocked(key string) bool {
	r := h.renewer
	alone := h.line.Holds(&h.Hold) && !h.line.Crowded()
	if !alone || r.closing.Err() != nil || !h.passableLocked() {
		return false
	}
	end := h.Granted.Add(line.Fresh)
	if r.clock.Now() >= end {
		return false
	}

	if h.ghost == nil {
		h.ghost = &Lease{
			hold:    h,
			key:     key,
			parent:  context.Background(),
			since:   h.Granted,
			maxHold: clock.Never,
		}
	}
	h.lingers = end
	h.Lingered = true
	h.leases = append(h.leases, h.ghost)
	h.joined++ // for batch.prepare
	r.scheduleLocked(h)
	return true
}

// reuseLocked gives the hold, which lingers, to a caller, and returns the caller's lease. If the
// caller cannot use the hold, or other Clients should get a turn, the result is nil.
func (h *hold) reuseLocked(ctx context.Context, r *request) *Lease {
	now, _ := h.renewer.clock.Read() // the machine may have slept since the last lease was unlocked
	if h.line.RowOver(now) || !h.suitsLocked(r, now) {
		return nil
	}
	h.lingers = 0
	h.leases = h.leases[:0] // the caller replaces the ghost
	return h.addLeaseLocked(ctx, r, now)
}

// endLingerLocked ends a hold that lingers. The reaper releases the token, because the reaper needs
// few goroutines for many keys. After the release, the reaper closes freed, unless freed is nil.
func (h *hold) endLingerLocked(freed chan struct{}) {
	h.ghost.state.Store(released)
	h.lingers = 0
	h.leases = nil
	h.renewer.unscheduleLocked(h)
	h.endedLocked()
	h.reapLocked(&reap{freed: freed})
}
