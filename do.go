package hasp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/line"
)

// Do runs fn while it holds key. fn receives the lease's context, which ends when ctx ends or the
// lock is lost. If fn locks the same key with this context, it re-enters the lease.
//
// The lease is renewed until fn returns, even after ctx has ended, so that no other caller gets the
// key while fn cleans up. If fn ignores the end of its context, the key stays locked; WithMaxHold
// bounds that time.
//
// If Lock fails, Do returns its error and does not call fn. The same applies if ctx ends or the lock
// is lost before fn begins. Otherwise Do returns the error of fn, joined with the error of Unlock.
// If the lock was lost while fn ran, the error matches ErrLost, even if fn returned nil, and its
// text begins with the loss. fn may unlock the lease itself; that is no error. If fn panics or calls
// runtime.Goexit, Do unlocks the key, and the panic goes on. If an argument is nil, Do returns
// ErrInvalid.
func Do(ctx context.Context, l Locker, key string, fn func(ctx context.Context, lease *Lease) error, opts ...Option) error {
	if err := misuse(ctx, l, fn == nil); err != nil {
		return &Error{"do", key, err}
	}
	lease, err := l.Lock(ctx, key, opts...)
	if err != nil {
		return err
	}
	all := Leases{leases: []*Lease{lease}}
	return joined(all.do(ctx, func() error { return fn(lease.Context(), lease) }))
}

// misuse returns an error if an argument of Do, DoAll, LockAll or Lead is nil.
func misuse(ctx context.Context, l Locker, noFunc bool) error {
	c, direct := l.(*Client)
	switch {
	case ctx == nil:
		return errNilContext
	case l == nil, direct && c == nil:
		return fmt.Errorf("%w: the Locker is nil; check the error of New or Open", ErrInvalid)
	case noFunc:
		return fmt.Errorf("%w: fn is nil; pass the function to run under the lock", ErrInvalid)
	}
	return nil
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

	// The context may have ended at the moment of the grant, and a wrapper or another key may have
	// taken long.
	for _, l := range ls.leases {
		if x := l.context(); x.Err() != nil {
			return newError(l.op, l.key, cmp.Or(l.Err(), withContextEnd(x, nil))), nil
		}
	}
	return fn(), nil
}

// DoAll is [Do] for several keys, which it locks as [LockAll] does. With WithMaxWait(0), DoAll does
// not wait: it locks all keys or returns ErrHeld. The context that fn receives ends when any of the
// leases is lost. The other leases are renewed until fn returns.
func DoAll(ctx context.Context, l Locker, keys []string, fn func(ctx context.Context, leases *Leases) error, opts ...Option) error {
	if err := misuse(ctx, l, fn == nil); err != nil {
		return fmt.Errorf("hasp: do all: %w", err)
	}
	all, err := LockAll(ctx, l, keys, opts...)
	if err != nil {
		return err
	}
	return joined(all.do(ctx, func() error { return fn(all.Context(), all) }))
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

	// Lock all keys or no key, even if the Locker is a wrapper that panics or ends the goroutine.
	all := &Leases{}
	all.joint = newLeaseContext(ctx, nil, all)
	returns := false
	defer func() {
		if !returns {
			_ = all.undo(ctx)
		}
	}()
	err := all.lock(ctx, l, keys, opts)
	returns = true
	if err != nil {
		return nil, errors.Join(err, all.undo(ctx))
	}

	for _, lease := range all.leases {
		lease.countMinHold()
	}
	return all, nil
}

// lock locks the given keys, which are sorted. After an error, the caller must call undo.
func (ls *Leases) lock(ctx context.Context, l Locker, keys []string, opts []Option) error {
	// Of the options, only WithMaxWait concerns all keys together.
	var r request
	r.apply(opts)

	began := time.Now()
	if c, direct := l.(*Client); direct {
		// Try all keys together only if there is time to wait after a refusal. Otherwise two such
		// calls might each have a key that the other one needs, and both would fail.
		free := c.unused(keys)
		if len(free) > 1 && c.traits.Reach != backend.Process && (!r.bounded || r.maxWait >= c.answerTime()) {
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
		if r.bounded {
			o = append(slices.Clip(opts), WithMaxWait(max(r.maxWait-time.Since(began), 0)))
		}

		wait := ls.waiting(ctx)
		lease, err := l.Lock(wait, key, o...)
		if err != nil && ctx.Err() == nil && wait.Err() != nil {
			err = newError("lock", key, context.Cause(wait)) // a lease was lost, so report neither ErrHeld nor an end of ctx
		}
		if err != nil {
			return err
		}
		ls.leases = append(ls.leases, lease)
		ls.watch(lease)
	}
	return nil
}

// waiting returns the context with which LockAll takes its next key. It ends with ctx, and with the
// leases that LockAll already has. But the contexts of the leases that are taken with it are
// children of ctx, even if a wrapper passes on a context derived from it. Otherwise an Unlock of
// one lease would end the contexts of others.
func (ls *Leases) waiting(ctx context.Context) *leaseContext {
	joint := ls.joint
	wait := &leaseContext{Context: joint.Context, cancelOnly: joint.cancelOnly, parent: ctx}
	wait.deadline, wait.bounded = joint.deadline, joint.bounded
	if n := len(ls.leases); n > 0 {
		wait.lease = ls.leases[n-1]
		wait.held = wait.lease
	} else if x := leaseContextOf(ctx); x != nil {
		wait.lease, wait.held = x.lease, x.held
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
// no answer for Timeout, tryAtOnce returns the error, because Lock would wait for another Timeout.
func (ls *Leases) tryAtOnce(ctx context.Context, c *Client, keys []string, opts []Option) (hung error) {
	got, errs := make([]*Lease, len(keys)+1), make([]error, len(keys)+1) // each has one entry more than keys; that entry stays nil
	var refused atomic.Bool

	// Defer this, because Observe may panic in an attempt.
	defer func() {
		n := slices.Index(got, nil)
		ls.leases = got[:n:n]
		for i := range n - 1 {
			got[i+1].around = got[i] // so that re-entry finds all leases
		}
		rest := Leases{leases: slices.DeleteFunc(got[n:], func(l *Lease) bool { return l == nil })}
		_ = rest.Unlock(ctx) // if the Unlock fails, the Client repeats it
		hung = errs[n]
	}()

	wait := ls.waiting(ctx)
	atOnce(len(keys), func(i int) bool {
		if refused.Load() {
			return true // a key was refused, so a further lease would probably be unlocked again
		}
		began := time.Now()
		l, err := c.TryLock(wait, keys[i], opts...)
		if got[i] = l; err != nil {
			refused.Store(true)
			if errors.Is(err, ErrUnavailable) && time.Since(began) >= c.opts.Timeout {
				errs[i] = err
			}
		}
		return true
	})
	return nil
}

// maxAtOnce bounds the calls that atOnce has in flight, because some stores have few connections.
const maxAtOnce = 64

// atOnce calls f with the numbers 0 to n-1. Each call has a goroutine of its own, and up to
// maxAtOnce run at the same time. When f has returned false, because the store did not answer, this
// bound is dropped. Otherwise each group of maxAtOnce calls might take a whole Options.Timeout. If
// f panics or ends its goroutine, atOnce does the same when all calls have ended.
func atOnce(n int, f func(i int) (answered bool)) {
	if n == 1 {
		f(0)
		return
	}

	var wg sync.WaitGroup
	var outage atomic.Bool
	var panicked atomic.Pointer[any] // points to the value of the panic, or to nil after runtime.Goexit
	flying := make(chan struct{}, maxAtOnce)
	for i := range n {
		if !outage.Load() {
			flying <- struct{}{}
		}
		wg.Go(func() {
			returned := false
			defer func() {
				if !returned {
					v := recover()
					panicked.Store(&v)
				}
				select {
				case <-flying:
				default: // this call put nothing into flying, because an outage was known when it began
				}
			}()
			if !f(i) {
				outage.Store(true)
			}
			returned = true
		})
	}
	wg.Wait()

	switch v := panicked.Load(); {
	case v == nil:
	case *v == nil:
		runtime.Goexit()
	default:
		panic(*v)
	}
}

// Leases are the leases that LockAll returned, at least one. The zero value has no lease.
type Leases struct {
	leases []*Lease
	joint  *leaseContext // ends when any of the leases ends; nil for the zero value, and within Do and Lead
}

// watch lets the end of l, which is the last lease of ls, end the joint context. If l has ended
// already, the next call of Err or Done of the joint context notices that. Call watch only when l is
// in ls, because a method of the caller's context may panic here.
func (ls *Leases) watch(l *Lease) {
	ls.joint.lease = l
	l.context().joint.Store(ls.joint)
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
	return errors.Join(ls.unlock(ctx)...)
}

// unlock does what Unlock does. The error with index i is that of the lease ls.leases[i].
func (ls *Leases) unlock(ctx context.Context) []error {
	errs := make([]error, len(ls.leases))
	atOnce(len(errs), func(i int) bool {
		errs[i] = ls.leases[i].Unlock(ctx)
		return errs[i] == nil || errors.Is(errs[i], ErrLost) || errors.Is(errs[i], ErrReleased)
	})
	return errs
}

// Bounds of the pauses after which Lead competes again.
const (
	lossPause    = 100 * time.Millisecond // the longest pause after a loss
	outagePause  = 100 * time.Millisecond // the longest pause after the first outage in a row; each further one doubles it
	longestPause = time.Second            // the longest of all pauses
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
func Lead(ctx context.Context, l Locker, key string, fn func(ctx context.Context, lease *Lease) error, opts ...Option) error {
	var r request
	r.apply(opts)
	err := misuse(ctx, l, fn == nil)
	switch {
	case err != nil:
	case r.bounded:
		err = fmt.Errorf("%w: WithMaxWait: Lead waits until its context ends; bound that instead", ErrInvalid)
	case r.shared, r.slots > 0:
		err = fmt.Errorf("%w: WithShared or WithSlots: several would lead at once", ErrInvalid)
	}
	if err != nil {
		return &Error{"lead", key, err}
	}

	opts = append(slices.Clip(opts), func(r *request) { r.op, r.linger = "lead", false })
	refused := 0 // failed calls of Lock in a row
	for {
		lease, err := l.Lock(ctx, key, opts...)
		if err != nil {
			if over, why := leadOver(ctx, key, err); over {
				return why
			}
			rest(ctx, nil, line.Jitter(min(outagePause<<min(refused, 10), longestPause)))
			refused++
			continue
		}

		refused = 0
		all := Leases{leases: []*Lease{lease}}
		ferr, uerr := all.do(ctx, func() error { return fn(lease.Context(), lease) })
		if !errors.Is(uerr, ErrLost) || ctx.Err() != nil {
			return joined(ferr, uerr)
		}
		rest(ctx, nil, rand.N(lossPause)) // at random, because other processes may have lost their leases at the same moment
	}
}

// leadOver reports whether Lead ends because Lock returned err, and with which error. Outages do
// not end Lead, and neither does ErrHeld, which a wrapper may return after a wait of its own.
func leadOver(ctx context.Context, key string, err error) (bool, error) {
	if end := ctx.Err(); end != nil {
		if !errors.Is(err, end) {
			err = &Error{"lead", key, withContextEnd(ctx, err)} // Lock failed because of an outage, and then ctx ended
		}
		return true, err
	}
	return errors.Is(err, ErrInvalid) || errors.Is(err, errors.ErrUnsupported) || errors.Is(err, ErrClosed), err
}

// LeasesOf returns the lease of the innermost Lock that ctx is derived from. If ctx is derived from
// the context of [Leases], it returns all leases of that LockAll, in the order of their keys. If
// there is no lease, it returns nil. The leases may have ended. Package fence uses LeasesOf to find
// the fence of a write.
func LeasesOf(ctx context.Context) []*Lease {
	x := leaseContextOf(ctx)
	if x == nil || x.lease == nil {
		return nil
	}
	if all, ok := x.held.(*Leases); ok {
		return all.All()
	}
	return []*Lease{x.lease}
}
