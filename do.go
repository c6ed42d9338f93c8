package hasp

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// Do runs fn while it holds key. fn receives the lease's context, which ends when ctx ends or the
// lock is lost. A Lock of the same key with this context re-enters.
//
// The lease is renewed until fn returns, even after ctx has ended, so that no other caller gets the
// key while fn cleans up. If fn ignores the end of its context, it keeps the key, with WithMaxHold
// only for that time.
//
// If Lock fails, Do returns its error and does not call fn. Otherwise Do returns the error of fn,
// joined with the error of Unlock. If the lock was lost while fn ran, the error matches ErrLost,
// even if fn returned nil, and its text begins with the loss. fn may unlock the lease itself; that
// is no error. If fn panics or calls runtime.Goexit, Do unlocks the key, and the panic goes on. If
// fn is nil, Do returns ErrInvalid.
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
	return fn(), nil
}

// DoAll is [Do] for several keys, locked as by [LockAll]. With WithMaxWait(0), DoAll locks all keys
// at once or returns ErrHeld. The context that fn receives ends when any of the leases is lost. The
// others are renewed until fn returns.
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

// LockAll locks all of keys or none. It locks them in sorted order, so two calls with overlapping
// keys cannot deadlock. A key that is given twice is locked only once. WithMaxWait bounds the sum
// of all waits for held keys: after that time, LockAll still locks free keys, and fails at a held
// one. The other options apply to each key. If LockAll fails, WithMinHold keeps none of the keys.
//
// While LockAll waits for a key, the leases that it already has are renewed, unless opts have
// WithoutRenewal. With WithoutRenewal, choose a TTL much longer than all waits and calls to the
// store together.
func LockAll(ctx context.Context, l Locker, keys []string, opts ...Option) (*Leases, error) {
	keys = slices.Compact(slices.Sorted(slices.Values(keys)))
	if len(keys) == 0 {
		return nil, fmt.Errorf("hasp: lock all: %w: no keys", ErrInvalid)
	}

	// Only WithMaxWait applies to all keys together.
	var r request
	r.apply(opts)

	began := time.Now()
	all := &Leases{}

	// Unlock all even if l is a wrapper that panics or ends the goroutine.
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

// Leases are the leases that LockAll returned, at least one. The zero value has none.
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

// Unlock unlocks all leases, the last first, and joins their errors. After an unlock of unknown
// outcome, it unlocks the remaining leases at the same time, each on a goroutine of its own. So
// during an outage Unlock takes at most two timeouts, however many leases there are.
func (ls *Leases) Unlock(ctx context.Context) error {
	return errors.Join(ls.unlock(ctx)...)
}

// unlock does what Unlock does, and returns the error of each lease, by its index in ls.leases.
func (ls *Leases) unlock(ctx context.Context) []error {
	errs := make([]error, len(ls.leases))
	outage := false // the outcome of an Unlock is unknown

	var wg sync.WaitGroup
	var unlock func(i int)
	unlock = func(i int) {
		if i < 0 {
			return
		}
		defer unlock(i - 1) // also if Observe panics
		if outage {
			// Do not wait: in sequence, each call might take Options.Timeout.
			wg.Go(func() { errs[i] = ls.leases[i].Unlock(ctx) })
			return
		}
		errs[i] = ls.leases[i].Unlock(ctx)
		outage = errs[i] != nil && !errors.Is(errs[i], ErrLost) && !errors.Is(errs[i], ErrReleased)
	}
	unlock(len(ls.leases) - 1)
	wg.Wait()
	return errs
}

// Bounds of the pauses before Lead competes again.
const (
	lossPause    = 100 * time.Millisecond // the longest after a loss
	outagePause  = 100 * time.Millisecond // the longest after the first of several outages in a row; it doubles
	longestPause = time.Second            // the longest of all
)

// Lead elects a leader: it runs fn while it holds key, and competes again whenever the lease was
// lost. It returns nil only if fn returned nil and the key was held until then. Otherwise it
// returns
//   - fn's error, joined with Unlock's, if the key was held until fn returned;
//   - the error of Lock if ctx ended or the Client was closed while waiting, and
//     at once ErrInvalid (fn is nil; WithMaxWait, WithShared) and errors.ErrUnsupported.
//
// After a loss Lead waits until fn has returned, discards the result, even if it is nil, and
// competes again after a pause of up to 100 ms. So fn must be safe to run again, and never runs
// twice at once in one Lead. After an outage, Lead tries again after a pause of up to a second.
// Options.Observe reports outages and losses.
//
// fn's context ends when ctx ends, or when the lease is lost, at its deadline at the latest. Then
// lease.Err returns ErrLost after a loss, and nil if only ctx has ended. After ctx has ended, the
// lease is renewed until fn has returned, so that no successor starts while fn cleans up. Then the
// key is unlocked, and a successor leads at once. If the lease is lost while fn cleans up, the
// error matches ErrLost. If fn ignores its context after a loss, it runs beside the next leader,
// and only a fence stops its writes.
//
// If fn panics or calls runtime.Goexit, the key is unlocked and the panic goes
// on. [Client.Inspect] shows who leads.
func Lead(ctx context.Context, l Locker, key string, fn func(ctx context.Context, lease *Lease) error, opts ...Option) error {
	if fn == nil {
		return &Error{"lead", key, errNoFunc}
	}
	var r request
	r.apply(opts)
	if r.bounded {
		return &Error{"lead", key, fmt.Errorf("%w: WithMaxWait: Lead waits until its context ends; bound that instead", ErrInvalid)}
	}

	if r.shared {
		return &Error{"lead", key, fmt.Errorf("%w: WithShared: several would lead at once", ErrInvalid)}
	}

	opts = append(slices.Clip(opts), func(r *request) { r.op = "lead" })
	refused := 0 // calls of Lock in a row that failed
	for {
		lease, err := l.Lock(ctx, key, opts...)
		if err != nil {
			if over, why := leadOver(ctx, key, err); over {
				return why
			}
			rest(ctx, nil, jitter(min(outagePause<<min(refused, 10), longestPause)))
			refused++
			continue
		}

		refused = 0
		all := Leases{[]*Lease{lease}}
		ferr, uerr := all.do(ctx, func() error { return fn(lease.Context(), lease) })
		if !errors.Is(uerr, ErrLost) || ctx.Err() != nil {
			return joined(ferr, uerr)
		}
		rest(ctx, nil, rand.N(lossPause)) // others may have lost their leases at the same moment, and must not all compete at once
	}
}

// leadOver reports whether err, which Lock returned, ends Lead, and with which error. Outages do
// not end Lead, and neither does ErrHeld, which a wrapper may return after a wait of its own.
func leadOver(ctx context.Context, key string, err error) (bool, error) {
	if end := ctx.Err(); end != nil {
		if !errors.Is(err, end) {
			err = &Error{"lead", key, withContextEnd(ctx, err)} // ctx ended just after an outage
		}
		return true, err
	}
	return errors.Is(err, ErrInvalid) || errors.Is(err, errors.ErrUnsupported) || errors.Is(err, ErrClosed), err
}
