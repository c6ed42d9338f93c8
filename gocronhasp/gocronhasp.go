// Package gocronhasp makes each run of a [gocron] job happen once, although several processes
// schedule the job. [NewLocker] takes a lock for each run of a job. [NewElector] lets one process
// run all jobs.
//
//	s, err := gocron.NewScheduler(gocron.WithDistributedLocker(gocronhasp.NewLocker(c, 30*time.Second)))
//
// gocron cannot tell a running job that its lease is lost, for example because the process was
// stopped for longer than the term. Then another process may start the job while the old run goes
// on. If that must not happen, call [hasp.Do] in the job, or send a fence with its writes.
//
// [gocron]: https://github.com/go-co-op/gocron
package gocronhasp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-co-op/gocron/v2"

	"github.com/hasplock/hasp"
)

// Locker is a [gocron.Locker] over a [hasp.Locker]. Several schedulers may share one Locker.
type Locker struct {
	l    hasp.Locker
	opts []hasp.Option
}

var _ gocron.Locker = (*Locker)(nil)

// NewLocker returns a Locker that keeps the key of a job taken for at least minHold after a run has
// started; see [hasp.WithMinHold]. Therefore even a job of a millisecond runs once per tick,
// although the clocks of the schedulers differ. If the time between two ticks is P, and clocks
// differ by up to D, minHold must be longer than D and shorter than P − D. P/2 is a good choice for
// a [gocron.CronJob], whose ticks come at the same times in all processes. The ticks of a
// [gocron.DurationJob] depend on the start of the process, so choose nearly P, such as P − P/20;
// with P/2, the job would run up to twice as often. If jobs have different periods, give each job
// its own Locker by [gocron.WithDistributedJobLocker].
//
// The opts apply to each Lock. If a scheduler dies during a run, the key is free when the term of
// the lease has ended, and another scheduler runs the job at the next tick. [hasp.WithTTL] sets the
// term. If a nightly job must not be skipped, give it several ticks, such as every 10 minutes from
// 2 to 3 o'clock, and a minHold of 12 hours. After a complete run, the later ticks find the key
// held.
func NewLocker(l hasp.Locker, minHold time.Duration, opts ...hasp.Option) *Locker {
	return &Locker{l, append([]hasp.Option{hasp.WithMinHold(minHold)}, opts...)}
}

// Lock makes one attempt to lock key, which is the name of the job. With [gocron.WithName], give
// every job a name of its own, which is the same in all processes. The default is the name of the
// job's Go function.
//
// The lock is renewed until gocron calls Unlock at the end of the run, even if ctx ends earlier.
// gocron cancels ctx when the job is removed or the scheduler shuts down, and the job may still run
// at that time.
//
// If Lock returns an error, gocron skips this run, and only the listener [gocron.AfterLockError]
// receives the error. [hasp.ErrHeld] is usual, because the job runs elsewhere, or has run for this
// tick. Log every other error. [hasp.ErrUnavailable] says that the store failed. If the store fails
// for all processes, the job does not run for this tick. [hasp.ErrInvalid] and
// [errors.ErrUnsupported] say that the job never runs. gocron discards the error of Unlock, so use
// hasp.Options.Observe to learn of losses.
func (k *Locker) Lock(ctx context.Context, key string) (gocron.Lock, error) {
	// The lease must last when ctx ends, so TryLock must not see the end of ctx. Check ctx here.
	if err := ctx.Err(); err != nil {
		return nil, &hasp.Error{Op: "trylock", Key: key, Err: err}
	}

	// Other calls share the array of k.opts. Clip it, so that a Locker that appends an option
	// copies the array first.
	lease, err := k.l.TryLock(context.WithoutCancel(ctx), key, slices.Clip(k.opts)...)
	if err != nil {
		return nil, err // do not return lease, because a nil *Lease in a gocron.Lock is not nil
	}
	return lease, nil
}

// ErrNotLeader says that this process does not lead. Another process may lead, no process may lead,
// or the store may be out of reach.
var ErrNotLeader = errors.New("gocronhasp: not the leader")

// Elector is a [gocron.Elector]. It competes for a key in the background, and is the leader
// while it holds the key.
type Elector struct {
	lease  atomic.Pointer[hasp.Lease] // the present lease; nil if this Elector does not lead
	cancel context.CancelFunc
	done   chan struct{} // closed when the Elector no longer competes
	err    error         // what Close returns; set before done is closed, and read only after that
}

var _ gocron.Elector = (*Elector)(nil)

// NewElector returns an Elector that competes for key by [hasp.Lead] until Close, or until ctx
// ends. The opts are the options of Lead.
//
// When the leader calls Close, another process leads at once. When a leader dies, no process starts
// jobs until the term of its lease has ended, so a tick may be skipped. If clocks differ, and the
// leader changes near a tick, the jobs of that tick may run twice. A Locker does not prevent that,
// because a scheduler with an Elector asks no Locker.
func NewElector(ctx context.Context, l hasp.Locker, key string, opts ...hasp.Option) *Elector {
	ctx, cancel := context.WithCancel(ctx)
	e := &Elector{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(e.done)
		err := hasp.Lead(ctx, l, key, e.lead, opts...)

		// Close and the end of NewElector's ctx both end this ctx. An err that matches this end is
		// usual, even if there was an outage before. Keep any other error, such as the Unlock's.
		isUsual := ctx.Err() != nil && errors.Is(err, ctx.Err())
		if !isUsual {
			e.err = err
		}
	}()
	return e
}

// lead is the function that Lead runs while this process leads. It blocks until ctx, the context of
// the lease, ends: by a loss, by Close, with the ctx of NewElector, or when the Client closes.
func (e *Elector) lead(ctx context.Context, lease *hasp.Lease) error {
	e.lease.Store(lease)
	<-ctx.Done()

	// From now on IsLeader returns ErrNotLeader, although Lead unlocks the key only after the
	// return.
	e.lease.Store(nil)

	// This is nil if only ctx has ended, and ErrClosed if the Client has closed, which ends Lead.
	// After a loss, Lead discards it and competes again.
	return lease.Err()
}

// IsLeader returns nil if this process leads. It makes no call to the store. It reads the clock, so
// a process that was stopped past its term learns at its next call of IsLeader that it no longer
// leads. ctx has no effect.
//
// If this process does not lead, IsLeader returns [ErrNotLeader]. If the Elector has ended without
// a Close, the error also matches the reason: [hasp.ErrInvalid], [errors.ErrUnsupported] or
// [hasp.ErrClosed]. gocron discards the error and skips the run. A wrong option is reported only a
// moment after NewElector, because an Elector starts in the background.
func (e *Elector) IsLeader(ctx context.Context) error {
	lease := e.lease.Load()
	if lease != nil && lease.Err() == nil {
		return nil
	}

	select {
	case <-e.done:
		if e.err != nil {
			return fmt.Errorf("%w: %w", ErrNotLeader, e.err)
		}
	default: // the Elector competes, so e.err must not be read
	}
	return ErrNotLeader
}

// Close stops competing for the key, and unlocks the key if this process leads. Call Close after
// the scheduler's Shutdown, which waits for running jobs. Otherwise a successor may start a job
// that still runs here. For the same reason, the ctx of NewElector should not end before Shutdown.
// Close returns the error of the Unlock, or, if the Elector had already ended, the reason.
func (e *Elector) Close() error {
	e.cancel()
	<-e.done
	return e.err
}
