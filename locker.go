// Package hasp provides named locks that processes share, behind one [Locker]
// interface. A strategy decides how locks are stored and waited for: in one process
// (memlock), on one host (filelock), on Redis (spinlock, pubsublock, fairlock, redlock), in
// PostgreSQL (pglock) or in etcd (etcdlock). Configuration names the strategy, so a change
// of strategy is a change of one string.
//
//	c, err := hasp.Open(ctx, "spinlock+redis://localhost:6379", nil)
//	…
//	defer c.Close()
//	err = hasp.Do(ctx, c, "invoices/2024-06", func(ctx context.Context, lease *hasp.Lease) error {
//		return bill(ctx) // ctx ends if the lock is lost
//	})
//
// A lock in a distributed system is a lease. It has a term, and it is renewed while
// its holder lives. A lease can be lost, because a process may be stopped or cut off for
// longer than the term. Package hasp ends the lease before another caller can get
// the key ([Lease.Context], [Lease.Err]). It does so by its own clock, and needs no
// message. A write that is in flight when the term ends can still arrive late. The
// resource can refuse such a write by its fence ([WithFence], [Lease.Fence]).
//
// Authors of a driver find the contract in package backend, and its test suite in
// package conformance.
package hasp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Locker takes named locks. [*Client] implements it, and every strategy makes a Client:
//
//	memlock.New(options)               // one process
//	filelock.New(dir, options)         // the processes of one host
//	spinlock.New(rdb, options)         // one Redis, by polling
//	pubsublock.New(rdb, options)       // one Redis, with messages
//	fairlock.New(rdb, options)         // one Redis, first come, first served
//	redlock.New(masters, options)      // several Redis masters, by quorum
//	pglock.New(ctx, pool, options)     // PostgreSQL
//	etcdlock.New(config, options)      // etcd
//	hasp.Open(ctx, "spinlock+redis://localhost:6379", options) // any of them, by URL
//
// Pass a Locker on, and not a Client: so the strategy can be swapped, and a wrapper that adds
// traces or metrics can stand in between. A wrapper returns the leases of the Locker inside it.
type Locker interface {
	// Lock waits until it holds key, or until ctx ends, WithMaxWait has
	// passed, or the store could not be reached for Options.Timeout.
	Lock(ctx context.Context, key string, opts ...Option) (*Lease, error)

	// TryLock makes one attempt. If the key is held, the error is ErrHeld.
	TryLock(ctx context.Context, key string, opts ...Option) (*Lease, error)
}

// Do runs fn while it holds key. The context that fn gets is the lease's: it
// ends with ctx and when the lock is lost, and locking the same key with it re-enters.
//
// The lease is renewed until fn returns, also when ctx has ended, so that no other
// caller gets the key while fn cleans up. A fn that ignores the end of its context
// keeps the key. Bound that by WithMaxHold.
//
// If Lock fails, Do returns its error and does not call fn. Otherwise Do returns the
// error of fn, joined with the error of Unlock. If the lock was lost while fn ran, the
// error matches ErrLost, also if fn returned nil, and its text begins with the loss. fn may unlock the lease itself; that
// is no error. If fn panics or calls runtime.Goexit, Do unlocks the key, and the panic
// goes on. If fn is nil, Do returns ErrInvalid.
func Do(ctx context.Context, l Locker, key string, fn func(ctx context.Context, lease *Lease) error, opts ...Option) error {
	if fn == nil {
		return &Error{"do", key, errNoFunc}
	}
	lease, err := l.Lock(ctx, key, opts...)
	if err != nil {
		return err
	}
	all := Leases{[]*Lease{lease}}
	return joined(all.do(ctx, func() error { return fn(lease.Context(), lease) }))
}

// errNoFunc says that the fn of Do, DoAll or Lead is nil.
var errNoFunc = fmt.Errorf("%w: fn is nil; pass the function to run under the lock", ErrInvalid)

// do runs fn under all of ls, and unlocks them. It returns the errors of fn and of Unlock.
func (ls *Leases) do(ctx context.Context, fn func() error) (ferr, uerr error) {
	for _, l := range ls.leases {
		l.renewUntilUnlock()
	}

	// Unlock is deferred, so that the keys are unlocked even if fn panics.
	defer func() {
		errs := ls.unlock(ctx)
		for i, err := range errs {
			if errors.Is(err, ErrReleased) {
				errs[i] = nil // fn has unlocked the lease itself
			}
		}
		if uerr = errs[0]; len(errs) > 1 {
			uerr = errors.Join(errs...)
		}
	}()
	return fn(), nil
}

// joined returns the errors of fn and of Unlock joined, or the only one that is not nil, as
// it is. A loss comes first: the error of fn is often only the end of its context then.
func joined(err, unlock error) error {
	switch {
	case err == nil || unlock == nil:
		return cmp.Or(err, unlock)
	case errors.Is(unlock, ErrLost):
		return errors.Join(unlock, err)
	}
	return errors.Join(err, unlock)
}

// DoAll is [Do] for several keys, locked as by [LockAll]. WithMaxWait(0) takes all of
// them at once or returns ErrHeld. The context that fn gets ends when any of the leases
// is lost. The others are renewed until fn returns.
func DoAll(ctx context.Context, l Locker, keys []string, fn func(ctx context.Context, leases *Leases) error, opts ...Option) error {
	if fn == nil {
		return fmt.Errorf("hasp: do all: %w", errNoFunc)
	}
	all, err := LockAll(ctx, l, keys, opts...)
	if err != nil {
		return err
	}
	return joined(all.do(ctx, func() error { return fn(all.Context(), all) }))
}

// LockAll locks all of keys or none. It locks them one after another in sorted
// order. So two calls with overlapping keys cannot deadlock. A key that is given twice
// is locked only once. WithMaxWait bounds the waits for held keys, all of them
// together. Once that time is over, LockAll still locks a key that is free, and fails
// at one that is held. The other options apply to each key. If LockAll fails, WithMinHold
// keeps none of the keys.
//
// While LockAll waits for a key, the leases that it already has are renewed, unless
// WithoutRenewal is among opts. In that case choose a TTL much longer than all the waits
// and calls to the store take together.
func LockAll(ctx context.Context, l Locker, keys []string, opts ...Option) (*Leases, error) {
	keys = slices.Compact(slices.Sorted(slices.Values(keys)))
	if len(keys) == 0 {
		return nil, fmt.Errorf("hasp: lock all: %w: no keys", ErrInvalid)
	}

	// Only the bound on the wait concerns all keys together.
	var r request
	r.apply(opts)

	began := time.Now()
	all := &Leases{}

	// All or none, also if l is a wrapper that panics or ends the goroutine.
	returns := false
	defer func() {
		if !returns {
			_ = all.Unlock(ctx)
		}
	}()

	opts = append(slices.Clip(opts), func(r *request) { r.oneOfAll = true })
	for _, key := range keys {
		o := opts
		if r.bounded {
			o = append(slices.Clip(opts), WithMaxWait(max(r.maxWait-time.Since(began), 0)))
		}

		lease, err := l.Lock(ctx, key, o...)
		if err != nil {
			// All or none: the keys so far are unlocked.
			returns = true
			return nil, errors.Join(err, all.Unlock(ctx))
		}
		all.leases = append(all.leases, lease)
		ctx = lease.Context() // so the loss of one lease ends the wait for the next
	}

	for _, lease := range all.leases {
		lease.countMinHold()
	}
	returns = true
	return all, nil
}

// Leases are the leases that LockAll returned, at least one. The zero value has
// none.
type Leases struct{ leases []*Lease }

// All returns the leases in the order of their keys.
func (ls *Leases) All() []*Lease { return slices.Clone(ls.leases) }

// Context returns a context that ends when any of the leases ends.
func (ls *Leases) Context() context.Context {
	if len(ls.leases) == 0 {
		return context.Background()
	}
	return ls.leases[len(ls.leases)-1].Context()
}

// Err returns the first error of [Lease.Err] among the leases.
func (ls *Leases) Err() error {
	for _, l := range ls.leases {
		if err := l.Err(); err != nil {
			return err
		}
	}
	return nil
}

// Unlock unlocks all leases, the last first, and joins their errors. After an
// unlock of unknown outcome, it unlocks the remaining leases at the same time,
// each on a goroutine of its own. So during an outage Unlock takes at most two
// timeouts, however many leases there are.
func (ls *Leases) Unlock(ctx context.Context) error {
	return errors.Join(ls.unlock(ctx)...)
}

// unlock returns the errors of Unlock by lease.
func (ls *Leases) unlock(ctx context.Context) []error {
	errs := make([]error, len(ls.leases))
	outage := false // the outcome of an Unlock is unknown

	var wg sync.WaitGroup
	for i, l := range slices.Backward(ls.leases) {
		if outage {
			// In sequence, each call might wait for Options.Timeout.
			wg.Go(func() { errs[i] = l.Unlock(ctx) })
			continue
		}
		errs[i] = l.Unlock(ctx)
		outage = errs[i] != nil && !errors.Is(errs[i], ErrLost) && !errors.Is(errs[i], ErrReleased)
	}
	wg.Wait()
	return errs
}
