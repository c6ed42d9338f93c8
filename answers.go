package hasp

import (
	"cmp"
	"errors"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/clock"
)

// answers is what the store has answered to the callers of a line.
type answers struct {
	// last says why the head, or the previous head, did not get the key: the store's ErrHeld, or an
	// outage. It is errHeldHere if the previous head had the key, and nil if nothing is known.
	last error

	// Both times below come from Clock.Awake.
	outage     clock.Instant // when the outage began; 0 if there is none
	unanswered clock.Instant // when the first attempt after the last answer or outage began; 0 if there was none
}

// answeredLocked records that a call failed with err: ErrHeld, or an outage, such as a broken
// connection or a timeout. The argument sent is the time of Clock.Awake at which the call began.
func (ln *line) answeredLocked(err error, sent clock.Instant) {
	ln.last, ln.unanswered = err, 0
	if !errors.Is(err, ErrHeld) {
		ln.outage = cmp.Or(ln.outage, sent)
		return
	}
	ln.outage = 0
	ln.q.contended.note(ln.key, ln.q.clock.Now())
}

// unansweredLocked records that a call got no answer, because its caller's context ended first. The
// argument sent is the time of Clock.Awake at which the call began.
func (ln *line) unansweredLocked(sent clock.Instant) {
	ln.unanswered = cmp.Or(ln.unanswered, sent)
	if ln.staleLocked(ln.last) {
		ln.last = nil
	}
}

// outageLocked returns how long the line's outage has lasted, or 0 if there is no outage. The time
// counts from the start of the outage, or from the caller's arrival if that is later. The argument
// since is the time of Clock.Awake at which the caller arrived.
func (ln *line) outageLocked(since clock.Instant) time.Duration {
	if ln.outage == 0 {
		return 0
	}
	return time.Duration(ln.q.clock.Awake() - max(ln.outage, since))
}

// staleLocked reports whether the error answer is an ErrHeld that is too old to report. An ErrHeld
// is too old if attempts have had no answer for a third of Timeout, because the store may hang.
func (ln *line) staleLocked(answer error) bool {
	return ln.unanswered != 0 && errors.Is(answer, ErrHeld) && time.Duration(ln.q.clock.Awake()-ln.unanswered) >= ln.q.opts.Timeout/3
}

// refusalLocked returns why a caller in line does not have the key. If this Client holds the key,
// the reason is a HeldError. Otherwise it is the store's last answer to the head, or nil if there
// is no answer or the answer is too old.
func (ln *line) refusalLocked() error {
	switch {
	case ln.hold != nil:
		left := time.Duration(clock.Instant(ln.hold.deadline.Load()) - ln.q.clock.Now())
		return &backend.HeldError{Owner: ln.q.opts.Owner, RetryAfter: max(left, 0), Here: true}
	case ln.staleLocked(ln.last):
		return nil
	}
	return ln.last
}
