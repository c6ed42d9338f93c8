package pglock

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Bounds of the sleep between two attempts.
const (
	minSleep = time.Millisecond
	maxSleep = time.Second            // if a release wakes the waiter, or a transaction guards the key
	maxPoll  = 100 * time.Millisecond // if not
)

// waiting is one Wait.
type waiting struct {
	d    *Driver
	c    backend.Claim
	wake <-chan struct{} // see listener.add

	polls    int                // attempts in a row that no release could have woken
	held     *backend.HeldError // the database's last answer
	last     refusal            // of the last attempt
	intends  bool               // shared holds have refused c, so its mark may keep others out
	answered time.Duration      // how long the last answer took
}

// Wait makes an attempt when a release wakes it, when the holder's term ends, and once a
// second. An attempt of unknown outcome ends the wait: the engine then releases the token, and
// an attempt after that could take the key for nobody.
func (d *Driver) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	wake, remove := d.listener.add(c.Key)
	defer remove()
	w := &waiting{d: d, c: c, wake: wake}

	for ctx.Err() == nil {
		if err := w.enter(ctx); err != nil {
			return backend.Grant{}, err
		}
		g, err := w.attempt(ctx)
		if !errors.As(err, &w.held) || errors.Is(err, ctx.Err()) {
			return g, err
		}
		w.intends = w.intends || w.held.Shared && !c.Shared

		// The mark comes before the sleep. A release before the mark wakes nobody, but then
		// the key is not held any more, and the mark says so.
		again, err := w.mark(ctx)
		if err != nil {
			return backend.Grant{}, err
		}
		if !again {
			w.sleep(ctx)
		}
	}

	return backend.Grant{}, w.why(ctx)
}

// enter waits for a place among the attempts of the driver. While the server answers others,
// a long queue is no outage.
func (w *waiting) enter(ctx context.Context) error {
	for ctx.Err() == nil {
		began, answered := time.Now(), w.d.silence.last.Load()
		within, cancel := context.WithTimeout(ctx, w.c.Timeout)
		err := takeSlot(within, w.d.takes)
		cancel()
		switch {
		case err == nil:
			return nil
		case w.d.silence.last.Load() == answered:
			return w.failed(ctx, began, err)
		}
	}
	return w.why(ctx)
}

// attempt makes one attempt, and leaves the place that enter has got. If ctx ends the attempt,
// its error matches ctx's, because it may still take the key.
func (w *waiting) attempt(ctx context.Context) (backend.Grant, error) {
	defer func() { <-w.d.takes }()
	most := maxBlocked
	if w.last.blocked {
		most = stillBlocked
	}
	began := time.Now()
	within, cancel := context.WithTimeout(ctx, w.c.Timeout)
	defer cancel()

	g, last, err := w.d.take(within, w.c, most)
	if err == backend.ErrHeld {
		// Another caller has taken the key during the attempt. All those that a release has
		// woken get here but one. A look at the row spares each of them a mark.
		began = time.Now()
		g, last, err = w.d.take(within, w.c, most)
	}
	w.last = last
	switch {
	case err == nil:
		// Without this, the term would count from the beginning of the Wait.
		g.Until = began.Add(w.c.TTL - backend.Drift(w.c.TTL))
	case errors.Is(err, backend.ErrInvalid):
	case errors.Is(err, backend.ErrHeld):
		w.answered = time.Since(began)
		if !errors.As(err, new(*backend.HeldError)) {
			err = &backend.HeldError{} // the key changed hands during the attempt
		}
	default:
		err = w.failed(ctx, began, err)
	}
	return g, err
}

// failed returns the error of a call that began at began and had no answer.
func (w *waiting) failed(ctx context.Context, began time.Time, err error) error {
	switch {
	case ctx.Err() == nil:
	case w.held == nil:
		return ctx.Err()
	case time.Since(began) < w.c.Timeout/3:
		// With ctx's error the outcome is unknown, so the engine releases the token.
		return errors.Join(w.held, ctx.Err())
	}
	// If ctx has ended, the last answer is too old to say that the key is held now.
	return &backend.UnavailableError{Since: began, Err: err}
}

// mark has the next release wake the waits, and keeps out new shared holds if c waits for the
// end of others. Another attempt is due at once if the key is not held any more.
func (w *waiting) mark(ctx context.Context) (again bool, err error) {
	intends := w.held.Shared && !w.c.Shared
	if w.last.marked || w.last.blocked || !w.d.listener.hears() && !intends {
		return false, nil
	}

	began := time.Now()
	within, cancel := context.WithTimeout(ctx, w.c.Timeout)
	defer cancel()
	err = w.d.exec(within, w.d.sql.mark, []byte(w.c.Key), w.c.Token, w.c.Shared, lockWait(maxBlocked))
	switch {
	case err == nil:
		return false, nil
	case errors.Is(err, errNoRow):
		return true, nil
	case isLockTimeout(err) || isConflict(err):
		w.last.blocked = true // nothing wakes this wait, so it polls
		return false, nil
	}
	return false, w.failed(ctx, began, err)
}

// sleep returns when it is time for another attempt, or when ctx has ended.
func (w *waiting) sleep(ctx context.Context) {
	timer := time.NewTimer(w.pause(ctx))
	defer timer.Stop()
	select {
	case <-w.wake: // it keeps a message that came during the attempt
	case <-timer.C:
	case <-ctx.Done():
	}
}

// pause is how long to sleep if no release wakes the wait.
func (w *waiting) pause(ctx context.Context) time.Duration {
	// Without the random part, waits that began together would always attempt together.
	d := maxSleep - rand.N(maxSleep/8)
	switch {
	case w.last.blocked:
		// A guard that has lasted for some time may last for as long again.
		d = minSleep + rand.N(min(minSleep<<min(w.polls, 10), maxSleep))
		w.polls++
	case !w.d.listener.hears():
		d = minSleep + rand.N(min(minSleep<<min(w.polls, 10), maxPoll))
		w.polls++
	default:
		w.polls = 0
	}

	if left := w.held.RetryAfter; left > 0 {
		d = min(d, left+minSleep+rand.N(left/16+minSleep))
	}

	// Try once more just before the deadline, in case a message was lost. That attempt has
	// one and a half times as long as the last answer took.
	if end, ok := ctx.Deadline(); ok {
		if left := time.Until(end) - w.answered*3/2 - minSleep; left >= minSleep {
			d = min(d, left)
		}
	}
	return d
}

// why returns the error of a wait that ctx has ended between two calls.
func (w *waiting) why(ctx context.Context) error {
	switch {
	case w.held == nil:
		return ctx.Err()
	case w.intends:
		// With ctx's error the outcome is unknown, so the engine releases the token, and
		// Release removes the mark.
		return errors.Join(w.held, ctx.Err())
	}
	return w.held
}
