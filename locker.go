// Package hasp provides named locks that processes share, behind one [Locker] interface. A strategy
// decides where locks are kept and how callers wait: in one process (memlock), on one host
// (filelock), on Redis (spinlock, pubsublock, fairlock, redlock), in PostgreSQL (pglock) or in etcd
// (etcdlock). Configuration names the strategy, so a change of strategy is a change of one string.
//
//	c, err := hasp.Open(ctx, "spinlock+redis://localhost:6379", nil)
//	…
//	defer c.Close()
//	err = hasp.Do(ctx, c, "invoices/2024-06", func(ctx context.Context, lease *hasp.Lease) error {
//		return bill(ctx) // ctx ends if the lock is lost
//	})
//
// A lock in a distributed system is a lease. It has a term, and it is renewed while its holder
// lives. A lease can be lost, because a process may be stopped or cut off for longer than the term.
// Package hasp ends the lease by its own clock, before another caller can get the key
// ([Lease.Context], [Lease.Err]). A write that is in flight when the term ends can still arrive
// late. The resource can refuse such a write by its fence ([WithFence], [Lease.Fence]).
//
// Authors of a driver find the contract in package backend, and its test suite in package
// conformance.
package hasp

import "context"

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
// In your own functions, take a Locker and not a Client, so that a wrapper can add traces or
// metrics. A wrapper returns the leases of the Locker inside it.
type Locker interface {
	// Lock waits until it holds key, or until ctx ends, WithMaxWait has passed, or the store could
	// not be reached for Options.Timeout.
	Lock(ctx context.Context, key string, opts ...Option) (*Lease, error)

	// TryLock makes one attempt. If the key is held, the error is ErrHeld.
	TryLock(ctx context.Context, key string, opts ...Option) (*Lease, error)
}
