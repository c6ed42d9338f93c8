package hasp

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/hasplock/hasp/backend"
)

// freshEnough is how long after the store confirmed a hold it may be handed over.
const freshEnough = 50 * time.Millisecond

// line is the callers of one Client that want or hold one key. It exists while there
// are any, so a key that is not in use takes no memory. Client.mu guards all of it.
//
// At most one caller is at the head: it asks the store for the key, holds it, or
// releases it. The others wait in order of arrival. An Ordered driver queues the
// callers itself: all of them ask the store, and the line only counts them. If such
// a driver has Turns, the callers share the head's place in its queue.
type line struct {
	key     string
	callers int   // including the head
	waiting queue // the callers behind the head
	hasHead bool
	hold    *hold // the head's, while it is trusted
	turns   int   // holds in a row while other callers of this Client waited; with an Ordered driver, on one place

	// The store's last answer to a head: ErrHeld, or an outage; nil if there is none.
	lastAnswer error

	outage      bool // the store has answered no attempt since outageSince
	outageSince instant

	asking bool // the head's attempt, which began at asked, is in flight
	asked  instant

	silent  bool // the store has answered no attempt since silence; each ended with its caller's context
	silence instant

	pace pace // how the key is shared with other Clients
}

// turn is one caller's place in the line.
type turn struct {
	r     *request
	ctx   context.Context // Lock's
	since instant         // when the caller came
	ready chan ticket     // receives at most one ticket; has room for it

	queued     bool // in the queue
	prev, next *turn
}

// queue is turns in order of arrival. It is a linked list, because any of tens of
// thousands of callers may leave at any moment.
type queue struct{ first, last *turn }

func (q *queue) empty() bool { return q.first == nil }

func (q *queue) push(t *turn) {
	t.queued, t.prev = true, q.last
	if q.last == nil {
		q.first = t
	} else {
		q.last.next = t
	}
	q.last = t
}

func (q *queue) pop() *turn {
	t := q.first
	q.remove(t)
	return t
}

// remove takes t out of the queue. It returns false if t is not in it.
func (q *queue) remove(t *turn) bool {
	if !t.queued {
		return false
	}
	if t.prev == nil {
		q.first = t.next
	} else {
		t.prev.next = t.next
	}
	if t.next == nil {
		q.last = t.prev
	} else {
		t.next.prev = t.prev
	}
	t.queued, t.prev, t.next = false, nil, nil
	return true
}

// ticket ends a caller's time in the line. It has a lease that was handed over, or
// an error. If it has neither, the caller is now the head.
type ticket struct {
	lease *Lease
	err   error

	// For a new head.
	lastAnswer error          // of the line; errHeldHere if the head before held the key
	after      time.Duration  // how long to leave the key to other Clients first
	place      *backend.Claim // of the head before in the driver's queue, if that head gave up; else nil
}

// errHeldHere says that another caller of this Client has the key, or had it until a
// moment ago.
var errHeldHere error = &backend.HeldError{}

// minShrink is the size above which the Client shrinks its map of lines.
const minShrink = 4096

// maxSpare is how many lines are kept for reuse.
const maxSpare = 64

// enterLocked counts a caller in the line of key, and returns the line.
func (c *Client) enterLocked(key string) *line {
	ln := c.lines[key]
	if ln == nil {
		if n := len(c.spare); n > 0 {
			ln, c.spare = c.spare[n-1], c.spare[:n-1]
		} else {
			ln = new(line)
		}
		ln.key = key
		c.lines[key] = ln
		c.most = max(c.most, len(c.lines))
	}
	ln.callers++
	c.callers++
	return ln
}

// leaveLocked takes a caller out of the count. After the last one, the line may be
// reused for another key.
func (c *Client) leaveLocked(ln *line) {
	c.callers--
	c.notifyLocked()
	if ln.callers--; ln.callers > 0 {
		return
	}

	// No caller refers to the line any more.
	delete(c.lines, ln.key)
	if c.most > minShrink && len(c.lines) < c.most/16 {
		// A map keeps the memory of its largest size, and maps.Clone copies that memory
		// as well. So the remaining lines move to a new map.
		few := make(map[string]*line, len(c.lines))
		maps.Copy(few, c.lines)
		c.lines, c.most = few, len(few)
	}
	if len(c.spare) < maxSpare {
		*ln = line{}
		c.spare = append(c.spare, ln)
	}
}

// promoteNextLocked makes the next caller in line the head. Place is the place in the
// driver's queue that the old head leaves, or nil. The next caller gets the place if
// it wants just what the place was taken for. Otherwise the place is released.
func (c *Client) promoteNextLocked(ln *line, place *backend.Claim) {
	if ln.hold != nil {
		ln.lastAnswer = errHeldHere
	}
	ln.hasHead, ln.hold, ln.asking = false, nil, false
	if place != nil && !c.inheritsLocked(ln, place) {
		c.reapLocked(*place, reapOnce)
		place = nil
	}

	if ln.waiting.empty() {
		ln.turns = 0
		return
	}

	next := ln.waiting.pop()
	ln.hasHead = true
	t := ticket{lastAnswer: ln.lastAnswer, place: place}
	if now := c.clock.now(); !c.traits.Ordered && c.rowOverLocked(ln, now) {
		// Without a gap other Clients would rarely find the key free.
		ln.turns = 0
		t.after = c.gapLocked(ln, now)
	}
	next.ready <- t
}

// inheritsLocked reports whether the next caller in line wants just what place, in
// the driver's queue, was taken for.
func (c *Client) inheritsLocked(ln *line, place *backend.Claim) bool {
	if ln.waiting.empty() || c.closing.Err() != nil {
		return false
	}
	want := c.claim(ln.waiting.first.r, place.Token)
	want.Stays = true
	return want == *place
}

// giveUpHeadLocked promotes the next caller after the head has given up. During an
// outage it first ends the wait of each caller that has waited for a whole Timeout
// of the outage.
func (c *Client) giveUpHeadLocked(ln *line, place *backend.Claim) {
	if ln.outage {
		now := c.clock.now()
		for !ln.waiting.empty() && now.sub(max(ln.outageSince, ln.waiting.first.since)) >= c.opts.Timeout {
			ln.waiting.pop().ready <- ticket{err: ln.lastAnswer}
		}
	}
	c.promoteNextLocked(ln, place)
}

// refusalLocked returns why a caller in line does not have the key. That is a
// HeldError if this Client holds the key, and otherwise the store's last answer to
// the head. It is nil if the store has not answered yet: then the key may be free, or
// the store may hang.
func (c *Client) refusalLocked(ln *line) error {
	if ln.hold == nil {
		if ln.asking && errors.Is(ln.lastAnswer, ErrHeld) && c.clock.now().sub(ln.asked) >= c.opts.Timeout/3 {
			return nil // the store may hang, so its earlier answer is too old to report
		}
		return ln.lastAnswer
	}

	left := instant(ln.hold.deadline.Load()).sub(c.clock.now())
	return &backend.HeldError{Owner: c.opts.Owner, RetryAfter: max(left, 0)}
}
