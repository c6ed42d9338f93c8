package hasp

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Defaults of [Options], and the shortest term that may be requested.
const (
	DefaultTTL     = 30 * time.Second
	DefaultTimeout = 3 * time.Second
	MinTTL         = backend.MinTTL
)

// Options are the settings of a [Client]. Nil and the zero value mean the
// defaults.
type Options struct {
	// TTL is the term of a lease without WithTTL: how long the key stays locked
	// after its holder has died. The default is 30 s, the minimum is 100 ms.
	TTL time.Duration

	// Timeout bounds one call to the store. It is also how long Lock retries
	// during an outage, and how long Close waits for holders to unlock. The
	// default is 3 s.
	Timeout time.Duration

	// Prefix is prepended to every key on its way to the store.
	Prefix string

	// Owner is a label for people who inspect the store. The default is
	// host/pid/program.
	Owner string

	// Backoff returns how long to sleep after an attempt that found the key held, or
	// that failed. Attempts count from 1. The Client shortens each sleep by a random
	// part of up to a half, so that callers do not stay in step. A sleep ends earlier
	// if the holder's term ends, or in time for a last attempt before the wait ends.
	// During an outage it may be longer, but ends at most Timeout/8 after the outage has
	// lasted Timeout.
	//
	// An exclusive caller that shared leases keep from the key sleeps for 100 ms at most.
	// Otherwise new shared callers could overtake it.
	//
	// By default the sleeps follow how often the key changes hands: they grow while
	// attempts find the same hold, up to 75 ms, and shrink when one finds another.
	//
	// A driver that waits by itself is asked without sleeps. Then Backoff is called
	// only during an outage.
	Backoff func(attempt int) time.Duration

	// Observe is called with every event. EventRequested, EventAcquired, EventRefused
	// and EventReleased come on the goroutine that called Lock or Unlock, with the
	// context of that call. Leases.Unlock may call Observe on goroutines of its own.
	// EventAcquired comes while the key is held: a slow Observe makes other callers
	// wait, and may outlast a term that is not renewed.
	//
	// EventLost and EventRenewFailed come one at a time, on a goroutine of the Client.
	// Their context has the values of Lock's context. They delay no renewal and no end
	// of a lease. Close waits for them, up to Timeout; after that, EventLost may come
	// on any goroutine. EventRenewFailed is dropped if thousands of events wait for
	// Observe, or if Observe has not returned from EventAcquired of the same lease.
	//
	// The events of one lease come in order. If one caller of the Client unlocks and
	// the next one gets the key, Observe returns from the first one's EventReleased
	// before it gets the second one's EventAcquired. So a gauge of holds counts no key
	// twice. The next caller's Lock waits for that, but only for a third of its term,
	// at most for Timeout, and not after the end of its context. EventLost has no such
	// order.
	//
	// Observe must not call the Client. A panic in Observe is not recovered. LogEvents
	// returns an Observe that writes a log.
	Observe func(ctx context.Context, e Event)
}

// withDefaults returns a copy of o whose zero fields have the defaults. It returns an
// error if a field is out of range.
func (o *Options) withDefaults() (Options, error) {
	var v Options
	if o != nil {
		v = *o
	}

	if v.TTL == 0 {
		v.TTL = DefaultTTL
	}
	if v.Timeout == 0 {
		v.Timeout = DefaultTimeout
	}
	if err := checkTTL(v.TTL); err != nil {
		return v, err
	}
	if v.Timeout < 0 || v.Timeout > maxTTL {
		return v, fmt.Errorf("%w: timeout %v is out of range", ErrInvalid, v.Timeout)
	}

	if v.Owner == "" {
		v.Owner = defaultOwner()
	}
	return v, nil
}

// minSleep is the shortest sleep between two attempts, before it varies at random.
const minSleep = 100 * time.Microsecond

// jitter returns a duration between a half of d and d.
func jitter(d time.Duration) time.Duration {
	return d - rand.N(d/2+1)
}

// defaultOwner returns host/pid/program.
func defaultOwner() string {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	return fmt.Sprintf("%s/%d/%s", host, os.Getpid(), filepath.Base(os.Args[0]))
}

// Option changes one call of Lock, TryLock, LockAll, Do, DoAll or Lead.
type Option func(*request)

// request is the arguments of one call.
type request struct {
	op      string // "lock" or "trylock"
	id      uint64 // of its events; 0 without Observe
	name    string // the key as the caller gave it
	key     string // name, or the key of a slot
	around  *Lease // the innermost lease in the caller's context, or nil
	ttl     time.Duration
	maxWait time.Duration
	bounded bool          // maxWait was given
	maxHold time.Duration // 0 if there is none
	minHold time.Duration // 0 if there is none
	slots   int           // 0 without WithSlots
	slot    int           // which slot is asked for, from 1; 0 without WithSlots
	shared  bool          // WithShared
	noRenew bool
	apart   bool // WithoutReentry
	fenced  bool
	err     error // the error of the first invalid option
}

// refuse records an error, unless there is an earlier one.
func (r *request) refuse(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...)
	}
}

// maxTTL is about 36 years. A sum of a few such times does not overflow.
const maxTTL = time.Duration(1 << 60)

func checkTTL(ttl time.Duration) error {
	switch {
	case ttl < MinTTL:
		return fmt.Errorf("%w: ttl %v is below %v", ErrInvalid, ttl, MinTTL)
	case ttl > maxTTL:
		return fmt.Errorf("%w: ttl %v is above %v", ErrInvalid, ttl, maxTTL)
	}
	return nil
}

// checkLongest returns an error if the store grants no term of ttl.
func (c *Client) checkLongest(ttl time.Duration) error {
	if longest := c.traits.MaxTTL; longest > 0 && ttl > longest {
		return fmt.Errorf("%w: ttl %v is above %v, the longest term of this store", ErrInvalid, ttl, longest)
	}
	return nil
}

// termFor returns a term of which at least d is left after the drift is subtracted.
func termFor(d time.Duration) time.Duration {
	return max(d+d/99+3*time.Millisecond, MinTTL)
}

// WithTTL sets the term of the lease instead of Options.TTL. Less than 100 ms
// is ErrInvalid.
func WithTTL(ttl time.Duration) Option {
	return func(r *request) {
		// The first error is reported.
		if err := checkTTL(ttl); err != nil && r.err == nil {
			r.err = err
		}
		r.ttl = ttl
	}
}

// WithMaxWait bounds the wait, and only the wait. The deadline of Lock's context
// bounds the wait and the hold. Zero means one attempt, bounded by Options.Timeout.
// Negative is ErrInvalid.
//
// With a longer wait, an attempt may last longer than the rest of it: for four round trips,
// but at least 50 ms and at most Options.Timeout. So a healthy store answers even if
// the wait is shorter than a round trip.
func WithMaxWait(d time.Duration) Option {
	return func(r *request) {
		if d < 0 {
			r.refuse("max wait %v is negative", d)
		}
		r.maxWait, r.bounded = d, true
	}
}

// WithMaxHold bounds how long the lease lasts after the grant, in spite of renewals
// and Extend. Then the lease ends as lost. Zero or less is ErrInvalid.
func WithMaxHold(d time.Duration) Option {
	return func(r *request) {
		if d <= 0 {
			r.refuse("max hold %v is not positive", d)
		}
		r.maxHold = d
	}
}

// WithMinHold keeps the key taken for at least d after the grant, so that a short job
// runs once per tick although clocks differ. Unlock does not wait: the lease ends and
// EventReleased comes. If d is not over, the store keeps the key until then, also if
// the Client is closed or the process ends. Meanwhile others get ErrHeld. Its
// RetryAfter is the rest of d, and its Owner is the last holder. Break frees the key
// sooner.
//
// If the term is shorter than d, it becomes d. So a holder that dies keeps the key for
// its term, which may be longer than d. Under re-entry the latest end counts. Zero is
// no minimum. A d below zero, above WithMaxHold, or too long for the store, is
// ErrInvalid. Under re-entry, a d that ends after the outer lease's WithMaxHold is
// ErrInvalid too. So is one that ends after the outer lease's term, if that lease is
// WithoutRenewal. If the driver has no [backend.Traits].Keeps, the error is
// errors.ErrUnsupported, and the key is not locked.
func WithMinHold(d time.Duration) Option {
	return func(r *request) {
		if d < 0 {
			r.refuse("min hold %v is negative", d)
		}
		r.minHold = d
	}
}

// checkMinHold returns an error if r's min hold cannot be kept, and raises the term
// to it.
func (c *Client) checkMinHold(r *request) error {
	if r.minHold == 0 {
		return nil
	}
	if r.maxHold > 0 && r.minHold > r.maxHold {
		return fmt.Errorf("%w: min hold %v is above the max hold, %v", ErrInvalid, r.minHold, r.maxHold)
	}
	if !c.traits.Keeps {
		return fmt.Errorf("min hold: %w", errUnsupported)
	}

	// Above maxTTL, termFor might overflow.
	if r.minHold > maxTTL/2 {
		return fmt.Errorf("%w: min hold %v is above %v", ErrInvalid, r.minHold, maxTTL/2)
	}
	term := termFor(r.minHold)
	if err := c.checkLongest(term); err != nil {
		return fmt.Errorf("min hold %v: %w", r.minHold, err)
	}
	r.ttl = max(r.ttl, term)
	return nil
}

// WithoutRenewal switches renewal off for this lease. The lease ends with its term,
// unless Extend prolongs it. The option has no effect on a Lock that re-enters.
func WithoutRenewal() Option {
	return func(r *request) { r.noRenew = true }
}

// WithoutReentry makes the caller a stranger to leases in its context: it waits for the
// key even if its context derives from a lease that holds it. Use it when goroutines
// started under a lease must exclude one another. Do not wait for such a call while you
// hold the outer lease: it cannot get the key before you unlock. The end of the outer
// lease also ends the context of the new one. Give the call context.WithoutCancel(ctx)
// to avoid that.
func WithoutReentry() Option {
	return func(r *request) { r.apart = true }
}

// WithShared takes the key shared. Any number of shared leases may hold a key at once, but
// never beside an exclusive lease. If a Lock without WithShared waits, new shared callers
// wait behind it, also those of this Client. So it gets the key although shared callers
// keep coming. Each shared caller asks the store itself. Each shared lease is renewed, and
// may be lost, on its own.
//
// In the context of an exclusive lease of the key, a shared Lock re-enters that lease and
// is exclusive. In the context of a shared lease, it re-enters the shared one. There an
// exclusive Lock or TryLock is ErrInvalid at once: a shared lease cannot become an
// exclusive one, because two that tried would wait for each other.
//
// With WithFence, a shared lease also gets a fence. With redlock, two shared leases that
// begin at the same moment may get the same fence. A resource that checks the fences of
// readers and writers keeps two numbers. It refuses a write whose fence is smaller than the
// largest that it has seen, and a read whose fence is smaller than the largest that it has
// seen with a write.
//
// WithShared with WithMinHold or WithSlots is ErrInvalid. If the driver has no
// [backend.Traits].Shared, the error is errors.ErrUnsupported, and the key is not locked.
func WithShared() Option {
	return func(r *request) { r.shared = true }
}

// checkShared returns an error if r cannot be shared.
func (c *Client) checkShared(r *request) error {
	switch {
	case !r.shared:
		return nil
	case r.minHold > 0:
		return fmt.Errorf("%w: WithShared and WithMinHold: only an exclusive lease can keep the key", ErrInvalid)
	case r.slots > 0:
		return fmt.Errorf("%w: WithShared and WithSlots: a slot is exclusive", ErrInvalid)
	case !c.traits.Shared:
		return fmt.Errorf("WithShared: the driver has no shared holds: %w", errUnsupported)
	}
	return nil
}

// WithFence requests a fence. If the driver has no fences, the error is
// errors.ErrUnsupported, and the key is not locked.
func WithFence() Option {
	return func(r *request) { r.fenced = true }
}
