package hasp_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/memlock"
)

var errNet = errors.New("connection reset")

// faulty is a driver over the network whose store is in memory and works; what
// goes wrong on the way is up to the hooks. It polls, and records all calls.
type faulty struct {
	*memlock.Driver

	mu       sync.Mutex // guards all below
	acquire  func(c backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error)
	renew    func(ctx context.Context, c backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error)
	release  func(c backend.Claim, send func() error) error
	acquired []string // tokens
	renewed  []time.Time
	released []string
	ends     backend.Ends
	asking   int // Acquires under way
	crowd    int // most Acquires under way at once
}

func newFaulty() *faulty { return &faulty{Driver: memlock.New()} }

func (f *faulty) Traits() backend.Traits {
	return backend.Traits{Fenced: true, Reach: backend.Network, Ends: f.ends}
}

// until is call, left behind when ctx ends if f is to end its calls by itself.
func until[T any](f *faulty, ctx context.Context, call func() (T, error)) (T, error) {
	if f.ends == backend.EndsSometime {
		return call()
	}
	type answer struct {
		v   T
		err error
	}
	done := make(chan answer, 1)
	go func() {
		v, err := call()
		done <- answer{v, err}
	}()
	select {
	case a := <-done:
		return a.v, a.err
	case <-ctx.Done():
		var none T
		return none, errNet
	}
}

// Wait hides that memlock is a Waiter: the method set has another one.
func (f *faulty) Wait() {}

func (f *faulty) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	f.mu.Lock()
	hook := f.acquire
	f.acquired = append(f.acquired, c.Token)
	f.asking++
	f.crowd = max(f.crowd, f.asking)
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		f.asking--
		f.mu.Unlock()
	}()
	send := func() (backend.Grant, error) { return f.Driver.Acquire(ctx, c) }
	if hook == nil {
		return send()
	}
	return until(f, ctx, func() (backend.Grant, error) { return hook(c, send) })
}

func (f *faulty) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	var wg sync.WaitGroup
	for i, c := range cs {
		wg.Go(func() {
			g, err := f.renewOne(ctx, c)
			done(i, g, err)
		})
	}
	wg.Wait()
}

func (f *faulty) renewOne(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
	f.mu.Lock()
	hook := f.renew
	f.renewed = append(f.renewed, time.Now())
	f.mu.Unlock()
	send := func() (backend.Grant, error) {
		f.Driver.Renew(context.WithoutCancel(ctx), []backend.Claim{c}, func(_ int, got backend.Grant, e error) { g, err = got, e })
		return g, err
	}
	if hook == nil {
		return send()
	}
	return hook(ctx, c, send)
}

func (f *faulty) Release(ctx context.Context, c backend.Claim) error {
	f.mu.Lock()
	hook := f.release
	f.released = append(f.released, c.Token)
	f.mu.Unlock()
	send := func() error { return f.Driver.Release(ctx, c) }
	if hook == nil {
		return send()
	}
	_, err := until(f, ctx, func() (struct{}, error) { return struct{}{}, hook(c, send) })
	return err
}

// set changes the hooks while calls are under way.
func (f *faulty) set(change func(f *faulty)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

func (f *faulty) calls() (acquires, renews, releases int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.acquired), len(f.renewed), len(f.released)
}

// down makes every call fail without reaching the store.
func down(f *faulty) {
	f.acquire = func(backend.Claim, func() (backend.Grant, error)) (backend.Grant, error) {
		return backend.Grant{}, errNet
	}
	f.renew = func(context.Context, backend.Claim, func() (backend.Grant, error)) (backend.Grant, error) {
		return backend.Grant{}, errNet
	}
	f.release = func(backend.Claim, func() error) error { return errNet }
}

func up(f *faulty) { f.acquire, f.renew, f.release = nil, nil, nil }

// lockNow is a Lock that must succeed.
func lockNow(t *testing.T, l hasp.Locker, key string, opts ...hasp.Option) *hasp.Lease {
	t.Helper()
	lease, err := l.Lock(t.Context(), key, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return lease
}

// free reports whether a stranger can have key.
func free(t *testing.T, f *faulty, key string) bool {
	t.Helper()
	st, err := f.Inspect(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return !st.Held
}

func want(t *testing.T, what string, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Errorf("%s: got %v, want %v", what, err, target)
	}
}
