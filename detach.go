package hasp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strconv"
	"time"
	"unicode/utf8"

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
	Owner   string        `json:"owner,omitempty"`   // Options.Owner of the Client that took the key
	TTL     time.Duration `json:"ttl_ns"`            // the term of the lease, which Resume asks for
	Fence   uint64        `json:"fence,omitempty"`   // 0 without WithFence
	Shared  bool          `json:"shared,omitempty"`  // WithShared
	Slot    int           `json:"slot,omitempty"`    // the number of the slot, from 1; 0 without WithSlots
	MinHold time.Time     `json:"min_hold,omitzero"` // when WithMinHold ends
	MaxHold time.Time     `json:"max_hold,omitzero"` // when WithMaxHold ends
	Until   time.Time     `json:"until"`             // about when the key becomes free if there is no Resume
}

// Format prints the handle without its token, as LogValue does for package slog.
func (x Handle) Format(f fmt.State, _ rune) { fmt.Fprintf(f, "hasp.Handle(%q)", x.Key) }

// LogValue returns the text of Format.
func (x Handle) LogValue() slog.Value { return slog.StringValue(fmt.Sprint(x)) }

// Detach ends the lease and leaves the key taken for [Client.Resume]. First it extends the lease,
// in one call to the store, so the key stays taken for at least ttl from now without renewals.
// After Detach, the lease counts as unlocked. Another process can resume the handle while this
// process runs, after the Client's Close, or after this process has ended. With memlock, only a
// Client on the same Store can resume it.
//
// After an error the lease goes on, perhaps with a longer term, and the caller must still unlock
// it. The errors are those of [Lease.Extend]. ErrInvalid can also mean that another lease shares
// the hold by re-entry, or that the key is not UTF-8, which JSON cannot contain.
func (l *Lease) Detach(ctx context.Context, ttl time.Duration) (Handle, error) {
	x, err := l.detach(ctx, ttl)
	if err != nil {
		return Handle{}, newError("detach", l.key, err)
	}

	returns := false
	defer func() {
		if !returns { // Observe has panicked, so the handle is lost, and no caller could free the key
			l.hold.renewer.reaper.add(l.hold.claim, reapOnce)
		}
	}()
	l.hold.renewer.observer.detached(ctx, l)
	returns = true
	return x, nil
}

func (l *Lease) detach(ctx context.Context, ttl time.Duration) (x Handle, err error) {
	r, h := l.hold.renewer, l.hold
	// Check first, so that a Detach that cannot succeed does not change the term.
	r.mu.Lock()
	err = l.detachableLocked()
	r.mu.Unlock()
	if err == nil {
		err = l.extend(ctx, ttl)
	}
	if err != nil {
		return x, err
	}

	r.mu.Lock()
	// During the call, another caller may have re-entered the key or unlocked the lease.
	if err = l.detachableLocked(); err != nil {
		r.mu.Unlock()
		return x, err
	}
	x = Handle{Key: l.key, Token: h.claim.Token, Owner: h.claim.Owner, TTL: h.claim.TTL, Fence: h.fence,
		Shared: h.claim.Shared, Slot: int(l.slot), Until: r.clock.Time(h.Deadline()).Round(0)}
	if h.keep != 0 {
		x.MinHold = r.clock.Time(h.keep).Round(0)
	}
	if end := min(h.limit, l.maxHold); end != clock.Never {
		x.MaxHold = r.clock.Time(end).Round(0)
	}

	// A renewal in flight cannot shorten the term, and its answer is ignored.
	l.state.Store(released)
	delete(r.resumed, x.Token)
	h.leases = nil
	r.unscheduleLocked(h)
	h.endedLocked()
	r.mu.Unlock()

	// Cancel the context without mu, because a cancel runs users' code.
	if lc := l.ctx.Load(); lc != nil {
		lc.cancel(ErrReleased)
	}
	return x, nil
}

// detachableLocked returns why l cannot be detached, or nil.
func (l *Lease) detachableLocked() error {
	switch {
	case l.state.Load() != held:
		return l.cause()
	case len(l.hold.leases) > 1:
		return fmt.Errorf("%w: another lease has re-entered the key; unlock the inner lease first", ErrInvalid)
	case !utf8.ValidString(l.key):
		return fmt.Errorf("%w: the key is not UTF-8, so a handle cannot contain it", ErrInvalid)
	}
	return nil
}

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
	w := &wait{c: c, r: request{op: "resume", name: x.Key, ttl: x.TTL}, end: clock.Never}
	w.r.apply(opts)
	return w.observed(ctx, func(ctx context.Context) (*Lease, error) { return w.resume(ctx, x) })
}

// errNoHold is the Err of the LostError that Resume returns, and gives the text of that error.
var errNoHold = errors.New("this handle holds nothing, because the key was unlocked or broken, its term has ended, or the handle is of another store, strategy or prefix: lock the key again if you still need it")

// resumed contains the tokens of handles that a Client has resumed, or resumes now. The value is the
// time of Clock.Awake from which on the store cannot have the token, or never while that is not
// known. A Detach, and an Unlock that has freed the key, remove the token.
type resumed map[string]clock.Instant

// reserve records that the Client resumes a token. The call comes before the call to the store, so
// that a second Resume cannot renew a hold whose first lease is being unlocked.
func (r *renewer) reserve(token string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.clock.Awake()
	maps.DeleteFunc(r.resumed, func(_ string, until clock.Instant) bool { return until < now })
	if r.resumed[token] != 0 {
		return fmt.Errorf("%w: this Client has resumed the handle already", ErrInvalid)
	}
	r.resumed[token] = clock.Never
	return nil
}

// unreserveLocked lets the token of h, which has ended, leave the map when the store cannot have it
// any more. Until then a release of the token may be in flight, and would end the hold of another
// Resume.
func (r *renewer) unreserveLocked(h *hold) {
	if r.resumed[h.claim.Token] != 0 {
		left := max(time.Duration(h.kept-r.clock.Now()), 0)
		r.resumed[h.claim.Token] = r.clock.Awake().Add(left + r.opts.Timeout)
	}
}

func (w *wait) resume(ctx context.Context, x Handle) (l *Lease, err error) {
	c, r := w.c, &w.r
	if err := w.prepareResume(ctx, x); err != nil {
		return nil, err
	}
	cl := backend.Claim{Key: c.opts.Prefix + r.key, Token: x.Token, Owner: x.Owner, TTL: r.ttl,
		Timeout: c.opts.Timeout, Fenced: r.fenced, Shared: r.shared, Renewed: !r.noRenew}
	if 0 < r.maxHold && r.maxHold < r.ttl {
		cl.TTL = min(r.ttl, termFor(r.maxHold))
	}

	if err := c.enter(); err != nil {
		return nil, err
	}
	defer c.leave()
	if err := c.renewer.reserve(x.Token); err != nil {
		return nil, err
	}
	defer func() {
		if l == nil {
			c.mu.Lock()
			defer c.mu.Unlock()
			delete(c.renewer.resumed, x.Token)
		}
	}()
	start, slept := c.clock.Read()
	w.tries = 1
	// If the outcome is unknown, do not release the hold, because the handle can still resume it.
	g, err := calls.Call(&c.store.caller, ctx, c.opts.Timeout, func(ctx context.Context) (g backend.Grant, err error) {
		err = calls.NoAnswer(c.opts.Timeout) // this error remains if Renew returns without a call of done; such a call cannot come later
		c.store.driver.Renew(ctx, []backend.Claim{cl}, func(_ int, got backend.Grant, e error) { g, err = got, e })
		return g, err
	}, nil)
	now, _ := c.clock.Read()
	until := start.Add(cl.TTL - backend.Drift(cl.TTL))
	if !g.Until.IsZero() {
		until = c.clock.At(g.Until, slept)
	}
	switch {
	case errors.Is(err, ErrLost):
		return nil, &LostError{LostRevoked, errNoHold}
	case err != nil:
		return nil, err
	case now >= until:
		return nil, errLate // do not call newHold, which would release the token
	}
	g.Fence = x.Fence
	h, err := newHold(&c.renewer, cl, g, start, now, slept)
	if err != nil {
		return nil, err
	}
	if err := r.bound(x.MaxHold); err != nil { // again, because the call took time from the max hold
		return nil, err
	}
	h.kept = max(h.kept, now.Add(time.Until(x.Until))) // Detach may have asked for a longer term

	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing.Err() != nil {
		return nil, ErrClosed // Close did not find this hold, and the handle can still be resumed
	}
	// The hold has a line of its own, as a shared hold has, so the hold is never handed over.
	// Callers of this Client that want the key ask the store.
	ln := c.queue.Alone(r.key, r.shared)
	l = h.startLocked(ctx, r, ln, 0, false)
	if left := time.Until(x.MinHold); left > 0 {
		h.keep = now.Add(left)
	}
	return l, nil
}

// prepareResume does what prepare does, for a call of Resume.
func (w *wait) prepareResume(ctx context.Context, x Handle) error {
	c, r := w.c, &w.r
	switch {
	case r.bounded || r.minHold > 0 || r.linger || r.slots > 0 || r.shared || r.fenced:
		r.refuse("Resume takes only WithTTL, WithoutRenewal and WithMaxHold; the handle has the other settings")
	case len(x.Token) != tokenLen || x.Slot < 0 || x.Slot > maxSlots: // a min hold has a token of another length
		r.refuse("this is not a handle of Detach")
	case r.err == nil:
		if r.err = checkTTL(r.ttl); r.err == nil {
			r.err = checkLongest(c.traits, r.ttl)
		}
	}
	r.shared, r.fenced, r.slot, r.key = x.Shared, x.Fence > 0, x.Slot, x.Key
	if x.Slot > 0 {
		r.key += "#" + strconv.Itoa(x.Slot-1)
	}
	if err := w.prepare(ctx); err != nil {
		return err
	}
	return r.bound(x.MaxHold)
}

// bound lets the max hold end at the given time at the latest, unless that time is zero.
func (r *request) bound(end time.Time) error {
	left := time.Until(end)
	switch {
	case end.IsZero():
	case left <= 0:
		return &LostError{Reason: LostMaxHold}
	case r.maxHold == 0 || left < r.maxHold:
		r.maxHold = left
	}
	return nil
}
