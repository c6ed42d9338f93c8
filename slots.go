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

// slotSearch is the part of a call with slots that takes one of them.
type slotSearch struct {
	w      *wait
	n      int           // the number of slots
	freed  chan int      // receives the number of a slot that this Client has freed
	last   error         // why the caller has no slot: ErrHeld, or the last error of an outage
	outage clock.Instant // the time of Clock.Awake at which an outage began; 0 if the store answers
}

// take does what the method take of a wait does, for a call with slots. It returns a lease on one
// of the slots.
func (s *slotSearch) take(ctx context.Context) (*Lease, error) {
	w := s.w
	c := w.c
	if w.once {
		return s.takeAtOnce(ctx)
	}

	// Wait until the caller is the one that looks for a slot.
	r := request{op: w.r.op, key: w.r.name + "#queue", name: w.r.name, ttl: queueTTL}
	if longest := c.traits.MaxTTL; longest > 0 {
		r.ttl = min(r.ttl, longest)
	}
	queue, err := w.takePart(ctx, r, w.end, false)
	if err != nil {
		return nil, err
	}

	// Do not wait for this unlock, because the store may hang. If it fails, the reaper repeats it.
	defer c.spawn(func() { _, _ = queue.unlock(context.WithoutCancel(ctx)) })
	return s.lookUntilFree(ctx)
}

// takeAtOnce makes one attempt at each slot.
func (s *slotSearch) takeAtOnce(ctx context.Context) (*Lease, error) {
	w := s.w
	c := w.c
	c.mu.Lock()
	looked := c.lookers[w.r.name] != nil
	c.mu.Unlock()
	if looked {
		// Otherwise TryLocks in a loop could take each free slot before the caller that looks for
		// one.
		return nil, line.ErrHeldHere
	}

	// End an answerTime before Timeout, because the method look may go on for an answerTime after
	// the end, for all slots together.
	w.end = w.start.Add(c.opts.Timeout - c.answerTime())
	l, _, err := s.look(ctx, rand.N(s.n), w.end)
	return l, err
}

// lookUntilFree looks for a free slot until it has one, or the wait has ended.
func (s *slotSearch) lookUntilFree(ctx context.Context) (*Lease, error) {
	w := s.w
	c := w.c
	n := time.Duration(s.n)
	defer s.stopLooking()

	first := rand.N(s.n) // Clients begin at different slots, so they seldom ask for the same one
	for pause := n * firstLook; ; pause = min(2*pause, max(n*lastLook, slowLook)) {
		asked := c.clock.Awake()
		end := w.end
		if s.outage != 0 { // an outage ends the wait when it has lasted for Timeout
			left := c.opts.Timeout - time.Duration(asked-s.outage)
			end = min(end, c.clock.Now().Add(left))
		}
		l, retry, err := s.look(ctx, first, end)
		if err == nil {
			return l, nil
		}
		if over, why := s.note(ctx, err, asked); over {
			return nil, why
		}

		d := min(line.Jitter(pause), time.Duration(w.end-c.clock.Now()))
		if retry > 0 {
			// If the holder of a slot has died, the slot is free after the time retry.
			d = min(d, retry+line.MinSleep)
		}

		// Call this only now, after the first call of look, so that a Lock that gets a slot
		// immediately does not make TryLocks fail.
		s.beginLooking()
		first = s.pause(ctx, d)
	}
}

// note records the error err of a round of attempts, which began at the time asked of Clock.Awake.
// It reports whether the wait has ended, and with which error.
func (s *slotSearch) note(ctx context.Context, err error, asked clock.Instant) (bool, error) {
	c := s.w.c
	switch {
	case c.closing.Err() != nil:
		return true, ErrClosed
	case ctx.Err() != nil:
		return true, withContextEnd(ctx, cmp.Or(s.last, err))
	case errors.Is(err, ErrHeld):
		s.outage = 0 // the store answers
	case backend.Definite(err), errors.Is(err, ErrClosed):
		return true, err
	case s.outage == 0:
		s.outage = asked // an outage begins
	}
	s.last = err

	lasted := time.Duration(c.clock.Awake() - s.outage)
	if s.outage != 0 && lasted >= c.opts.Timeout {
		return true, err // the outage has lasted for Timeout
	}
	maxWaitOver := c.clock.Now() >= s.w.end
	return maxWaitOver, err
}

// pause returns when the time d has passed, a slot was freed, or the wait has ended. It returns the
// slot to ask for first: the freed one, or a random one.
func (s *slotSearch) pause(ctx context.Context, d time.Duration) int {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case i := <-s.freed:
		return i
	case <-timer.C:
	case <-ctx.Done():
	case <-s.w.c.closing.Done():
	}
	return rand.N(s.n)
}

// look makes one attempt at each slot until it has one. The argument first is the number of the
// slot to begin with. No attempt waits for an answer past the time end.
//
// If all slots are held, err matches ErrHeld. Then retry is the shortest rest of a holder's term,
// or 0 if no rest is known.
//
// If there is no answer for one slot, look goes on, because the other slots may be on servers that
// answer, but it goes on for at most Timeout. If there is no answer for a second slot, look ends
// with the error of the outage. If only one slot was not answered, and others are held, a Lock gets
// ErrHeld, and will ask again. But a TryLock gets the error of the outage, because that slot may be
// free.
func (s *slotSearch) look(ctx context.Context, first int, end clock.Instant) (
	l *Lease, retry time.Duration, err error) {
	w := s.w
	c := w.c
	var outage error  // the error for the one slot without an answer
	answered := false // the store has answered, with the refusal of a slot
	for j := range s.n {
		now := c.clock.Now()
		late := w.end != clock.Never && time.Duration(now-w.end) >= c.answerTime()
		if j > 0 && late {
			break // the other slots would take too long; see WithMaxWait
		}

		i := (first + j) % s.n
		r := w.r
		r.key = r.name + "#" + strconv.Itoa(i)
		r.slot = i + 1
		l, answer := w.takePart(ctx, r, end, true)

		switch {
		case errors.Is(answer, ErrHeld):
			// If there was no call, this Client knew that the slot is held, and the store need not
			// be able to answer.
			answered = answered || w.part.tries > 0
		case answer == nil, ctx.Err() != nil:
			return l, 0, answer
		case backend.Definite(answer), errors.Is(answer, ErrClosed):
			return l, 0, answer
		case outage != nil: // a second slot without an answer
			return nil, 0, outage
		default:
			outage = answer
			end = min(end, now.Add(c.opts.Timeout))
			continue
		}

		// The slot is held. Return the answer with the shortest rest, or the last answer if none
		// has a rest.
		left := restOf(answer)
		if retry == 0 || 0 < left && left < retry {
			retry = left
			err = answer
		}
	}

	if outage != nil && (w.once || !answered) { // otherwise a Lock asks again
		return nil, 0, outage
	}
	return nil, retry, err
}

// restOf returns the rest of the holder's term that the error of an attempt gives, or 0.
func restOf(err error) time.Duration {
	var held *backend.HeldError
	if !errors.As(err, &held) {
		return 0
	}
	return held.RetryAfter
}

// lookers contains, for each key with slots, the channel of the caller that looks for a slot, if
// there is such a caller. The channel has room for one number, and receives the numbers of slots
// that may have become free. The Client's mu guards the map.
type lookers map[string]chan int

// freed tells the caller that looks for a slot of key, if there is one, that slot i may be free.
func (k lookers) freed(key string, i int) {
	select {
	case k[key] <- i:
	default: // no caller looks for a slot, or a slot is in the channel already
	}
}

// beginLooking lets the search receive the numbers of slots that this Client frees, and makes
// TryLocks of this Client fail.
func (s *slotSearch) beginLooking() {
	c := s.w.c
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lookers[s.w.r.name] = s.freed
}

// stopLooking ends what beginLooking has begun.
func (s *slotSearch) stopLooking() {
	c := s.w.c
	key := s.w.r.name
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lookers[key] == s.freed { // if the queue's lease was lost, another caller may look already
		delete(c.lookers, key)
	}
}
