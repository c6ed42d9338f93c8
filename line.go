package hasp

import (
	"container/list"
	"context"
	"errors"
	"time"

	"github.com/hasplock/hasp/backend"
)

// freshEnough bounds the time from the store's confirmation of a hold to its hand-over.
// It also bounds how long a row lasts.
const freshEnough = 50 * time.Millisecond

// line is the callers of one Client that want or hold one key. It exists while there
// are any, so a key that is not in use takes no memory. Client.mu guards all of it.
//
// At most one caller is at the head: it asks the store for the key, holds it, or
// releases it. The others wait in order of arrival.
//
// An Ordered driver queues the callers itself. Then all of them ask the store, and the
// line only counts them.
//
// A shared caller does not wait in the line of the key. It asks the store itself, and has a
// hold of its own. A Client that handed a shared hold from caller to caller might never let
// go of the key, and an exclusive caller of another Client would never get it. The code for
// lines serves shared callers as well: each has a line of its own, which no other caller
// joins.
type line struct {
	key     string
	callers int       // including the head
	waiting list.List // of *turn: the callers behind the head
	hasHead bool
	hold    *hold // the head's, until it is lost or released
	turns   int   // holds in a row while other callers of this Client waited

	// Why the head does not have the key, or the last head did not have it: the store's
	// ErrHeld, or an outage. It is errHeldHere if the last head had the key, and nil if
	// nothing is known.
	lastAnswer error

	// By clock.awake, and 0 if the store has answered since.
	outage     instant // when the outage began
	unanswered instant // when the first attempt began of which neither an answer nor an outage is known

	sought bool // the head's hold came after a refusal, so others may want the key

	pace    pace    // how the key is shared with other Clients
	gapEnds instant // when the last gap ends or has ended
}

// turn is one caller that waits in the line.
type turn struct {
	r     *request
	ctx   context.Context // Lock's
	since instant         // when the caller came, by clock.awake
	ready chan ticket     // receives at most one ticket; has room for it
	place *list.Element   // in the line; nil if it is not there
}

// first returns the first caller behind the head, or nil.
func (ln *line) first() *turn {
	if e := ln.waiting.Front(); e != nil {
		return e.Value.(*turn)
	}
	return nil
}

// remove takes t out of the line, and returns it.
func (ln *line) remove(t *turn) *turn {
	ln.waiting.Remove(t.place)
	t.place = nil
	return t
}

// ticket ends a caller's wait behind the head. It has a lease that was handed over, or
// an error. If it has neither, the caller is now the head.
type ticket struct {
	lease *Lease
	err   error

	// For a new head.
	lastAnswer error         // of the line; errHeldHere if the head before held the key
	after      time.Duration // how long to leave the key to other Clients first
}

// errHeldHere says that another caller of this Client has the key, had it until a moment
// ago, or came first.
var errHeldHere error = &backend.HeldError{}

// waitInLineLocked waits behind the head, and returns as joinLine does. It unlocks mu.
func (w *wait) waitInLineLocked(ctx context.Context) (*Lease, error) {
	c, ln := w.c, w.line
	w.stood = true
	w.turn = turn{r: &w.r, ctx: ctx, since: w.began, ready: make(chan ticket, 1)}
	t := &w.turn
	t.place = ln.waiting.PushBack(t)
	c.mu.Unlock()

	var timeout <-chan time.Time
	if w.end != never {
		timer := time.NewTimer(w.end.sub(c.clock.now()))
		defer timer.Stop()
		timeout = timer.C
	}

	select {
	case tk := <-t.ready:
		return w.takeTicket(ctx, tk)
	case <-ctx.Done():
	case <-timeout:
	case <-c.closing.Done():
		w.quitLine(ctx)
		return nil, ErrClosed
	}

	refusal := w.quitLine(ctx)
	waited := c.clock.now().sub(w.start)
	if refusal == nil && waited < w.c.answerTime() {
		// The store had no time to answer. Only this is known: other callers of this
		// Client came first.
		refusal = errHeldHere
	}

	// This is not under mu: ctx may be the context of a lease, and then it locks mu.
	if err := withContextEnd(ctx, refusal); err != nil {
		return nil, err
	}
	return nil, noAnswer(waited)
}

// quitLine takes the caller out of the line, and returns why the caller does not have
// the key.
func (w *wait) quitLine(ctx context.Context) (refusal error) {
	c, ln, t := w.c, w.line, &w.turn
	c.mu.Lock()
	refusal = c.refusalLocked(ln)
	var handed *Lease
	if t.place != nil {
		ln.remove(t)
	} else {
		// The caller got a ticket at the same moment. Its lease must be unlocked, or the
		// head must pass to the next caller.
		tk := <-t.ready
		handed = tk.lease
		if tk.lease == nil && tk.err == nil {
			c.promoteNextLocked(ln)
		}
	}
	if handed == nil {
		c.leaveLocked(ln)
	}
	w.line = nil
	c.mu.Unlock()

	if handed != nil {
		// Lock returns an error, so no event may name this lease.
		c.spawn(func() { handed.unlock(ctx) })
	}
	return refusal
}

// takeTicket takes the ticket that ended the caller's wait behind the head. It returns
// what waitInLineLocked returns.
func (w *wait) takeTicket(ctx context.Context, tk ticket) (*Lease, error) {
	w.turn.ready = nil
	switch {
	case tk.lease != nil:
		w.line = nil // it counts the hold
	case tk.err != nil:
		w.c.mu.Lock()
		defer w.c.mu.Unlock()
		w.leaveLocked()
	default:
		// The caller is the head now, and knows what the head before knew.
		w.lastAnswer = tk.lastAnswer
		w.refused = false
		if d := min(tk.after, w.untilLastCall(ctx)); d > 0 {
			w.sleep(ctx, d)
		}
	}
	return tk.lease, tk.err
}

// promoteNextLocked makes the next caller in line the head.
func (c *Client) promoteNextLocked(ln *line) {
	if ln.hold != nil {
		ln.lastAnswer = errHeldHere
		if ln.hold.failed > 0 {
			ln.lastAnswer = nil // the store did not answer the last call for the hold, and may hang
		}
	}
	now := c.clock.now()
	if ln.hold != nil {
		ln.pace.ended = now
	}
	ln.hasHead, ln.hold = false, nil
	next := ln.first()
	if next == nil {
		ln.turns, ln.pace.began = 0, 0
		return
	}

	// The caller learns by the ticket that it is the head. It may leave at the same
	// moment: quitLine then finds the ticket.
	ln.remove(next)
	ln.hasHead = true
	t := ticket{lastAnswer: ln.lastAnswer}
	if c.rowOverLocked(ln, now) {
		// Without a gap other Clients would rarely find the key free.
		ln.gapEnds = c.endRowLocked(ln, now, true)
	}
	// The head before may have left during a gap. Then the next one waits for the rest of it.
	t.after = max(ln.gapEnds.sub(now), 0)
	next.ready <- t
}

// handOverLocked gives h, whose last lease was unlocked, to the next caller in line. It
// returns false if that caller cannot have h, or if h has left its line. In both cases h
// must be released. A hand-over takes no call to the store, which knows only the token of
// the hold and has confirmed it a moment ago.
func (c *Client) handOverLocked(h *hold) bool {
	ln := h.line
	now := c.clock.now()
	if ln.hold != h || c.rowOverLocked(ln, now) || h.extended || !h.renew ||
		h.claim.Fenced || h.limit != never || h.keep != 0 || c.closing.Err() != nil {
		return false
	}

	// The next caller must want just this hold, and the store must have confirmed it a
	// moment ago.
	t := ln.first()
	next := t.r
	if now.sub(h.confirmed) >= freshEnough || now >= instant(h.deadline.Load()) ||
		next.ttl != h.claim.TTL || next.noRenew || next.fenced || next.maxHold > 0 {
		return false
	}

	ln.remove(t)
	ln.turns++
	c.leaveLocked(ln) // for the caller that unlocks; the line counts the next one already
	t.ready <- ticket{lease: h.addLeaseLocked(t.ctx, t.r, now)}
	return true
}

// giveUpHeadLocked promotes the next caller after the head has given up. During an
// outage it first ends the wait of each caller that has waited for a whole Timeout
// of the outage.
func (c *Client) giveUpHeadLocked(ln *line) {
	for t := ln.first(); t != nil && c.outageLocked(ln, t.since) >= c.opts.Timeout; t = ln.first() {
		ln.remove(t).ready <- ticket{err: ln.lastAnswer}
	}
	c.promoteNextLocked(ln)
}

// outageLocked returns for how long the outage of ln has lasted for a caller that came at
// since, by clock.awake. It is 0 if there is no outage.
func (c *Client) outageLocked(ln *line, since instant) time.Duration {
	if ln.outage == 0 {
		return 0
	}
	return c.clock.awake().sub(max(ln.outage, since))
}

// refusalLocked returns why a caller in line does not have the key. That is a
// HeldError if this Client holds the key, and otherwise the store's last answer to
// the head. It is nil if the store has not answered yet, or has not answered for too
// long: then the key may be free, or the store may hang.
func (c *Client) refusalLocked(ln *line) error {
	switch {
	case ln.hold != nil:
		left := instant(ln.hold.deadline.Load()).sub(c.clock.now())
		return &backend.HeldError{Owner: c.opts.Owner, RetryAfter: max(left, 0)}
	case c.staleLocked(ln, ln.lastAnswer):
		return nil
	}
	return ln.lastAnswer
}

// staleLocked reports whether an answer of the store is ErrHeld, and is too old to report:
// the store has answered no attempt since for a third of Timeout, so it may hang. A failure of
// the store is never too old.
func (c *Client) staleLocked(ln *line, answer error) bool {
	return ln.unanswered != 0 && errors.Is(answer, ErrHeld) && c.clock.awake().sub(ln.unanswered) >= c.opts.Timeout/3
}
