package hasp

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/line"
)

// A lease WithSlots(n) is an exclusive lease on one of n keys, with a term and a fence of its own.
// So a dead holder blocks only its own slot, and a resource can tell old holders from new ones.
//
// There is one more key, the queue, and only its holder looks for a free slot. So callers get slots
// in the order of the strategy, and the store answers one caller instead of all waiters.

const (
	// With n slots, the pauses between two rounds of attempts grow from n·firstLook to
	// max(n·lastLook, slowLook). A release by this Client ends a pause.
	firstLook = time.Millisecond
	lastLook  = 10 * time.Millisecond
	slowLook  = 80 * time.Millisecond

	// queueTTL is the term of the queue. If the queue's holder dies, the next caller waits for at
	// most this time.
	queueTTL = 5 * time.Second
)

// takeSlot does what the method take does, for a call with slots.
func (w *wait) takeSlot(ctx context.Context) (*Lease, error) {
	if w.once {
		if w.c.looked(w.r.name) {
			return nil, line.ErrHeldHere // otherwise TryLocks in a loop could take each free slot before the caller that looks for one
		}
		w.end = w.start.Add(w.c.opts.Timeout - w.c.answerTime()) // look may take answerTime more, for all slots together
		l, _, err := w.look(ctx, rand.N(w.r.slots), w.end)
		return l, err
	}

	// Wait until the caller is the one that looks for a slot.
	r := request{op: w.r.op, key: w.r.name + "#queue", name: w.r.name, ttl: queueTTL}
	if longest := w.c.traits.MaxTTL; longest > 0 {
		r.ttl = min(r.ttl, longest)
	}
	queue, err := w.takePart(ctx, r, w.end, false)
	if err != nil {
		return nil, err
	}
	// Do not wait for this unlock, because the store may hang. If it fails, the reaper repeats it.
	defer w.c.spawn(func() { _, _ = queue.unlock(context.WithoutCancel(ctx)) })
	return w.lookUntilFree(ctx)
}

// takePart takes the key of the request r, as a part of the wait w. The part must end at the time
// end.
func (w *wait) takePart(ctx context.Context, r request, end clock.Instant, once bool) (*Lease, error) {
	start, slept := w.c.clock.Read()
	p := &wait{c: w.c, r: r, start: start, began: start - clock.Instant(slept), end: end, once: once}
	w.part = p
	l, err := p.take(ctx)
	w.tries += p.tries
	return l, err
}

// lookUntilFree looks for a free slot until it has one, or the wait has ended.
func (w *wait) lookUntilFree(ctx context.Context) (*Lease, error) {
	c, n := w.c, time.Duration(w.r.slots)
	first := rand.N(w.r.slots) // Clients begin at different slots, so that they seldom ask for the same one
	freed := make(chan int, 1)
	defer c.looks(w.r.name, freed, false)

	var last error           // why the caller has no slot: ErrHeld, or the last error of an outage
	var outage clock.Instant // the time of Clock.Awake at which an outage began; 0 if the store answers
	for pause := n * firstLook; ; pause = min(2*pause, max(n*lastLook, slowLook)) {
		asked := c.clock.Awake()
		end := w.end
		if outage != 0 {
			end = min(end, c.clock.Now().Add(c.opts.Timeout-time.Duration(asked-outage)))
		}
		l, retry, err := w.look(ctx, first, end)
		switch {
		case err == nil:
			return l, nil
		case c.closing.Err() != nil:
			return nil, ErrClosed
		case ctx.Err() != nil:
			return nil, withContextEnd(ctx, cmp.Or(last, err))
		case errors.Is(err, ErrHeld):
			outage = 0
		case backend.Definite(err), errors.Is(err, ErrClosed):
			return nil, err
		case outage == 0:
			outage = asked
		}
		last = err
		if outage != 0 && time.Duration(c.clock.Awake()-outage) >= c.opts.Timeout || c.clock.Now() >= w.end {
			return nil, err
		}

		d := min(line.Jitter(pause), time.Duration(w.end-c.clock.Now()))
		if retry > 0 {
			d = min(d, retry+line.MinSleep) // if the slot's holder has died, the slot is free after that time
		}
		c.looks(w.r.name, freed, true) // only after the first call of look, so that a Lock that gets a slot immediately does not make TryLocks fail
		first = w.pauseLooking(ctx, freed, d)
	}
}

// pauseLooking returns when the time d has passed, a slot was freed, or the wait has ended. It
// returns the slot to ask for first.
func (w *wait) pauseLooking(ctx context.Context, freed <-chan int, d time.Duration) int {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case i := <-freed:
		return i
	case <-timer.C:
	case <-ctx.Done():
	case <-w.c.closing.Done():
	}
	return rand.N(w.r.slots)
}

// look makes one attempt at each slot until it has one. The argument first is the number of the
// slot to begin with. If all slots are held, retry is the shortest rest of a holder's term, and err
// is the answer for that slot. If no rest is known, retry is 0. If there is no answer for one slot,
// look goes on. If there is no answer for a second slot, look ends. No attempt waits for an answer
// past the time end, and if one slot was not answered, the answers for the others must come soon.
func (w *wait) look(ctx context.Context, first int, end clock.Instant) (l *Lease, retry time.Duration, err error) {
	n := w.r.slots
	var outage error  // the error for the first slot without an answer
	answered := false // the store has refused a slot
	for j := range n {
		now := w.c.clock.Now()
		if j > 0 && w.end != clock.Never && time.Duration(now-w.end) >= w.c.answerTime() {
			break // the other slots would take too long; see WithMaxWait
		}
		i := (first + j) % n
		r := w.r
		r.key, r.slot = r.name+"#"+strconv.Itoa(i), i+1
		l, answer := w.takePart(ctx, r, end, true)
		switch {
		case errors.Is(answer, ErrHeld):
			answered = answered || w.part.tries > 0 // otherwise this Client knew, without a call, that the slot is held
		case answer == nil, backend.Definite(answer), errors.Is(answer, ErrClosed), ctx.Err() != nil:
			return l, 0, answer
		case outage != nil:
			return nil, 0, outage
		default:
			outage = answer // the other slots may be on servers that answer
			end = min(end, now.Add(w.c.opts.Timeout))
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

// lookers contains, for each key with slots, the channel of the caller that looks for a slot. The
// channel receives the numbers of slots that may have become free. The Client's mu guards it.
type lookers map[string]chan int

// freed tells the caller that looks for a slot of key, if there is one, that slot i may be free.
func (k lookers) freed(key string, i int) {
	select {
	case k[key] <- i:
	default: // no caller looks for a slot, or a slot is in the channel already
	}
}

// looks records that a caller begins to look for a slot of key or, if the argument on is false, has
// stopped. The channel freed receives the number of a slot that may have become free.
func (c *core) looks(key string, freed chan int, on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if on {
		c.lookers[key] = freed
	} else if c.lookers[key] == freed { // if the queue's lease was lost, another caller may look already
		delete(c.lookers, key)
	}
}

// looked reports whether a caller looks for a slot of key.
func (c *core) looked(key string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lookers[key] != nil
}
