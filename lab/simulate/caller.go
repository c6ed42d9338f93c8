package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// client is one hasp.Client of a world.
type client struct {
	*hasp.Client
	w       *World
	name    string
	link    Link
	timeout time.Duration
	waits   bool // its callers wait in the driver, or the driver wakes them
	shares  bool // its driver has Traits.Shared
	long    bool // its callers may ask for long terms
}

type lockFunc func(ctx context.Context, key string, opts ...hasp.Option) (*hasp.Lease, error)

// noted wraps the function lock, so that the book records the calls of this function and their
// leases. Do and LockAll call Lock, so the book records their leases as well.
func (c *client) noted(lock lockFunc) lockFunc {
	return func(ctx context.Context, key string, opts ...hasp.Option) (*hasp.Lease, error) {
		defer c.w.called(c.name, key)()
		l, err := lock(ctx, key, opts...)
		if err == nil {
			c.w.noteLease(c.name, l)
		}
		return l, err
	}
}

func (c *client) Lock(ctx context.Context, key string, opts ...hasp.Option) (*hasp.Lease, error) {
	return c.noted(c.Client.Lock)(ctx, key, opts...)
}

func (c *client) TryLock(
	ctx context.Context, key string, opts ...hasp.Option,
) (*hasp.Lease, error) {
	return c.noted(c.Client.TryLock)(ctx, key, opts...)
}

// caller is a goroutine that uses a Client. The seed decides what it does.
type caller struct {
	*World
	c *client
	r *rand.Rand
}

func (a *caller) chance(of int) bool { return a.r.IntN(of) == 0 }

func (a *caller) upTo(d time.Duration) time.Duration { return time.Duration(a.r.Int64N(int64(d))) }

// term draws a term: the shortest term plus a random part of the time more.
func (a *caller) term(more time.Duration) time.Duration { return backend.MinTTL + a.upTo(more) }

func (a *caller) nap(d time.Duration) { time.Sleep(a.upTo(d)) }

func (a *caller) key() string { return Key(a.r.IntN(KeyCount)) }

// run carries out a random number of the acts of users.
func (a *caller) run() {
	acts := []func(){a.doAll, a.lead, a.program, a.withoutReentry, a.breakKey, a.program, a.robbed,
		a.slot, a.lead, a.doAll}
	for range 4 + a.r.IntN(10) {
		if i := a.r.IntN(17); i < len(acts) {
			acts[i]()
		} else {
			a.lock()
		}
		if a.chance(3) {
			a.nap(50 * time.Millisecond)
		}
	}
}

// bounds contains the context and the options of one call, and the time at which its wait ends.
type bounds struct {
	ctx    context.Context
	cancel context.CancelFunc
	opts   []hasp.Option
	end    time.Time // the end of the wait
	within bool      // WithMaxWait, and not ctx, ends the wait
	long   bool      // the term is long
	shared bool      // WithShared

	minHold time.Duration // the duration of WithMinHold, or 0
	grant   *grant        // the times of a call with a min hold; otherwise nil
}

const (
	late = 50 * time.Millisecond // a call returns within this time after the end of its context
	// a call returns within this time after the timeout of its command
	grace = 10 * time.Millisecond
)

// due returns the time by which a call must have returned.
func (a *caller) due(b bounds) time.Time {
	if b.within {
		// The last attempt may begin at the end of the wait, and takes at most a Timeout.
		return b.end.Add(a.c.timeout + grace)
	}
	return b.end.Add(late)
}

// bounds draws the context and the options of a call. Every call is bounded, so that a stuck caller
// is reported.
func (a *caller) bounds() bounds {
	b := bounds{}
	wait := 10*time.Millisecond + a.upTo(2*time.Second)
	switch a.r.IntN(4) {
	case 0: // a deadline
		b.ctx, b.cancel = context.WithTimeout(context.Background(), wait)
	case 1: // a cancellation
		b.ctx, b.cancel = context.WithCancel(context.Background())
		time.AfterFunc(wait, b.cancel)
	case 2: // WithMaxWait
		b.ctx, b.cancel = context.WithCancel(context.Background())
		b.opts = append(b.opts, hasp.WithMaxWait(wait))
		b.within = true
	default: // longer than any wait
		wait = time.Minute
		b.ctx, b.cancel = context.WithTimeout(context.Background(), wait)
	}

	b.end = time.Now().Add(wait)

	term := a.term(400 * time.Millisecond)
	often := 5
	if a.breaks {
		often = 2 // only a long term shows that a broken hold has left a record
	}
	if a.c.long && a.chance(often) {
		term = LongTerm
		b.long = true
		b.opts = append(b.opts, hasp.WithTTL(term))
	}

	for _, o := range []hasp.Option{
		hasp.WithFence(), hasp.WithoutRenewal(),
		hasp.WithTTL(term),
		hasp.WithMaxHold(time.Millisecond + a.upTo(500*time.Millisecond)),
		hasp.WithLinger(),
	} {
		if a.chance(5) {
			b.opts = append(b.opts, o)
		}
	}

	return b
}

const maxMinHold = 300 * time.Millisecond

// keepLonger adds a random min hold to a call, and a max hold that is not shorter.
func (a *caller) keepLonger(b *bounds) {
	b.minHold = 1 + a.upTo(maxMinHold)
	b.grant = new(grant)
	b.ctx = context.WithValue(b.ctx, grantKey{}, b.grant)
	b.opts = append(b.opts, hasp.WithMinHold(b.minHold),
		hasp.WithMaxHold(b.minHold+a.upTo(800*time.Millisecond)))
}

// share adds WithShared to some calls, if the driver has Traits.Shared.
func (a *caller) share(b *bounds) {
	if a.c.shares && a.chance(2) {
		b.shared = true
		b.opts = append(b.opts, hasp.WithShared())
	}
}

// try changes the bounds b to those of a call that makes only one attempt.
func (b *bounds) try(c *client) {
	if end := time.Now().Add(c.timeout); b.within || end.Before(b.end) {
		b.end = end
		b.within = false
	}
}

// start describes the moment at which a call began. If the field here is true, the call's Client
// had one of the keys at that moment or shortly before. If the field others is true, other callers
// of that Client were asking for one of the keys.
type start struct {
	at           time.Time
	here, others bool
}

func (a *caller) start(keys ...string) start {
	s := start{at: time.Now()}
	for _, k := range keys {
		here, asked := a.used(a.c.name, k, 2*a.c.timeout)
		s.here = s.here || here
		s.others = s.others || asked
	}
	return s
}

// got checks the result of a call that start describes, and reports whether the call has the key.
func (a *caller) got(what string, b bounds, start start, err error) bool {
	a.checkReturn(what, b, outcome{}, err)
	switch {
	case err == nil:
		return true
	case errors.Is(err, hasp.ErrInvalid), errors.Is(err, errors.ErrUnsupported),
		errors.Is(err, hasp.ErrLost), errors.Is(err, hasp.ErrReleased):
		a.errorf("%s by %s: %v", what, a.c.name, err)
	case errors.Is(err, hasp.ErrHeld) && !start.here:
		a.checkHeld(what, start, err)
	}

	a.checkOutage(what, err)
	return false
}

// checkOutage reports an error of no kind or of several kinds. An error must match exactly one of
// ErrHeld, ErrLost, ErrClosed and ErrUnavailable, or be only the end of the caller's context.
func (a *caller) checkOutage(what string, err error) {
	if what == "LockAll" {
		return // LockAll may join the errors of Unlocks
	}
	n := 0
	for _, kind := range []error{hasp.ErrHeld, hasp.ErrLost, hasp.ErrClosed, hasp.ErrUnavailable} {
		if errors.Is(err, kind) {
			n++
		}
	}

	over := errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
	if n > 1 || n == 0 && !over {
		a.errorf("%s by %s matches %d kinds of errors: %v", what, a.c.name, n, err)
	}
}

// checkHeld reports an ErrHeld of a call to which the store cannot have sent an answer.
func (a *caller) checkHeld(what string, start start, err error) {
	// If the Client itself has the key, it knows without the store that the key is held.
	var held *backend.HeldError
	if errors.As(err, &held) && held.Owner == a.c.name {
		return
	}
	// If the call ends too early for an answer, the Client may report that another
	// of its callers came first.
	d := time.Since(start.at)
	if start.others && d <= max(a.c.timeout/3, 100*time.Millisecond)+late {
		return
	}

	// The call may repeat an answer that another caller of the Client received up to a Timeout ago.
	// If that caller is in a driver's Wait, the answer may be older, because a Wait polls the
	// store, and ends only when the store has not answered for a Timeout.
	since := start.at
	if start.others {
		since = since.Add(-a.c.timeout - 2*late)
		if a.c.waits {
			since = since.Add(-poll - a.c.timeout)
		}
	}

	if a.unheard(a.c, since) {
		a.errorf("%s by %s, which the store did not answer for %v: %v", what, a.c.name, d,
			err)
	}
}
