package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/memlock"
)

// errNet is what a lossy link reports.
var errNet = errors.New("connection reset")

// lossy is a driver whose store works and whose network does not: it loses
// requests and replies, delivers late, and hangs.
type lossy struct {
	*memlock.Driver
	traits  backend.Traits
	timeout time.Duration

	mu  sync.Mutex // guards all below
	r   *rand.Rand
	bad float64       // how often something goes wrong
	off chan struct{} // closed while the link is not silent
}

// Traits hides what memlock can do beyond a spin lock, if the seed says so.
func (l *lossy) Traits() backend.Traits { return l.traits }

func (l *lossy) dice() float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.r.Float64()
}

func (l *lossy) upTo(d time.Duration) time.Duration { return time.Duration(l.dice() * float64(d)) }

// well has nothing go wrong any more.
func (l *lossy) well() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bad = 0
}

// silence loses all that is sent from now on, without a sign, until heal is
// called.
func (l *lossy) silence() (heal func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	off := make(chan struct{})
	l.off = off
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.off == off {
			l.off = nil
		}
		close(off)
	}
}

func (l *lossy) silent() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.off != nil
}

// send carries apply out at the store, unless the network has other plans.
// Like the call of a real driver it outlasts its context only if the traits
// say so.
func (l *lossy) send(ctx context.Context, apply func() error) error {
	done := make(chan error, 1)
	go func() { done <- l.travel(apply) }()
	var end <-chan struct{}
	switch l.traits.Ends {
	case backend.EndsPromptly:
		end = ctx.Done()
	case backend.EndsByDeadline:
		if at, ok := ctx.Deadline(); ok {
			only, cancel := context.WithDeadline(context.Background(), at)
			defer cancel()
			end = only.Done()
		}
	}
	select {
	case err := <-done:
		return err
	case <-end:
		return errNet
	}
}

func (l *lossy) travel(apply func() error) error {
	time.Sleep(l.upTo(3 * time.Millisecond))
	l.mu.Lock()
	bad := l.bad
	l.mu.Unlock()
	if l.silent() {
		time.Sleep(l.timeout + l.upTo(l.timeout))
		return errNet
	}
	switch x := l.dice(); {
	case x < bad/4: // the request is lost
		return errNet
	case x < bad/2: // the reply is lost
		_ = apply()
		return errNet
	case x < bad*3/4: // delivered late, but while its sender cleans up
		time.Sleep(l.upTo(l.timeout * 9 / 10))
		_ = apply()
		return errNet
	case x < bad: // no sign at all
		if l.dice() < 0.5 {
			_ = apply()
		}
		time.Sleep(l.timeout + l.upTo(l.timeout))
		return errNet
	}
	err := apply()
	time.Sleep(l.upTo(3 * time.Millisecond))
	return err
}

// Acquire is memlock's, over the link.
func (l *lossy) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	granted := make(chan backend.Grant, 1)
	err := l.send(ctx, func() error {
		g, err := l.Driver.Acquire(context.Background(), c)
		g.Until = time.Time{} // as a store would answer, which does not know the caller's clock
		granted <- g
		return err
	})
	if err != nil {
		return backend.Grant{}, err
	}
	return <-granted, nil
}

// Release is memlock's, over the link.
func (l *lossy) Release(ctx context.Context, c backend.Claim) error {
	return l.send(ctx, func() error { return l.Driver.Release(context.Background(), c) })
}

// Renew is memlock's, over the link.
func (l *lossy) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	backend.RenewEach(ctx, cs, done, func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
		return backend.Grant{}, l.send(ctx, func() (err error) {
			l.Driver.Renew(context.Background(), []backend.Claim{c}, func(_ int, _ backend.Grant, e error) { err = e })
			return err
		})
	})
}

// polled hides that memlock is a Waiter, by a method of another form.
type polled struct{ *lossy }

// Wait is no backend.Waiter's.
func (polled) Wait() {}

// poll is how often a Wait checks that the store answers.
const poll = time.Second

// waits is a Waiter over a link. It leaves to the engine what its contract
// leaves to it: a Wait that is cut short may have left its claim in the store.
type waits struct{ *lossy }

// Wait is memlock's, with requests, replies and grants that are lost.
func (w waits) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	began := time.Now()
	answered := make(chan struct{})
	var g backend.Grant
	err := w.send(ctx, func() error { close(answered); return nil })
	if err != nil {
		select {
		case <-answered: // the request arrived: the claim is in the queue, and the engine must remove it
			go w.abandon(c)
		default:
		}
		return backend.Grant{}, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go w.watch(ctx, cancel)
	g, err = w.Driver.Wait(ctx, c)
	if out, ok := context.Cause(ctx).(outage); ok && err != nil {
		return backend.Grant{}, out
	}
	if err != nil {
		return backend.Grant{}, err
	}
	if w.silent() || w.dice() < w.bad/4 {
		return backend.Grant{}, outage{errNet, began} // the key is ours, and no reply says so
	}
	g.Until = time.Now().Add(c.TTL - backend.Drift(c.TTL))
	return g, nil
}

// watch ends a Wait when the store has not answered for a Timeout.
func (w waits) watch(ctx context.Context, end context.CancelCauseFunc) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(poll):
		}
		began := time.Now()
		for ctx.Err() == nil && w.send(ctx, func() error { return nil }) != nil {
			if time.Since(began) >= w.timeout {
				end(outage{errNet, began})
			}
		}
	}
}

// abandon waits in the queue for a caller that has given up, as a store does
// that was not asked to remove it.
func (w waits) abandon(c backend.Claim) {
	ctx, cancel := context.WithTimeout(context.Background(), w.timeout)
	defer cancel()
	_, _ = w.Driver.Wait(ctx, c)
}

// outage says since when the store has not answered.
type outage struct {
	error
	since time.Time
}

func (o outage) Since() time.Time { return o.since }
func (o outage) Unwrap() error    { return o.error }
