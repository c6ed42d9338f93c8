package hasp

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Lock waits until it holds key. Its errors are of type [*Error]. It returns ErrHeld if ctx or
// WithMaxWait ended the wait while another caller held the key. It returns ErrUnavailable if the
// store could not be reached for Options.Timeout, or until WithMaxWait ended the wait. It returns
// the context's error if ctx ended the wait before the store had answered. Its other errors are
// ErrClosed, ErrInvalid and errors.ErrUnsupported.
//
// The context bounds the wait and the hold: when it ends, the context of the lease ends as well,
// and the lease is renewed for at most one more term. The key stays locked until Unlock, or until
// the term ends. With [Do], the lease is renewed until the function returns.
//
// With a context derived from a lease's context, Lock re-enters: if that lease holds the same key
// on the same Client, Lock returns immediately with a lease on the same hold. Unlock the inner
// lease first, as defer does. If the outer lease is unlocked first, the inner lease's context ends,
// and the hold is renewed for at most one more term. A call with any other context waits for the
// key, even if its caller holds it.
func (c *Client) Lock(ctx context.Context, key string, opts ...Option) (*Lease, error) {
	return c.lock(ctx, "lock", key, opts)
}

// TryLock makes one attempt, bounded by ctx and Options.Timeout. If the store does not answer
// within a third of Timeout, TryLock repeats the attempt once. It returns ErrHeld if the key is
// held. If another caller of this Client holds the key or waits for it, TryLock usually returns
// without a call to the store. It ignores WithMaxWait.
func (c *Client) TryLock(ctx context.Context, key string, opts ...Option) (*Lease, error) {
	return c.lock(ctx, "trylock", key, opts)
}

// waitPool stores values of type wait for reuse. Nothing refers to one after its call has returned.
var waitPool = sync.Pool{New: func() any { return new(wait) }}

// lock does what Lock and TryLock do. The argument op is "lock" or "trylock".
func (c *Client) lock(ctx context.Context, op, key string, opts []Option) (*Lease, error) {
	if err := c.checkNil(op, key); err != nil {
		return nil, err
	}
	w := waitPool.Get().(*wait)
	defer func() {
		*w = wait{}
		waitPool.Put(w)
	}()

	w.c = c
	w.once = op == "trylock" // before the options, because Lead's option sets op
	w.r = request{op: op, name: key, key: key, ttl: c.opts.TTL}
	w.r.apply(opts)
	return w.observed(ctx, w.acquire)
}

// request is what one call asks for: its arguments and options.
type request struct {
	op      string          // "lock", "trylock" or "lead"
	id      uint64          // ID of its events; 0 without Observe
	name    string          // the key as the caller gave it
	key     string          // the key that is locked: name, or with slots the key of one slot
	around  *Lease          // the innermost lease in the caller's context, or nil
	parent  context.Context // LockAll's context, if LockAll makes the call; else nil
	ttl     time.Duration
	maxWait time.Duration
	bounded bool          // maxWait was given
	maxHold time.Duration // 0 if there is none
	minHold time.Duration // 0 if there is none
	linger  bool          // WithLinger
	slots   int           // number of slots; 0 without WithSlots
	slot    int           // number of the slot that is asked for, from 1; 0 without WithSlots
	shared  bool          // WithShared
	noRenew bool
	apart   bool // WithoutReentry
	fenced  bool
	err     error // the error of the first invalid option
}

func (r *request) apply(opts []Option) {
	for _, o := range opts {
		if o != nil {
			o(r)
		}
	}
}

// refuse records an error, unless there is an earlier one.
func (r *request) refuse(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...)
	}
}

// check returns an error if the request is invalid, or if the driver cannot carry it out.
func (r *request) check(t backend.Traits) error {
	switch {
	case r.name == "":
		r.refuse("empty key")
	case r.err != nil: // an option or the context was invalid
	case 0 < r.maxHold && r.maxHold < r.minHold:
		r.refuse("min hold %v is above max hold %v", r.minHold, r.maxHold)
	case r.fenced && !t.Fenced:
		r.err = fmt.Errorf("fence: %w", errors.ErrUnsupported)
	case r.minHold > 0 && !t.MinHold:
		r.err = fmt.Errorf("min hold: %w", errors.ErrUnsupported)
	case r.shared && r.minHold > 0:
		r.refuse("WithShared and WithMinHold: only an exclusive lease can keep the key")
	case r.shared && r.slots > 0:
		r.refuse("WithShared and WithSlots: a slot is exclusive")
	case r.shared && !t.Shared:
		r.err = fmt.Errorf("WithShared: the driver has no shared holds: %w", errors.ErrUnsupported)
	}
	return r.err
}

// resumes lets the request ask for the hold of the handle x. If x or an option is invalid, it
// records an error.
func (r *request) resumes(x Handle, t backend.Traits) {
	hasOthers := r.bounded || r.linger || r.shared || r.fenced || r.minHold > 0 || r.slots > 0
	switch {
	case hasOthers:
		r.refuse("Resume takes only WithTTL, WithoutRenewal and WithMaxHold; " +
			"the handle has the other settings")
	case len(x.Token) != tokenLen || x.Slot < 0 || x.Slot > maxSlots:
		// A token that keeps a key for a min hold has another length, and no handle may name it.
		r.refuse("this is not a handle of Detach")
	case r.err == nil:
		r.err = cmp.Or(checkTTL(r.ttl), checkLongest(t, r.ttl))
	}

	r.shared = x.Shared
	r.fenced = x.Fence > 0
	r.slot = x.Slot
	r.key = x.Key
	if x.Slot > 0 { // see WithSlots
		r.key += "#" + strconv.Itoa(x.Slot-1)
	}
}

// bound lets the max hold end at the given time at the latest, unless that time is zero. If the
// time has passed already, it returns a LostError.
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

// tokenLen is the length of a token: 128 random bits in URL-safe base64.
const tokenLen = 22

// newToken returns a new token.
func newToken() string {
	var b [16]byte
	var text [tokenLen]byte
	rand.Read(b[:])
	base64.RawURLEncoding.Encode(text[:], b[:])
	return string(text[:])
}

// wantsOwnHold reports whether the call cannot use a hold that another caller of the Client had.
func (r *request) wantsOwnHold() bool {
	if r.fenced || r.shared {
		return true
	}
	return r.noRenew || r.maxHold > 0
}

// claim returns the claim of a call to the store for the given token.
func (r *request) claim(o *Options, token string) backend.Claim {
	ttl := r.ttl
	if 0 < r.maxHold && r.maxHold < ttl {
		// Ask for little more than the max hold, so that the key of a holder that died is free soon
		// after the max hold.
		ttl = min(ttl, termFor(r.maxHold))
	}

	return backend.Claim{
		Key:     o.Prefix + r.key,
		Token:   token,
		Owner:   o.Owner,
		TTL:     ttl,
		Timeout: o.Timeout,
		Fenced:  r.fenced,
		Shared:  r.shared,
		Renewed: !r.noRenew,
	}
}

// errNoneAround says that no lease around the caller holds the key.
var errNoneAround = errors.New("no lease around the caller holds the key")

// reenter finds the innermost lease around the caller that holds the key, or a slot of the key if
// the call has slots. It adds a lease to the hold of that lease. A lease is around the caller if
// the caller's context derives from the lease's. If there is no such lease, the error is
// errNoneAround.
func (c *Client) reenter(ctx context.Context, r *request) (*Lease, error) {
	for o := r.around; o != nil; o = o.around {
		sameClient := o.hold.renewer == &c.renewer
		sameKey := o.key == r.name && (o.slot > 0) == (r.slots > 0)
		if !sameClient || !sameKey || o.Err() != nil {
			continue
		}
		if l, err := o.join(ctx, r); err != errNoneAround { // otherwise the lease has just ended
			return l, err
		}
	}
	return nil, errNoneAround
}
