package pubsublock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/pubsub"
)

// Bounds of the sleep between two attempts.
const (
	minSleep = time.Millisecond
	maxSleep = time.Second            // with a subscription, if no message comes
	maxPoll  = 100 * time.Millisecond // without a subscription
	minDelay = 200 * time.Microsecond // a shorter delay is not worth a timer
	oneDelay = 10 * time.Millisecond  // at most, for one turn of another Client
	maxDelay = 100 * time.Millisecond // for all of them
)

// grace is how long an attempt may take after its deadline to return its own
// error.
const grace = 10 * time.Millisecond

// waiting is one Wait.
type waiting struct {
	d    *Driver
	c    backend.Claim
	wake chan struct{} // receives when a release may have been published; has room for one

	subscription *pubsub.Listener   // nil while there is none
	retry        time.Time          // when to try to subscribe again
	polls        int                // attempts in a row without a subscription
	held         *backend.HeldError // the store's last answer
	silent       time.Time          // when the first call began that the store has not answered; zero if it has answered since
	outage       error              // the error of that call
	trip         time.Duration      // how long the last answer took
	woken        time.Time          // when the last message came, or the wait began
	ahead        int                // how many Clients have their turns first, as far as is known
	intends      bool               // readers have refused c, so it may have left an intent
}

// Wait makes an attempt when a release is published, when the holder's term
// ends, and once a second. An attempt of unknown outcome ends the wait, since
// the engine then releases the token.
func (d *Driver) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	now := time.Now()
	w := &waiting{d: d, c: c, wake: make(chan struct{}, 1), woken: now}
	if !c.Shared {
		w.ahead = d.crowds.ahead(c.Key, now) // readers get the key together, so they take no turns
	}
	defer w.close()

	for ctx.Err() == nil {
		// listen comes before the attempt, so that no release falls between them.
		if err := w.listen(ctx); err != nil {
			return backend.Grant{}, err
		}

		// Only a definite refusal lets the token be sent again. After an unknown outcome,
		// the late attempt could take the key after its Unlock.
		g, err := w.try(ctx)
		if !errors.As(err, &w.held) || errors.Is(err, ctx.Err()) {
			return g, err
		}
		w.intends = w.intends || w.held.Shared && !c.Shared
		w.sleep(ctx)
	}

	return backend.Grant{}, w.why(ctx)
}

// listen subscribes to the channel of the releases, unless it has already done so.
// If that fails, the wait continues without a subscription and retries from time
// to time. listen returns an error only if the driver is closed.
func (w *waiting) listen(ctx context.Context) error {
	if w.subscription != nil || time.Now().Before(w.retry) {
		return nil
	}

	began := time.Now()
	within, cancel := context.WithTimeout(ctx, min(w.c.Timeout/3, maxSleep)) // leaves most of the time for the attempt
	defer cancel()

	channel, _ := w.d.channelOf(within, w.c.Key)
	l, err := w.d.store.Listen(within, channel, redisstore.LockKey(w.c.Key), w.published)
	if errors.Is(err, redis.ErrClosed) {
		return err
	}
	if err != nil {
		// The outage begins here, unless the attempt that follows is answered.
		w.retry, w.silent, w.outage = time.Now().Add(maxSleep), began, err
		return nil
	}

	w.subscription, w.polls = l, 0
	return nil
}

// published is called for each message, and when messages may have been missed.
func (w *waiting) published(string, bool) {
	select {
	case w.wake <- struct{}{}:
	default: // the next attempt begins after this release as well
	}
}

func (w *waiting) close() {
	if w.subscription != nil {
		w.subscription.Close()
	}
}

// try makes one attempt. If ctx ends it, its error matches ctx's, because the
// attempt may still take the key.
func (w *waiting) try(ctx context.Context) (backend.Grant, error) {
	began := time.Now()
	bound := w.c.Timeout
	if !w.silent.IsZero() {
		// The subscription has failed. Timeout bounds the outage from there on, but the
		// attempt gets a third of it at least.
		bound = max(bound-began.Sub(w.silent), bound/3)
	}
	within, cancel := context.WithTimeout(ctx, bound)
	defer cancel()

	g, err := w.attempt(within)
	if end, ok := ctx.Deadline(); ok && err != nil && time.Until(end) <= 0 {
		// The connection has the deadline of ctx, and may notice it before the timer of ctx.
		select {
		case <-ctx.Done():
		case <-time.After(grace):
		}
	}

	switch {
	case err == nil:
		// Without this, the term would count from the beginning of the Wait.
		g.Until = began.Add(w.c.TTL - backend.Drift(w.c.TTL))
	case definite(err):
		// Any answer ends an outage, and counts even if ctx has ended meanwhile.
		w.silent, w.trip = time.Time{}, time.Since(began)
	case ctx.Err() != nil && w.held != nil && time.Since(w.since(began)) >= w.c.Timeout/3:
		// The store may hang, so its last answer says nothing about the present.
		err = &backend.UnavailableError{Since: w.since(began), Err: err}
	case ctx.Err() != nil && w.held != nil:
		// With ctx's error the outcome is unknown, so the engine releases the token.
		err = errors.Join(w.held, ctx.Err())
	case ctx.Err() != nil:
		err = w.why(ctx)
	default:
		err = &backend.UnavailableError{Since: w.since(began), Err: err}
	}

	return g, err
}

// since returns when the first call began that the store has not answered. The
// present call, which began at began, is one of them.
func (w *waiting) since(began time.Time) time.Time {
	if w.silent.IsZero() {
		return began
	}
	return w.silent
}

// outcome is the answer of one Acquire.
type outcome struct {
	g   backend.Grant
	err error
}

// attempt is Acquire, bounded by ctx. If the caller passed the client, a call may
// not return when ctx ends. Then attempt leaves the call behind.
func (w *waiting) attempt(ctx context.Context) (backend.Grant, error) {
	if w.d.store.Ends() == backend.EndsPromptly {
		return w.d.acquire(ctx, w.c, waitIntentTTL)
	}

	done := make(chan outcome, 1)
	go func() {
		g, err := w.d.acquire(ctx, w.c, waitIntentTTL)
		done <- outcome{g, err}
	}()

	// If both are ready, a grant may be left to the release at the end.
	select {
	case o := <-done:
		return o.g, o.err
	case <-ctx.Done():
	}

	// The client's own error says more than ours. It comes at once if the client
	// observes deadlines.
	if ctx.Err() == context.DeadlineExceeded {
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case o := <-done:
			return o.g, o.err
		case <-timer.C:
		}
	}
	go w.releaseLate(done)
	return backend.Grant{}, fmt.Errorf("%s: no answer: %w", w.d.store.Name(), os.ErrDeadlineExceeded)
}

// releaseLate releases a grant that comes after its attempt was left behind. The engine
// releases the token when it gets the error of the attempt, and again after a Timeout.
// A grant that arrives even later would outlive both releases.
func (w *waiting) releaseLate(done <-chan outcome) {
	if o := <-done; o.err == nil {
		within, cancel := context.WithTimeout(context.Background(), w.c.Timeout)
		defer cancel()
		_ = w.d.Release(within, w.c) // if this fails, the record expires
	}
}

// sleep returns when it is time for another attempt, or when ctx has ended.
func (w *waiting) sleep(ctx context.Context) {
	timer := time.NewTimer(w.pause(ctx))
	defer timer.Stop()

	// wake keeps a message that came during the attempt, so that no release is missed.
	for {
		select {
		case <-w.wake:
			d := w.delay(time.Now())
			if d < minDelay {
				return
			}
			// Another message meanwhile means that a Client with an earlier turn had the key.
			timer.Reset(min(d, w.pause(ctx)))
		case <-timer.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// delay returns how long to leave the key to other Clients after a message. Redis sends
// a message to its subscribers in the same order each time. If all attempted at once,
// one of them would take the key again and again. So the Client that has waited longest
// attempts at once. The others wait for oneDelay at most for each Client with an earlier
// turn. If such a Client has left, the key stays free meanwhile, so the delay also has
// bounds by the time since the last message, and in all.
func (w *waiting) delay(now time.Time) time.Duration {
	since := now.Sub(w.woken) // a turn of another Client
	w.woken, w.ahead = now, max(w.ahead-1, 0)
	return min(time.Duration(w.ahead)*min(since/8, oneDelay), since/2, maxDelay)
}

// pause is how long to sleep if no message comes.
func (w *waiting) pause(ctx context.Context) time.Duration {
	// Without the random part, waiters that began together would always attempt together.
	d := maxSleep - rand.N(maxSleep/8)
	if w.subscription == nil {
		d = minSleep + rand.N(min(minSleep<<min(w.polls, 10), maxPoll))
		w.polls++
	}

	if left := w.held.RetryAfter; left > 0 {
		d = min(d, left+minSleep+rand.N(left/16+minSleep)) // Redis frees a key after its last millisecond
	}

	// Try once more just before the deadline, in case a message was lost.
	// That attempt has one and a half times as long as the last answer took.
	if end, ok := ctx.Deadline(); ok {
		if left := time.Until(end) - w.trip*3/2 - minSleep; left >= minSleep {
			d = min(d, left)
		}
	}

	return d
}

// why returns the error of a wait that ctx has ended.
func (w *waiting) why(ctx context.Context) error {
	switch {
	case w.held != nil && w.intends:
		// With ctx's error the outcome is unknown, so the engine releases the token, and
		// Release removes the intent.
		return errors.Join(w.held, ctx.Err())
	case w.held != nil:
		return w.held
	case w.outage != nil:
		return &backend.UnavailableError{Since: w.silent, Err: w.outage}
	}
	return ctx.Err()
}

// definite reports whether err proves that the store changed nothing.
func definite(err error) bool {
	return errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrLost) || errors.Is(err, backend.ErrInvalid) || errors.Is(err, errors.ErrUnsupported)
}

// crowds is how many Clients waited for a key when this driver released it. The others
// have a turn before this driver's next one.
type crowds struct {
	mu    sync.Mutex // guards noted
	noted map[string]crowd
}

type crowd struct {
	clients int // connections that received the message of the release; one is taken for this driver's own
	at      time.Time
}

const (
	crowdFor  = 250 * time.Millisecond // a Wait that begins later after the release does not wait for its turn
	maxCrowds = 256                    // keys; if one is forgotten, one Client may come first more often
	maxAlone  = 2                      // connections that a message reaches if one Client waits: its own, and perhaps this Client's
)

func (c *crowds) note(key string, clients int) {
	c.mu.Lock()
	defer c.mu.Unlock()

	// Forget all keys at once: that needs no order among them, and each is soon noted
	// again.
	if c.noted == nil || len(c.noted) >= maxCrowds {
		c.noted = map[string]crowd{}
	}
	c.noted[key] = crowd{clients, time.Now()}
}

// ahead returns how many Clients have a turn before a Wait that begins now.
func (c *crowds) ahead(key string, now time.Time) int {
	c.mu.Lock()
	defer c.mu.Unlock()

	cr, ok := c.noted[key]
	delete(c.noted, key) // it counts for one Wait
	if !ok || now.Sub(cr.at) >= crowdFor {
		return 0
	}
	return cr.clients - 1
}
