package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/memlock"
)

// Driver combines the interfaces that the drivers of memlock and of etcdlock implement.
type Driver interface {
	backend.Waiter
	backend.Inspector
	backend.Lister
}

// model is a store in memory with links that fail.
type model struct {
	mem    *memlock.Store
	waits  bool    // its drivers are Waiters
	bad    float64 // the probability that a link fails
	traits backend.Traits
	links  []*lossy
}

// inMemory opens a store in memory whose links fail. If waits is true, its drivers are Waiters.
func inMemory(waits bool) func(*testing.T, *rand.Rand) Store {
	return func(_ *testing.T, r *rand.Rand) Store {
		m := &model{mem: new(memlock.Store), waits: waits, bad: r.Float64() * 0.3}
		m.traits = backend.Traits{Fenced: true, MinHold: true, Shared: true, Reach: backend.Network,
			Ordered: waits && r.IntN(2) == 0}
		return m
	}
}

func (m *model) Link(r *rand.Rand, timeout time.Duration) (backend.Driver, Link) {
	l := &lossy{Driver: m.mem.Driver().(Driver), traits: m.traits, timeout: timeout, r: r,
		bad: m.bad}
	l.traits.Cancellation = backend.Cancellation(r.IntN(3))
	m.links = append(m.links, l)
	if m.waits {
		return waits{l}, l
	}
	return polled{l}, l
}

// Strike silences one link. Other faults happen at random, without a call of Strike.
func (m *model) Strike(r *rand.Rand, _ func()) (heal func()) {
	return m.links[r.IntN(len(m.links))].Silence()
}

func (m *model) Heal() {
	for _, l := range m.links {
		l.locked(func() { l.bad = 0 })
	}
}

// Skip ends the holds whose terms end within d. It does not shorten longer terms, because the few
// short skips of a run do not matter to such terms.
func (m *model) Skip(d time.Duration) {
	mem := m.mem.Driver().(Driver)
	for i := range KeyCount {
		st, err := mem.Inspect(context.Background(), Key(i))
		if err == nil && st.Held && st.TTL <= d {
			_ = mem.Break(context.Background(), Key(i))
		}
	}
}

func (m *model) Longest() time.Duration { return LongTerm }

func (m *model) Left() (held []string) {
	for i := range KeyCount {
		st, err := m.mem.Driver().(Driver).Inspect(context.Background(), Key(i))
		if err != nil || st.Held || len(st.Waiters) > 0 {
			held = append(held, fmt.Sprintf("%s: %+v, %v", Key(i), st, err))
		}
	}
	return held
}

// errNet is the error of a lossy link.
var errNet = errors.New("connection reset")

// lossy is a driver that calls a memlock driver over a link that fails. The link loses requests and
// replies, delivers requests late, and hangs.
type lossy struct {
	Driver
	traits  backend.Traits
	timeout time.Duration

	mu    sync.Mutex // guards all fields below
	r     *rand.Rand
	bad   float64 // the probability that the link fails
	quiet int     // the number of silences that have not ended
}

// Traits returns the model's traits, which may promise less than memlock's.
func (l *lossy) Traits() backend.Traits { return l.traits }

// locked calls f with l.mu held.
func (l *lossy) locked(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
}

// dice returns a random number below 1.
func (l *lossy) dice() (x float64) { l.locked(func() { x = l.r.Float64() }); return x }

func (l *lossy) upTo(d time.Duration) time.Duration { return time.Duration(l.dice() * float64(d)) }

// Silence loses everything that is sent from now on, without an error, until heal is called.
func (l *lossy) Silence() (heal func()) {
	l.locked(func() { l.quiet++ })
	return func() { l.locked(func() { l.quiet-- }) }
}

func (l *lossy) silent() (silent bool) { l.locked(func() { silent = l.quiet > 0 }); return silent }

// send lets the store carry out a request, unless the link fails. As with a real driver, the traits
// say whether the call of send ends with its context.
func (l *lossy) send(ctx context.Context, request func() error) error {
	done := make(chan error, 1)
	go func() { done <- l.travel(request) }()
	var end <-chan struct{}
	switch l.traits.Cancellation {
	case backend.CancelPrompt:
		end = ctx.Done()
	case backend.CancelByDeadline:
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

// travel carries a request to the store, and carries the reply back.
func (l *lossy) travel(request func() error) error {
	time.Sleep(l.upTo(3 * time.Millisecond))
	var bad float64
	l.locked(func() { bad = l.bad })
	if l.silent() {
		time.Sleep(l.timeout + l.upTo(l.timeout))
		return errNet
	}

	switch x := l.dice(); {
	case x < bad/4: // the request is lost
		return errNet
	case x < bad/2: // the reply is lost
		_ = request()
		return errNet
	case x < bad*3/4: // the request arrives late, while its sender cleans up
		time.Sleep(l.upTo(l.timeout * 9 / 10))
		_ = request()
		return errNet
	case x < bad: // the request or its reply is lost, and no error comes before a Timeout has passed
		if l.dice() < 0.5 {
			_ = request()
		}
		time.Sleep(l.timeout + l.upTo(l.timeout))
		return errNet
	}

	err := request()
	time.Sleep(l.upTo(3 * time.Millisecond))
	return err
}

// ask is like send, for a request that has a result.
func ask[T any](ctx context.Context, l *lossy, request func() (T, error)) (result T, err error) {
	results := make(chan T, 1)
	err = l.send(ctx, func() error {
		r, err := request()
		results <- r
		return err
	})

	if err == nil {
		result = <-results
	}
	return result, err
}

func (l *lossy) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return ask(ctx, l, func() (backend.Grant, error) {
		g, err := l.Driver.Acquire(context.Background(), c)
		g.Until = time.Time{} // a store over a network does not know the caller's clock
		return g, err
	})
}

func (l *lossy) Release(ctx context.Context, c backend.Claim) error {
	return l.send(ctx, func() error { return l.Driver.Release(context.Background(), c) })
}

func (l *lossy) Renew(ctx context.Context, cs []backend.Claim,
	done func(int, backend.Grant, error)) {
	backend.RenewEach(ctx, cs, done,
		func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
			return backend.Grant{}, l.send(ctx, func() (err error) {
				l.Driver.Renew(context.Background(), []backend.Claim{c},
					func(_ int, _ backend.Grant, e error) { err = e })
				return err
			})
		})
}

func (l *lossy) Inspect(ctx context.Context, key string) (backend.Status, error) {
	return ask(ctx, l, func() (backend.Status, error) {
		return l.Driver.Inspect(context.Background(), key)
	})
}

// polled is a driver that is not a Waiter: its method Wait hides the Wait of memlock's driver.
type polled struct{ *lossy }

// Wait has a different signature from the Wait of a backend.Waiter.
func (polled) Wait() {}

// poll is the interval at which a Wait checks that the store answers.
const poll = time.Second

// waits is a Waiter over a link. A Wait that ends early may have left its claim in the store. By
// the contract of Wait, the engine removes the claim.
type waits struct{ *lossy }

// Wait calls memlock's Wait over a link that loses requests, replies and grants.
func (w waits) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	began := time.Now()
	arrived := make(chan struct{})
	if err := w.send(ctx, func() error { close(arrived); return nil }); err != nil {
		select {
		case <-arrived: // the claim is in the queue, and the engine must remove it
			go w.abandon(c)
		default:
		}
		return backend.Grant{}, err
	}

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go w.watch(ctx, cancel)
	g, err := w.Driver.Wait(ctx, c)
	if out, ok := context.Cause(ctx).(*backend.UnavailableError); ok && err != nil {
		err = out
	}
	if err != nil {
		return backend.Grant{}, err
	}
	if w.silent() || w.dice() < w.bad/4 {
		// the key was granted, and the reply is lost
		return backend.Grant{}, &backend.UnavailableError{Since: began, Err: errNet}
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
				end(&backend.UnavailableError{Since: began, Err: errNet})
			}
		}
	}
}

// abandon leaves the claim of a caller that has given up in the queue, as a store does until it is
// asked to remove the claim.
func (w waits) abandon(c backend.Claim) {
	ctx, cancel := context.WithTimeout(context.Background(), w.timeout)
	defer cancel()
	_, _ = w.Driver.Wait(ctx, c)
}
