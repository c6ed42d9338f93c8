package hasp

import (
	"context"
	"errors"
	"time"

	"github.com/hasplock/hasp/backend"
)

// lastCall reports that a call begun now is the last one.
func (w *wait) lastCall(ctx context.Context) bool {
	return w.left(ctx) <= w.margin()
}

// margin is how long before the end of the wait the last call begins, so that
// its answer is still heard.
func (w *wait) margin() time.Duration {
	trip := w.c.roundTrip()
	return trip + max(trip/2, time.Millisecond)
}

// left is what remains of the wait's budget.
func (w *wait) left(ctx context.Context) time.Duration {
	left := time.Duration(never)
	if w.end != never {
		left = w.end.sub(w.c.clock.now())
	}
	if d, ok := ctx.Deadline(); ok {
		left = min(left, time.Until(d))
	}
	return left
}

// pause is how long to sleep before the next attempt: by the backoff, not
// past the end of the holder's term, and so that one more attempt fits before
// the wait ends.
func (w *wait) pause(ctx context.Context, attempt int, err error) time.Duration {
	d := w.c.opts.Backoff(attempt)
	var he *backend.HeldError
	switch {
	case !errors.Is(err, ErrHeld):
		d = max(d, jitter(min(5*time.Millisecond<<min(attempt, 6), w.c.opts.Timeout/8)))
	case errors.As(err, &he) && he.RetryAfter > 0:
		d = min(d, he.RetryAfter+minSleep)
	}
	return min(d, max(w.left(ctx)-w.margin(), 0))
}

// sleep reports whether it slept for d undisturbed.
func (w *wait) sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
	case <-w.c.closing.Done():
	}
	return false
}
