package hasp

import (
	"cmp"
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Leases are the leases that LockAll returned, at least one. The zero value has no lease.
type Leases struct {
	leases []*Lease

	// Ends when any of the leases ends; nil for the zero value, and within Do and Lead.
	joint *leaseContext
}

// All returns the leases in the order of their keys.
func (ls *Leases) All() []*Lease { return slices.Clone(ls.leases) }

// Context returns a context that ends when any of the leases ends.
func (ls *Leases) Context() context.Context {
	if ls.joint == nil {
		return context.Background()
	}
	return ls.joint
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

// Unlock unlocks all leases at the same time, and joins their errors. During an outage it takes at
// most twice Options.Timeout, however many leases there are.
func (ls *Leases) Unlock(ctx context.Context) error {
	if ls == nil {
		return errNilLease
	}
	var all error
	for _, err := range ls.unlock(ctx) {
		all = joined(all, err)
	}
	return all
}

// unlock does what Unlock does. The error with index i is that of the lease ls.leases[i].
func (ls *Leases) unlock(ctx context.Context) []error {
	errs := make([]error, len(ls.leases))
	atOnce(len(errs), func(i int) bool {
		errs[i] = ls.leases[i].Unlock(ctx)

		// With any other error, the store may not have answered.
		return errs[i] == nil || errors.Is(errs[i], ErrLost) || errors.Is(errs[i], ErrReleased)
	})
	return errs
}

// do runs fn, renews all leases of ls until fn returns, and unlocks them. It returns the errors of
// fn and of Unlock. If the context of a lease has ended already, do does not run fn, and returns
// that end as the error of fn.
func (ls *Leases) do(ctx context.Context, fn func() error) (ferr, uerr error) {
	for _, l := range ls.leases {
		l.renewUntilUnlock()
	}

	// Defer the unlock, so that the keys are unlocked even if fn panics.
	defer func() {
		for _, err := range ls.unlock(ctx) {
			if !errors.Is(err, ErrReleased) { // otherwise fn has unlocked the lease itself
				uerr = joined(uerr, err)
			}
		}
	}()

	// The context of a lease may have ended at the moment of its grant, or while a wrapper or
	// another key took long.
	for _, l := range ls.leases {
		if x := l.context(); x.Err() != nil {
			return newError(l.op, l.key, cmp.Or(l.Err(), withContextEnd(x, nil))), nil
		}
	}
	return fn(), nil // the deferred function sets uerr
}

// lock locks the given keys, which are sorted. After an error, the caller must call undo.
func (ls *Leases) lock(ctx context.Context, l Locker, keys []string, opts []Option) error {
	// Of the options, only WithMaxWait concerns all keys together.
	var r request
	r.apply(opts)

	began := time.Now()
	if c, direct := l.(*Client); direct {
		// Try all keys together only if there is time to wait after a refusal. Otherwise two such
		// calls might each have a key that the other one needs, and both would fail. Do not try if
		// the store is in this process, because that saves no round trip.
		free := c.unused(keys)
		mayWait := !r.bounded || r.maxWait >= c.answerTime()
		if len(free) > 1 && c.traits.Reach != backend.Process && mayWait {
			if err := ls.tryAtOnce(ctx, c, free, opts); err != nil {
				return err
			}
		}
	}
	for _, lease := range ls.leases {
		ls.watch(lease)
	}

	for _, key := range keys[len(ls.leases):] {
		o := opts
		if r.bounded { // the key may take what the keys before it have left of WithMaxWait
			o = append(slices.Clip(opts), WithMaxWait(max(r.maxWait-time.Since(began), 0)))
		}

		wait := ls.waiting(ctx)
		lease, err := l.Lock(wait, key, o...)
		if err != nil {
			if ctx.Err() == nil && wait.Err() != nil {
				// A lease that LockAll has already was lost. Report that, and not the error of the
				// wait for this key.
				err = newError("lock", key, context.Cause(wait))
			}
			return err
		}
		ls.leases = append(ls.leases, lease)
		ls.watch(lease)
	}
	return nil
}

// watch lets the end of l, which is the last lease of ls, end the joint context. If l has ended
// already, the next call of Err or Done of the joint context notices that. Call watch only when l
// is in ls, because a method of the caller's context may panic here.
func (ls *Leases) watch(l *Lease) {
	ls.joint.lease = l
	l.context().joint.Store(ls.joint)
}

// waiting returns the context with which LockAll takes its next key. It ends with ctx, and with the
// leases that LockAll already has. But the contexts of the leases that are taken with it are
// children of ctx, even if a wrapper passes on a context derived from it. Otherwise an Unlock of
// one lease would end the contexts of others.
func (ls *Leases) waiting(ctx context.Context) *leaseContext {
	joint := ls.joint
	wait := &leaseContext{Context: joint.Context, cancelOnly: joint.cancelOnly, parent: ctx}
	wait.deadline = joint.deadline
	wait.bounded = joint.bounded

	// Re-entry finds the last lease of ls, or before the first one, the leases around LockAll.
	n := len(ls.leases)
	around := leaseContextOf(ctx)
	switch {
	case n > 0:
		wait.lease = ls.leases[n-1]
		wait.held = wait.lease
	case around != nil:
		wait.lease = around.lease
		wait.held = around.held
	}
	return wait
}

// undo unlocks the leases of a LockAll that fails, and ends the joint context.
func (ls *Leases) undo(ctx context.Context) error {
	defer ls.joint.cancel(nil) // if there is no lease, Unlock does not end the joint context
	return ls.Unlock(ctx)
}

// tryAtOnce makes one attempt at each key of keys, all at the same time. It keeps the leases before
// the first key that it did not get, and unlocks the others. If the attempt at that first key got
// no answer for Timeout, tryAtOnce returns the error of that attempt, because Lock would wait for
// another Timeout. In all other cases it returns nil, and the caller must lock the keys that are
// left.
func (ls *Leases) tryAtOnce(ctx context.Context, c *Client, keys []string, opts []Option) (
	hung error) {
	// The entries with index i are the outcome for keys[i]. An error is stored only if the attempt
	// got no answer for Timeout. Both slices have one entry more than keys, which stays nil.
	got := make([]*Lease, len(keys)+1)
	errs := make([]error, len(keys)+1)
	var refused atomic.Bool

	// Defer this, because Observe may panic in an attempt.
	defer func() {
		n := slices.Index(got, nil) // the first key that LockAll did not get
		ls.leases = got[:n:n]
		for i := range n - 1 {
			got[i+1].around = got[i] // so that re-entry finds all leases
		}
		after := slices.DeleteFunc(got[n:], func(l *Lease) bool { return l == nil })
		others := Leases{leases: after}
		_ = others.Unlock(ctx) // if the Unlock fails, the Client repeats it
		hung = errs[n]
	}()

	wait := ls.waiting(ctx)
	atOnce(len(keys), func(i int) bool {
		if refused.Load() {
			return true // a key was refused, so a further lease would probably be unlocked again
		}
		began := time.Now()
		l, err := c.TryLock(wait, keys[i], opts...)
		got[i] = l
		if err != nil {
			refused.Store(true)
			if errors.Is(err, ErrUnavailable) && time.Since(began) >= c.opts.Timeout {
				errs[i] = err
			}
		}
		return true
	})
	return nil // the deferred function sets hung
}

// maxAtOnce bounds the calls that atOnce has in flight, because some stores have few connections.
const maxAtOnce = 64

// atOnce calls f with the numbers 0 to n-1. Each call has a goroutine of its own, and up to
// maxAtOnce run at the same time. f returns false if the store did not answer. From then on this
// bound does not count, because otherwise each group of maxAtOnce calls might take a whole
// Options.Timeout. If f panics or ends its goroutine, atOnce does the same when all calls have
// ended.
func atOnce(n int, f func(i int) (answered bool)) {
	if n == 1 {
		f(0)
		return
	}

	var wg sync.WaitGroup
	var outage atomic.Bool

	// panicked points to the value of the panic, or to nil after runtime.Goexit.
	var panicked atomic.Pointer[any]
	inFlight := make(chan struct{}, maxAtOnce) // has a value for each call that counts
	for i := range n {
		if !outage.Load() {
			inFlight <- struct{}{}
		}
		wg.Go(func() {
			returned := false
			defer func() {
				if !returned {
					v := recover()
					panicked.Store(&v)
				}
				select {
				case <-inFlight:
				default: // an outage was known when this call began, so it does not count
				}
			}()
			if !f(i) {
				outage.Store(true)
			}
			returned = true
		})
	}
	wg.Wait()

	v := panicked.Load()
	switch {
	case v == nil: // all calls have returned
	case *v == nil:
		runtime.Goexit()
	default:
		panic(*v)
	}
}
