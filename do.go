package hasp

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/hasplock/hasp/internal/line"
)

// Do runs fn while it holds key. fn receives the lease's context, which ends when ctx ends or the
// lock is lost. If fn locks the same key with this context, it re-enters the lease.
//
// The lease is renewed until fn returns, even after ctx has ended, so that no other caller gets the
// key while fn cleans up. If fn ignores the end of its context, the key stays locked; WithMaxHold
// bounds that time.
//
// If Lock fails, Do returns its error and does not call fn. If ctx ends or the lock is lost after
// Lock, but before fn begins, Do does not call fn either: it unlocks the key, and returns the error
// of ctx or of the loss. Otherwise Do returns the error of fn, joined with the error of
// Unlock. If the lock was lost while fn ran, the error matches ErrLost, even if fn returned nil,
// and its text begins with the loss. fn may unlock the lease itself; that is no error. If fn panics
// or calls runtime.Goexit, Do unlocks the key, and the panic goes on. If an argument is nil, Do
// returns ErrInvalid.
func Do(ctx context.Context, l Locker, key string,
	fn func(ctx context.Context, lease *Lease) error, opts ...Option) error {
	if err := misuse(ctx, l, fn == nil); err != nil {
		return &Error{"do", key, err}
	}
	lease, err := l.Lock(ctx, key, opts...)
	if err != nil {
		return err
	}
	leases := Leases{leases: []*Lease{lease}}
	return joined(leases.do(ctx, func() error { return fn(lease.Context(), lease) }))
}

// DoAll is [Do] for several keys, which it locks as [LockAll] does. With WithMaxWait(0), DoAll does
// not wait: it locks all keys or returns ErrHeld. The context that fn receives ends when any of the
// leases is lost. The other leases are renewed until fn returns.
func DoAll(ctx context.Context, l Locker, keys []string,
	fn func(ctx context.Context, leases *Leases) error, opts ...Option) error {
	if err := misuse(ctx, l, fn == nil); err != nil {
		return fmt.Errorf("hasp: do all: %w", err)
	}
	leases, err := LockAll(ctx, l, keys, opts...)
	if err != nil {
		return err
	}
	return joined(leases.do(ctx, func() error { return fn(leases.Context(), leases) }))
}

// LockAll locks either all keys that are given or no key. A key that is given twice is locked only
// once. WithMaxWait bounds the sum of the waits for held keys. After that time, LockAll still locks
// keys that are free, and fails at the first key that is held. The other options apply to each key.
// If LockAll fails, no key stays taken because of WithMinHold.
//
// The contexts of the leases are children of ctx, and not of one another. So if one lease ends,
// [Leases.Context] ends, but the other leases and their contexts last.
//
// LockAll waits for one key after another in sorted order. While it waits for a key, it holds no
// later key, so two calls with overlapping keys cannot deadlock. If l is a [*Client], LockAll first
// makes one attempt at every key, as TryLock does, up to 64 at the same time. So if the keys are
// free, they take one round trip together. LockAll keeps the keys before the first one that it did
// not get, and unlocks the later ones. With WithMaxWait(0), or with less time than a few round
// trips take, LockAll skips these attempts, and locks one key after another. So if the keys of two
// such calls overlap, one of the calls succeeds. With any other Locker, LockAll also locks one key
// after another.
//
// While LockAll waits for a key, the leases that it already has are renewed, unless WithoutRenewal
// is among opts. In that case choose a TTL that is much longer than the sum of all waits and calls
// to the store.
func LockAll(ctx context.Context, l Locker, keys []string, opts ...Option) (*Leases, error) {
	if err := misuse(ctx, l, false); err != nil {
		return nil, fmt.Errorf("hasp: lock all: %w", err)
	}
	keys = slices.Compact(slices.Sorted(slices.Values(keys)))
	if len(keys) == 0 {
		return nil, fmt.Errorf("hasp: lock all: %w: no keys", ErrInvalid)
	}

	// Lock all keys or no key. Defer the undo, because the Locker may be a wrapper that panics or
	// ends the goroutine.
	leases := &Leases{}
	leases.joint = newLeaseContext(ctx, nil, leases)
	returns := false
	defer func() {
		if !returns {
			_ = leases.undo(ctx)
		}
	}()
	err := leases.lock(ctx, l, keys, opts)
	returns = true
	if err != nil {
		return nil, joined(err, leases.undo(ctx))
	}

	// LockAll cannot fail any more, so the min holds may take effect.
	for _, lease := range leases.leases {
		lease.countMinHold()
	}
	return leases, nil
}

// Bounds of the pauses after which Lead competes again.
const (
	lossPause = 100 * time.Millisecond // the longest pause after a loss

	// The longest pause after the first outage in a row; each further one doubles it.
	outagePause = 100 * time.Millisecond

	longestPause = time.Second // the longest of all pauses
)

// Lead elects a leader: it runs fn while it holds key, and competes again whenever the lease was
// lost. It returns nil only if fn returned nil and the key was held until then. Otherwise it
// returns
//   - fn's error, joined with Unlock's, if the key was held until fn returned;
//   - the error of Lock, if ctx ended or the Client was closed before fn began;
//   - immediately ErrInvalid or errors.ErrUnsupported, as Lock does, and also ErrInvalid if an
//     argument is nil, or opts have WithMaxWait, WithShared or WithSlots.
//
// After a loss, Lead waits until fn has returned, discards the result of fn, even nil, and competes
// again after a pause of up to 100 ms. So fn must be safe to run again. In one Lead, no two calls
// of fn run at the same time. After an outage, Lead tries again after a pause of up to a second.
// Options.Observe reports outages and losses, and [Client.Inspect] shows who leads.
//
// fn's context ends when ctx ends. It also ends when the lease is lost, at its deadline at the
// latest. lease.Err distinguishes the two: it returns ErrLost after a loss, and nil if only ctx has
// ended. As with [Do], the lease is renewed until fn has returned, so that no successor starts
// while fn cleans up. If fn panics, the key is unlocked. If the lease is lost while fn cleans up
// after the end of ctx, the error matches ErrLost. If fn ignores its context after a loss, it runs
// at the same time as the next leader, and only a fence stops its writes.
func Lead(ctx context.Context, l Locker, key string,
	fn func(ctx context.Context, lease *Lease) error, opts ...Option) error {
	var r request
	r.apply(opts)
	err := misuse(ctx, l, fn == nil)
	switch {
	case err != nil:
	case r.bounded:
		err = fmt.Errorf("%w: WithMaxWait: Lead waits until its context ends; "+
			"bound that instead", ErrInvalid)
	case r.shared, r.slots > 0:
		err = fmt.Errorf("%w: WithShared or WithSlots: several would lead at once", ErrInvalid)
	}
	if err != nil {
		return &Error{"lead", key, err}
	}

	opts = append(slices.Clip(opts), func(r *request) {
		r.op = "lead"
		r.linger = false // Lead does not come back for the key, so its successor need not wait
	})
	outages := 0 // calls of Lock in a row that failed
	for {
		lease, err := l.Lock(ctx, key, opts...)
		if err != nil {
			if over, why := leadOver(ctx, key, err); over {
				return why
			}
			rest(ctx, nil, line.Jitter(min(outagePause<<min(outages, 10), longestPause)))
			outages++
			continue
		}

		outages = 0
		leases := Leases{leases: []*Lease{lease}}
		ferr, uerr := leases.do(ctx, func() error { return fn(lease.Context(), lease) })
		if !errors.Is(uerr, ErrLost) || ctx.Err() != nil {
			return joined(ferr, uerr)
		}

		// The lease was lost, so compete again. Pause at random, because other processes may have
		// lost their leases at the same moment.
		rest(ctx, nil, rand.N(lossPause))
	}
}

// leadOver reports whether Lead ends because Lock returned err, and with which error. Outages do
// not end Lead, and neither does ErrHeld, which a wrapper may return after a wait of its own.
func leadOver(ctx context.Context, key string, err error) (bool, error) {
	if end := ctx.Err(); end != nil {
		if !errors.Is(err, end) {
			// Lock failed because of an outage, and then ctx ended.
			err = &Error{"lead", key, withContextEnd(ctx, err)}
		}
		return true, err
	}
	for _, end := range []error{ErrInvalid, ErrClosed, errors.ErrUnsupported} {
		if errors.Is(err, end) {
			return true, err
		}
	}
	return false, err
}

// misuse returns an error if an argument of Do, DoAll, LockAll or Lead is nil. The argument noFunc
// says that fn is nil.
func misuse(ctx context.Context, l Locker, noFunc bool) error {
	c, isClient := l.(*Client) // l itself is not nil if c is nil
	switch {
	case ctx == nil:
		return errNilContext
	case l == nil, isClient && c.isNil():
		return errNilClient
	case noFunc:
		return fmt.Errorf("%w: fn is nil; pass the function to run under the lock", ErrInvalid)
	}
	return nil
}
