// Package hasp gives programs named locks that processes share, behind one
// [Locker] interface. How a lock is kept and waited for is a strategy, picked
// by configuration: in one process (memlock), on one host (filelock), on
// Redis (spinlock and others). Changing it changes one string.
//
//	c, err := hasp.Open(ctx, "spinlock+redis://localhost:6379", nil)
//	…
//	defer c.Close()
//	err = hasp.Do(ctx, c, "invoices/2024-06", func(ctx context.Context, lease *hasp.Lease) error {
//		return bill(ctx) // ctx ends if the lock is lost
//	})
//
// A lock in a distributed system is a lease: it has a term, it is renewed
// while its holder lives, and it can be lost, since a process may be stopped
// or cut off for longer than its term. Package hasp tells of a loss before
// anybody else can have the key ([Lease.Context], [Lease.Err]), by a clock
// and not by a message. What even that cannot prevent, a write already on its
// way when the term ends, is stopped by a fence ([WithFence]) at the resource.
//
// Stores are kept behind package backend. Authors of a driver find its
// contract there and its test in package conformance.
package hasp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Locker takes named locks. [*Client] is one; a wrapper that adds traces or
// metrics is another.
type Locker interface {
	// Lock waits until it holds key, or until ctx ends, WithMaxWait has
	// passed, or the store could not be reached for Options.Timeout.
	Lock(ctx context.Context, key string, opts ...Option) (*Lease, error)

	// TryLock makes one attempt. If the key is held, the error is ErrHeld.
	TryLock(ctx context.Context, key string, opts ...Option) (*Lease, error)
}

// Do runs fn while it holds key. The context that fn gets is the lease's: it
// ends when the lock is lost, and locking the same key with it re-enters.
//
// Do returns what fn returned, joined with the error of Unlock: ErrLost says
// that the lock was lost under fn, also if fn returned nil. If fn panics, the
// key is unlocked and the panic goes on.
func Do(ctx context.Context, l Locker, key string, fn func(ctx context.Context, lease *Lease) error, opts ...Option) (err error) {
	lease, err := l.Lock(ctx, key, opts...)
	if err != nil {
		return err
	}
	defer func() {
		if uerr := lease.Unlock(ctx); err == nil {
			err = uerr
		} else if uerr != nil {
			err = errors.Join(err, uerr)
		}
	}()
	return fn(lease.Context(), lease)
}

// LockAll locks all of keys or none. It takes them one after another in
// sorted order, whatever order they are given in, and a key given twice once,
// so that two calls with overlapping keys cannot block each other for ever.
// WithMaxWait bounds the whole; the other options hold for each key.
func LockAll(ctx context.Context, l Locker, keys []string, opts ...Option) (*Leases, error) {
	keys = slices.Compact(slices.Sorted(slices.Values(keys)))
	var r request
	for _, o := range opts {
		if o != nil {
			o(&r)
		}
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("hasp: lock all: %w: no keys", ErrInvalid)
	}
	began := time.Now()
	all := &Leases{}
	for _, key := range keys {
		o := opts
		if r.bounded {
			o = append(slices.Clip(opts), WithMaxWait(max(r.maxWait-time.Since(began), 0)))
		}
		lease, err := l.Lock(ctx, key, o...)
		if err != nil {
			return nil, errors.Join(err, all.Unlock(ctx))
		}
		all.leases = append(all.leases, lease)
		ctx = lease.Context()
	}
	return all, nil
}

// Leases are what LockAll holds, one at least.
type Leases struct{ leases []*Lease }

// All returns the leases in the order of their keys.
func (ls *Leases) All() []*Lease { return slices.Clone(ls.leases) }

// Context ends when any of the leases ends.
func (ls *Leases) Context() context.Context { return ls.leases[len(ls.leases)-1].Context() }

// Err returns the first error of [Lease.Err] among the leases.
func (ls *Leases) Err() error {
	for _, l := range ls.leases {
		if err := l.Err(); err != nil {
			return err
		}
	}
	return nil
}

// Unlock unlocks all leases, the last first, and joins their errors.
func (ls *Leases) Unlock(ctx context.Context) error {
	var errs []error
	for _, l := range slices.Backward(ls.leases) {
		errs = append(errs, l.Unlock(ctx))
	}
	return errors.Join(errs...)
}
