package hasp

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/hasplock/hasp/backend"
)

// A lease WithSlots(n) is an exclusive lease on one of n keys. It is no counter in the
// store: each slot has a term and a fence of its own, so a dead holder blocks only its own
// slot, and a resource can tell old holders from new ones.
//
// One caller at a time looks for a free slot: the holder of one more key, the queue. So
// callers get slots in the order of the strategy, and the store answers one looker
// instead of all waiters.

const (
	maxSlots = 100

	// The pause between two looks. A release by this Client ends it.
	firstLook = 5 * time.Millisecond
	lastLook  = 80 * time.Millisecond

	// queueTTL bounds the term of the queue: if the looker dies, the next one comes then.
	queueTTL = 5 * time.Second
)

// WithSlots lets up to n leases hold the key at once. Each has a slot, from 0 to n-1
// ([Lease.Slot]). Slot i is stored as the exclusive key KEY#i: Inspect or Break that
// key. Inspect of KEY itself says that it is free. All callers of a key must use the
// same n; while a deployment changes it, up to the larger n hold. The slot of a holder
// that died is free after its term. WithSlots(1) and a lock without WithSlots do not
// exclude each other.
//
// Lock first locks the key KEY#queue, in the order of the strategy. Only the caller
// that holds KEY#queue looks for a free slot. It asks for each slot in turn, and again
// at most 80 ms later, or as soon as a lease of this Client ends. So a Lock costs a
// lock and an unlock of KEY#queue, and one call for each slot that it tries. It makes
// no call for a slot that this Client knows to be held. TryLock does not queue. It
// looks at each slot once, so it makes up to n calls.
//
// A caller that holds a slot of KEY by its context re-enters that slot. Fences are per
// slot. n below 1 or above 100 is ErrInvalid.
func WithSlots(n int) Option {
	return func(r *request) {
		if n < 1 || n > maxSlots {
			r.refuse("%d slots: give 1 to %d", n, maxSlots)
		}
		r.slots = n
	}
}

// Slot returns which slot the lease holds, from 0 to n-1 for WithSlots(n). It returns 0
// for a lease without slots.
func (l *Lease) Slot() int { return max(l.slot-1, 0) }

// slotKey returns the key of slot i.
func slotKey(key string, i int) string { return key + "#" + strconv.Itoa(i) }

// takeSlot is take for a call with slots.
func (w *wait) takeSlot(ctx context.Context) (*Lease, error) {
	if l, err := w.reenterSlot(ctx); l != nil || err != nil {
		return l, err
	}
	if w.once {
		l, _, err := w.look(ctx)
		return l, err
	}

	// The store would say so as well, but only after the wait in the queue.
	if err := w.c.checkLongest(w.c.claim(&w.r, "-").TTL); err != nil {
		return nil, err
	}
	queue, err := w.queueForSlots(ctx)
	if err != nil {
		return nil, err
	}
	l, err := w.lookUntilFree(ctx)

	// The caller does not wait for this, because the store may hang. If it fails, the
	// Client repeats it.
	ctx = context.WithoutCancel(ctx)
	w.c.spawn(func() { _, _ = queue.unlock(ctx) })
	return l, err
}

// reenterSlot re-enters the slot that the caller's context holds. It returns nil, nil if
// there is none.
func (w *wait) reenterSlot(ctx context.Context) (*Lease, error) {
	if w.r.around == nil || w.r.apart {
		return nil, nil
	}
	for {
		// The innermost lease counts: with WithoutReentry, leases around it may hold other
		// slots. One of them may have had a larger n.
		var inner *Lease
		slot := 0
		for i := range maxSlots {
			if l := w.c.innermost(w.r.around, slotKey(w.r.name, i)); l != nil && (inner == nil || l.depth > inner.depth) {
				inner, slot = l, i
			}
		}
		if inner == nil {
			return nil, nil
		}

		r := w.slotRequest(slot)
		if l, err := w.c.reenter(ctx, &r); l != nil || err != nil {
			return l, err // otherwise the lease has just ended
		}
	}
}

// slotRequest returns the request for slot i.
func (w *wait) slotRequest(i int) request {
	r := w.r
	r.key, r.slot = slotKey(r.name, i), i+1
	return r
}

// part returns a wait for r that is a part of w.
func (w *wait) part(r request, once bool) *wait {
	p := &wait{c: w.c, r: r, start: w.c.clock.now(), end: w.end, once: once}
	p.began = w.c.clock.withoutSleep(p.start)
	return p
}

// queueForSlots waits until the caller is the one that looks for a slot.
func (w *wait) queueForSlots(ctx context.Context) (*Lease, error) {
	r := request{op: w.r.op, key: w.r.name + "#queue", name: w.r.name, ttl: min(w.c.opts.TTL, queueTTL)}
	if longest := w.c.traits.MaxTTL; longest > 0 {
		r.ttl = min(r.ttl, longest) // Options.TTL may be longer if every caller gives WithTTL
	}
	p := w.part(r, false)
	l, err := p.take(ctx)
	w.tries += p.tries
	return l, err
}

// lookUntilFree looks for a free slot until it has one, or the wait is over.
func (w *wait) lookUntilFree(ctx context.Context) (*Lease, error) {
	c := w.c
	freed := c.beginLooking(w.r.name)
	defer c.endLooking(w.r.name, freed)

	var last error     // why the caller has no slot: ErrHeld, or the last error of an outage
	var outage instant // when an outage began, by clock.awake; 0 if the store answers
	for pause := firstLook; ; pause = min(2*pause, lastLook) {
		asked := c.clock.awake()
		l, retry, err := w.look(ctx)
		switch {
		case err == nil:
			return l, nil
		case c.closing.Err() != nil:
			return nil, ErrClosed
		case ctx.Err() != nil && last != nil:
			return nil, withContextEnd(ctx, last)
		case ctx.Err() != nil:
			return nil, err
		case errors.Is(err, ErrHeld):
			outage = 0
		case definite(err), errors.Is(err, ErrClosed):
			return nil, err
		case outage == 0:
			outage = asked
		}
		last = err
		if outage != 0 && c.clock.awake().sub(outage) >= c.opts.Timeout || c.clock.now() >= w.end {
			return nil, err
		}

		d := min(jitter(pause), w.end.sub(c.clock.now()))
		if retry > 0 {
			d = min(d, retry+minSleep) // the key is free then, if its holder has died
		}
		w.pauseLooking(ctx, freed, d)
	}
}

// pauseLooking returns after d, or when a slot was freed, or when the wait is over.
func (w *wait) pauseLooking(ctx context.Context, freed <-chan struct{}, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-freed:
	case <-ctx.Done():
	case <-w.c.closing.Done():
	}
}

// look makes one attempt at each slot, until it gets one. If all are held, it returns the
// shortest time after which one of them is free if its holder has died, or 0 if the store
// does not say. The error is that of the same slot. One slot may fail to answer; if a second
// one does, look ends.
func (w *wait) look(ctx context.Context) (l *Lease, retry time.Duration, err error) {
	// Clients begin at different slots, so that they seldom ask for the same one.
	n, first := w.r.slots, rand.N(w.r.slots)
	var outage error  // of the first slot that did not answer
	answered := false // the store has refused a slot
	for j := range n {
		if j > 0 && w.end != never && w.c.clock.now().sub(w.end) >= w.answerTime() {
			break // the rest of the slots would take too long; see WithMaxWait
		}
		p := w.part(w.slotRequest((first+j)%n), true)
		l, answer := p.take(ctx)
		w.tries += p.tries
		switch {
		case errors.Is(answer, ErrHeld):
			answered = answered || p.tries > 0 // otherwise the Client knew it
		case answer == nil, definite(answer), errors.Is(answer, ErrClosed), ctx.Err() != nil, outage != nil:
			return l, 0, answer
		default:
			outage = answer // the other slots may be on servers that answer
			continue
		}

		var held *backend.HeldError
		if errors.As(answer, &held) && held.RetryAfter > 0 && (retry == 0 || held.RetryAfter < retry) {
			retry, err = held.RetryAfter, answer
		}
		if retry == 0 {
			err = answer
		}
	}
	if outage != nil && (w.once || !answered) {
		return nil, 0, outage
	}
	return nil, retry, err
}

// beginLooking returns a channel that receives when a slot of key may have become free.
func (c *Client) beginLooking(key string) chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lookers == nil {
		c.lookers = map[string]chan struct{}{}
	}
	freed := make(chan struct{}, 1)
	c.lookers[key] = freed
	return freed
}

func (c *Client) endLooking(key string, freed chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	// If the queue's lease was lost, another caller may look already.
	if c.lookers[key] == freed {
		delete(c.lookers, key)
	}
}

// slotFreedLocked wakes the caller that looks for a slot of the key of h.
func (c *Client) slotFreedLocked(h *hold) {
	if h.first.slot == 0 {
		return
	}
	select {
	case c.lookers[h.first.key] <- struct{}{}:
	default: // nobody looks, or a signal waits already
	}
}
