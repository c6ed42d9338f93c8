package pubsublock

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// Bounds of the sleep between two looks at a key.
const (
	minSleep = time.Millisecond
	maxSleep = time.Second            // though nothing is heard
	maxPoll  = 100 * time.Millisecond // where nothing can be heard
)

// waiting is one Wait.
type waiting struct {
	d    *Driver
	c    backend.Claim
	wake chan struct{} // has room for one

	ear    *redisstore.Listener // nil while there is none
	retry  time.Time            // not to try to listen before
	polls  int                  // in a row, without an ear
	held   *backend.HeldError   // the store's last answer
	silent time.Time            // since when it has not answered; zero if it has
	outage error                // how that was told
	trip   time.Duration        // that the last answer took
}

// Wait looks whenever a release is heard, when the holder's term ends, and once
// a second. An attempt of unknown outcome ends it, since it is taken back.
func (d *Driver) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	w := &waiting{d: d, c: c, wake: make(chan struct{}, 1)}
	defer w.close()
	for ctx.Err() == nil {
		w.listen(ctx) // before the look, so that no release falls between the two
		g, err := w.look(ctx)
		switch {
		case errors.As(err, &w.held):
			w.sleep(ctx)
		case err != errLeft:
			return g, err
		}
	}
	return backend.Grant{}, w.why(ctx)
}

// listen arms the signal, if it is not. Where it cannot be had the wait goes on
// without, and tries again from time to time.
func (w *waiting) listen(ctx context.Context) {
	if w.ear != nil || time.Now().Before(w.retry) {
		return
	}
	began := time.Now()
	within, cancel := context.WithTimeout(ctx, min(w.c.Timeout/3, maxSleep)) // the look is to have most of it
	defer cancel()
	ear, err := w.d.store.Listen(within, w.d.channelOf(w.c.Key), redisstore.LockKey(w.c.Key), w.heard)
	if err != nil {
		w.retry, w.silent, w.outage = time.Now().Add(maxSleep), began, err
		return
	}
	w.ear, w.polls = ear, 0
}

// heard is called for each message, and when some may have been missed.
func (w *waiting) heard(string, bool) {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *waiting) close() {
	if w.ear != nil {
		w.ear.Close()
	}
}

// look makes one attempt.
func (w *waiting) look(ctx context.Context) (backend.Grant, error) {
	began := time.Now()
	bound := w.c.Timeout
	if !w.silent.IsZero() {
		bound = max(bound-began.Sub(w.silent), bound/3)
	}
	g, err := w.d.attempt(ctx, w.c, bound)
	switch {
	case err == nil:
		g.Until = began.Add(w.c.TTL - backend.Drift(w.c.TTL))
	case err == errLeft:
	case definite(err):
		w.silent, w.trip = time.Time{}, time.Since(began)
	case w.silent.IsZero():
		err = redisstore.Outage(err, began)
	default:
		err = redisstore.Outage(err, w.silent)
	}
	return g, err
}

// sleep returns when it is time for another look, or when ctx has ended.
func (w *waiting) sleep(ctx context.Context) {
	timer := time.NewTimer(w.pause(ctx))
	defer timer.Stop()
	select {
	case <-w.wake:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// pause is how long to sleep if nothing is heard.
func (w *waiting) pause(ctx context.Context) time.Duration {
	d := maxSleep - rand.N(maxSleep/8)
	if w.ear == nil {
		d = minSleep + rand.N(min(minSleep<<min(w.polls, 10), maxPoll))
		w.polls++
	}
	if left := w.held.RetryAfter; left > 0 {
		d = min(d, left+minSleep+rand.N(left/16+minSleep)) // Redis frees a key after its last millisecond
	}
	// A last look, so that a release which was not told is not missed.
	if end, ok := ctx.Deadline(); ok {
		if left := time.Until(end) - w.trip*3/2 - minSleep; left >= minSleep {
			d = min(d, left)
		}
	}
	return d
}

// why is the error of a wait that ctx has ended.
func (w *waiting) why(ctx context.Context) error {
	switch {
	case w.held != nil:
		return w.held
	case w.outage != nil:
		return redisstore.Outage(w.outage, w.silent)
	}
	return ctx.Err()
}
