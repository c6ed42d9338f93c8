package hasp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/calls"
	"github.com/hasplock/hasp/internal/clock"
)

// Handle is a hold without a lease: [Lease.Detach] returns it, and [Client.Resume] creates a lease
// from it, in this process or in another one. It can be encoded as JSON.
//
// A handle is a secret, because any program that has it can release the key. Pass it on in a file
// or through a pipe, and not in arguments or logs. Package fmt prints only its key, but prints the
// token too if the handle is an unexported field of a struct, whose methods fmt cannot call.
//
// The times of a handle are by the wall clock. If the clocks of two hosts differ, the min hold and
// the max hold end earlier or later by the difference.
type Handle struct {
	Key     string        `json:"key"`               // as it was given to Lock
	Token   string        `json:"token"`             // the proof of ownership
	Owner   string        `json:"owner,omitempty"`   // who took the key: Options.Owner
	TTL     time.Duration `json:"ttl_ns"`            // the lease's term, which Resume asks for
	Fence   uint64        `json:"fence,omitempty"`   // 0 without WithFence
	Shared  bool          `json:"shared,omitempty"`  // WithShared
	Slot    int           `json:"slot,omitempty"`    // number of the slot, from 1; or 0
	MinHold time.Time     `json:"min_hold,omitzero"` // when WithMinHold ends
	MaxHold time.Time     `json:"max_hold,omitzero"` // when WithMaxHold ends
	Until   time.Time     `json:"until"`             // about when the key is free without Resume
}

// Format prints the handle without its token, as LogValue does for package slog.
func (x Handle) Format(f fmt.State, _ rune) { fmt.Fprintf(f, "hasp.Handle(%q)", x.Key) }

// LogValue returns the text of Format.
func (x Handle) LogValue() slog.Value { return slog.StringValue(fmt.Sprint(x)) }

// Resume makes one call to the store, which renews the hold of a handle, and returns a lease on
// that hold. The lease is like one that Lock has returned for ctx: the Client renews it, and its
// Unlock releases the key. The Client must have the same strategy, store and prefix as the Client
// that has detached the lease.
//
// If the store does not have the hold, the error is ErrLost: the key was unlocked, the term has
// ended, or the handle is of another store. After ErrUnavailable, ErrClosed or an error of ctx, the
// hold is unchanged or renewed, and Resume may be called again.
//
// Only one caller may resume a handle. A second Resume on the same Client returns ErrInvalid, also
// after the loss of the first lease, because the Unlock of that lease would end the second one. If
// two Clients resume it, both receive a lease, because the store cannot distinguish them. When one
// of them unlocks, the other loses its lease at the next renewal.
//
// The lease has the term, the fence, the slot, the min hold and the max hold of the detached lease.
// Of the options, Resume takes only WithTTL, WithoutRenewal and WithMaxHold; others are ErrInvalid.
// A new max hold counts from now, and cannot end later than that of the detached lease.
func (c *Client) Resume(ctx context.Context, x Handle, opts ...Option) (*Lease, error) {
	if err := c.checkNil("resume", x.Key); err != nil {
		return nil, err
	}
	w := &wait{c: c, r: request{op: "resume", name: x.Key, ttl: x.TTL}, end: clock.Never}
	w.r.apply(opts)
	return w.observed(ctx, func(ctx context.Context) (*Lease, error) { return c.resume(ctx, w, x) })
}

// errNoHold is the Err of the LostError that Resume returns, and gives the text of that error.
var errNoHold = errors.New("this handle holds nothing, because the key was unlocked or broken, " +
	"its term has ended, or the handle is of another store, strategy or prefix: " +
	"lock the key again if you still need it")

// resume does what Resume does, as the call w.
func (c *Client) resume(ctx context.Context, w *wait, x Handle) (l *Lease, err error) {
	r := &w.r
	r.resumes(x, c.traits)
	if err := w.prepare(ctx); err != nil {
		return nil, err
	}
	if err := r.bound(x.MaxHold); err != nil {
		return nil, err
	}

	if err := c.enter(); err != nil {
		return nil, err
	}
	defer c.leave()
	if err := c.renewer.reserve(x.Token); err != nil {
		return nil, err
	}
	defer func() {
		if l == nil { // Resume fails or panics, and may be called again
			c.mu.Lock()
			defer c.mu.Unlock()
			delete(c.renewer.resumed, x.Token)
		}
	}()

	cl := r.claim(&c.opts, x.Token)
	cl.Owner = x.Owner
	w.tries = 1
	h, now, err := c.renewHandle(ctx, cl, x.Fence)
	if err != nil {
		return nil, err
	}

	// Bound the max hold again, because the call took time from it.
	if err := r.bound(x.MaxHold); err != nil {
		return nil, err
	}

	// The store may keep the hold for longer than the renewed term, because Detach may have asked
	// for a longer one.
	h.kept = max(h.kept, now.Add(time.Until(x.Until)))

	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing.Err() != nil {
		return nil, ErrClosed // Close did not find this hold, and the handle can still be resumed
	}

	// The hold has a line of its own, as a shared hold has, so the hold is never handed over.
	// Callers of this Client that want the key ask the store.
	ln := c.queue.Alone(r.key, r.shared)
	l = h.startLocked(ctx, r, ln, 0, false) // 0 and false, because nobody waited for the hold
	if left := time.Until(x.MinHold); left > 0 {
		h.keep = now.Add(left)
	}
	return l, nil
}

// renewHandle renews the hold of a handle, whose claim is cl, and returns it and the instant of the
// answer. If the outcome is unknown, it does not release the hold, because the handle can still
// resume it.
func (c *Client) renewHandle(ctx context.Context, cl backend.Claim, fence uint64) (
	*hold, clock.Instant, error) {
	start, slept := c.clock.Read()
	renew := func(ctx context.Context) (g backend.Grant, err error) {
		// This error remains if Renew returns without having called done. After Renew has returned,
		// the driver does not call done any more.
		err = calls.NoAnswer(c.opts.Timeout)
		done := func(_ int, got backend.Grant, e error) {
			g = got
			err = e
		}
		c.store.driver.Renew(ctx, []backend.Claim{cl}, done)
		return g, err
	}
	g, err := calls.Call(&c.store.caller, ctx, c.opts.Timeout, renew, nil)
	now, _ := c.clock.Read()

	switch {
	case errors.Is(err, ErrLost):
		return nil, 0, &LostError{LostRevoked, errNoHold}
	case err != nil:
		return nil, 0, err
	case now >= c.store.grantEnds(cl, g, start, slept):
		// Do not call newHold, which would release the token.
		return nil, 0, errLate
	}
	g.Fence = fence // a renewal need not repeat the fence
	h, err := newHold(&c.renewer, cl, g, start, now, slept)
	return h, now, err
}
