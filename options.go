package hasp

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Defaults of [Options].
const (
	DefaultTTL     = 30 * time.Second
	DefaultTimeout = 3 * time.Second
)

// Options are the settings of a [Client]. Nil and the zero value mean the defaults.
type Options struct {
	// TTL is the term of a lease without WithTTL: how long the key stays locked after its holder
	// has died. The default is 30 s, the minimum is 100 ms. The store may round it up: see
	// [backend.Traits].
	TTL time.Duration

	// Timeout bounds one call to the store. It is also how long Lock retries during an outage, and
	// how long Close waits for holders to unlock. An attempt to lock takes at most a third of it,
	// so that Lock can make others. The default is 3 s, the minimum is 1 ms.
	Timeout time.Duration

	// Prefix is prepended to every key on its way to the store.
	Prefix string

	// Owner is a label for people who inspect the store. The default is host/pid/program.
	Owner string

	// Backoff returns how long to sleep after an attempt that found the key held, or that failed.
	// Attempts count from 1. The Client shortens the sleep by a random part, up to half of it, so
	// that callers do not stay in step. If the store wakes callers, Backoff is called only during
	// an outage, and while a caller cannot listen.
	//
	// If Backoff is nil, all Clients together make about eight attempts for each hold. The sleeps
	// are at most 375 ms, and at most 75 ms once a caller has waited unusually long.
	//
	// A sleep is cut short if the holder's term ends, or if only the time for a last attempt is
	// left. If shared leases hold the key, a sleep takes at most 100 ms, because otherwise new
	// shared callers could overtake the sleeping one. In an outage, a sleep ends when the outage
	// has lasted for 9/8 of Timeout.
	Backoff func(attempt int) time.Duration

	// Observe is called with every event, and must not call the Client. LogEvents returns an
	// Observe that writes a log.
	//
	// EventRequested, EventAcquired, EventRefused, EventReleased and EventDetached come on the
	// goroutine that made the call, with the context of that call. LockAll and Leases.Unlock call
	// Observe on goroutines of their own. If Observe panics there, the caller of LockAll or Unlock
	// panics as well. EventAcquired comes while the key is held, so a slow Observe makes others
	// wait, and may outlast a term without renewal. If Observe panics on EventAcquired, or ends the
	// goroutine, the key is unlocked, and no other event of that lease comes. A panic is not
	// recovered.
	//
	// The other events come one at a time, on a goroutine of the Client, with the values of Lock's
	// context. They delay neither renewals nor the end of a lease. Close waits for them, up to
	// Timeout; after that, EventLost may come on any goroutine. EventRenewFailed is dropped if
	// thousands of events wait, or if EventAcquired of the same lease has not returned.
	//
	// The events of one lease come in order, but EventRenewFailed and EventStillHeld may come late,
	// even after the lease's end. EventReleased waits for the store's answer, so the next caller's
	// EventAcquired may come first, and a gauge may count a key twice.
	Observe func(ctx context.Context, e Event)
}

// withDefaults returns a copy of o whose zero fields have the defaults. It returns an error if a
// field is out of range.
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
	if v.Timeout < time.Millisecond || v.Timeout > maxTTL {
		return v, fmt.Errorf("%w: timeout %v is out of range: give it a unit, as in 3*time.Second",
			ErrInvalid, v.Timeout)
	}

	if v.Owner == "" {
		v.Owner = defaultOwner()
	}
	return v, nil
}

func defaultOwner() string {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	return fmt.Sprintf("%s/%d/%s", host, os.Getpid(), filepath.Base(os.Args[0]))
}

// Option changes one call of Lock, TryLock, LockAll, Do, DoAll, Lead or Resume.
type Option func(*request)

// maxTTL is about 36 years. A sum of a few times of this length does not overflow.
const maxTTL = time.Duration(1 << 60)

// checkTTL returns an error if a term is too short or too long for every store.
func checkTTL(ttl time.Duration) error {
	switch {
	case ttl < backend.MinTTL:
		return fmt.Errorf("%w: ttl %v is below %v", ErrInvalid, ttl, backend.MinTTL)
	case ttl > maxTTL:
		return fmt.Errorf("%w: ttl %v is above %v", ErrInvalid, ttl, maxTTL)
	}
	return nil
}

// checkLongest returns an error if ttl is longer than the longest term that the store grants.
func checkLongest(t backend.Traits, ttl time.Duration) error {
	if longest := t.MaxTTL; longest > 0 && ttl > longest {
		return fmt.Errorf("%w: ttl %v is above %v, the longest term that this store grants",
			ErrInvalid, ttl, longest)
	}
	return nil
}

// WithTTL sets the term of the lease, instead of Options.TTL. A ttl below 100 ms is ErrInvalid.
func WithTTL(ttl time.Duration) Option {
	return func(r *request) {
		// Keep the first error.
		if err := checkTTL(ttl); err != nil && r.err == nil {
			r.err = err
		}
		r.ttl = ttl
	}
}

// WithMaxWait bounds the wait. Unlike a deadline of Lock's context, it does not bound the hold. A d
// of zero means one attempt, bounded by Options.Timeout. A negative d is ErrInvalid.
//
// If d is above zero, the last attempt may end after d has passed: it may take min(max(4 round
// trips, 50 ms), Options.Timeout). So a healthy store answers even if d is below a round trip.
func WithMaxWait(d time.Duration) Option {
	return func(r *request) {
		if d < 0 {
			r.refuse("max wait %v is negative", d)
		}
		r.maxWait = d
		r.bounded = true
	}
}

// WithMaxHold bounds how long the lease lasts after the grant, in spite of renewals and Extend.
// When d has passed, the lease is lost. A d of zero or less is ErrInvalid.
func WithMaxHold(d time.Duration) Option {
	return func(r *request) {
		if d <= 0 {
			r.refuse("max hold %v is not positive", d)
		}
		r.maxHold = d
	}
}

// WithMinHold keeps the key taken until d has passed since the grant, even if Unlock comes earlier.
// So a short job that several hosts start at one tick runs only once, although their clocks differ.
// Unlock does not wait: the lease ends, but the store keeps the key for the rest of d, even if the
// process ends. Meanwhile others get ErrHeld as a [HeldError] whose RetryAfter is the rest of d,
// and whose Owner is the last holder. Break frees the key earlier.
//
// The min hold has no effect until Unlock reaches the store. If the holder dies before Unlock, if
// the lease is lost, or if the store cannot be reached until the term ends, the key is free after
// the term. Then another process can do the job.
//
// If several leases share a hold by re-entry, the latest end of a min hold counts. Zero means no
// minimum. A d below zero, above 36 years or above the max hold is ErrInvalid. If the driver has no
// [backend.Traits].MinHold, the error is errors.ErrUnsupported, and the key is not locked.
func WithMinHold(d time.Duration) Option {
	return func(r *request) {
		if d < 0 || d > maxTTL {
			r.refuse("min hold %v is out of range", d)
		}
		r.minHold = d
	}
}

// WithLinger lets the Client keep the key after Unlock for its own next caller, until 50 ms have
// passed since the store's grant. Meanwhile, a Lock or TryLock of this Client for the same term
// gets the key without a call to the store. So a process that locks a key again and again is a
// hundred times as fast. The lease ends with Unlock all the same, and its events come as usual. The
// Client releases the key after the 50 ms, when its next caller cannot use the hold, and at a Break
// or Close. After the release, it leaves the key to other Clients for some milliseconds.
//
// So other Clients, and other programs that use the key, may wait longer for it, by up to 50 ms.
// The option has no argument, because a longer time would save few further calls, and would keep
// the key from others.
//
// While a key lingers, Inspect shows it as held, and TryLock of another process returns ErrHeld,
// although no caller works under it. So do not use WithLinger if another process calls TryLock when
// it notices your Unlock. If the process dies without Close, the key stays taken until its term
// ends. After a Break by another process, callers may get the broken hold until the 50 ms end.
//
// The option has no effect on a lease that is shared, fenced, extended or not renewed, or that has
// a min hold, a max hold or slots. It has no effect under re-entry, with LockAll, DoAll and Lead,
// and on a store in this process.
func WithLinger() Option {
	return func(r *request) { r.linger = true }
}

// WithoutRenewal switches renewal off for this lease. The lease ends with its term, unless Extend
// prolongs it. The option has no effect on a Lock that re-enters.
func WithoutRenewal() Option {
	return func(r *request) { r.noRenew = true }
}

// WithoutReentry makes the caller wait for the key even if its context derives from a lease that
// holds the key. So goroutines started under a lease exclude one another. The call cannot get the
// key before the outer lease is unlocked, so do not put that Unlock after the call. The end of the
// outer lease also ends the context of the new one, unless you pass context.WithoutCancel(ctx).
func WithoutReentry() Option {
	return func(r *request) { r.apart = true }
}

// WithShared takes the key shared. Any number of shared leases may hold a key at the same time, but
// never beside an exclusive lease. If a Lock without WithShared waits, new shared callers wait
// behind it, so that the Lock gets the key even if shared callers keep coming. Each shared caller
// asks the store itself. Each shared lease is renewed, and may be lost, on its own.
//
// A shared Lock re-enters the lease of the key in its context. If that lease is exclusive, the new
// one is exclusive as well. In the context of a shared lease, an exclusive Lock or TryLock
// immediately returns ErrInvalid. A shared lease cannot become exclusive, because two leases that
// tried would wait for each other.
//
// With WithFence, a shared lease also gets a fence. A resource that checks the fences of readers
// and writers keeps two numbers: the largest fence that it has seen, and the largest that it has
// seen with a write. It refuses a write whose fence is smaller than the first number, and a read
// whose fence is smaller than the second.
//
// WithShared with WithMinHold or WithSlots is ErrInvalid. If the driver has no
// [backend.Traits].Shared, the error is errors.ErrUnsupported, and the key is not locked.
func WithShared() Option {
	return func(r *request) { r.shared = true }
}

// WithFence requests a fence. If the driver has no fences, the error is errors.ErrUnsupported, and
// the key is not locked.
func WithFence() Option {
	return func(r *request) { r.fenced = true }
}

// maxSlots is the largest number of slots.
const maxSlots = 100

// WithSlots lets up to n leases hold the key at the same time. Each lease has a slot, from 0 to n-1
// ([Lease.Slot]). Slot i is stored as the exclusive key KEY#i, so Inspect or Break that key.
// Inspect of KEY itself says that KEY is free; the command hasp inspect KEY also shows its slots.
// All callers of a key must use the same n; while a deployment changes n, the key may have as many
// leases as the larger n. The slot of a holder that died is free after its term. WithSlots(1) and a
// lock without WithSlots do not exclude each other.
//
// Lock first locks the key KEY#queue, which callers get in the order of the strategy. Then Lock
// asks for each slot in turn, except those that this Client knows to be held. It asks again when a
// lease of this Client ends, and after a pause that grows to max(80 ms, n · 10 ms). So Lock costs a
// lock and an unlock of KEY#queue, and one call for each slot that it tries. TryLock asks for each
// slot once, but begins no call after Options.Timeout, and asks for none while a Lock of this
// Client waits for one. TryLock may get a slot before a waiting Lock of another Client.
//
// If a lease in the caller's context holds a slot of KEY, the caller re-enters that slot. Fences
// are per slot. An n below 1 or above 100 is ErrInvalid.
func WithSlots(n int) Option {
	return func(r *request) {
		if n < 1 || n > maxSlots {
			r.refuse("%d slots: give 1 to %d", n, maxSlots)
		}
		r.slots = n
	}
}
