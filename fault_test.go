package hasp_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

var errNet = errors.New("connection reset")

// Driver has all methods of a driver of memlock.
type Driver interface {
	backend.Waiter
	backend.Inspector
	backend.Lister
}

// faulty is a driver that polls, and that is said to reach its store by a network. The store is in
// memory and works. The hooks decide what goes wrong on the way to it. faulty records all calls.
type faulty struct {
	Driver

	mu                      sync.Mutex // guards all below
	acquire, renew, release hook
	inspect                 hook     // of Inspect and Break
	acquired                []string // tokens of all calls of Acquire
	renewed                 []time.Time
	released                []string // tokens of all calls of Release
	ends                    backend.Cancellation
	cleans                  bool // must be set before New
}

func newFaulty() *faulty { return faultyOver(new(memlock.Store)) }

func faultyOver(store *memlock.Store) *faulty { return &faulty{Driver: store.Driver().(Driver)} }

func (f *faulty) Traits() backend.Traits {
	return backend.Traits{
		Fenced:       true,
		MinHold:      true,
		Shared:       true,
		Reach:        backend.Network,
		Cancellation: f.ends,
		Cleans:       f.cleans,
	}
}

// call is a call to a store, on its way there. A hook decides what becomes of it.
type call struct {
	ctx context.Context
	backend.Claim
	got      backend.Grant // the store's answer, which the hook may change
	carryOut execution
}

// execution has a store carry out a call.
type execution func() (backend.Grant, error)

type hook func(q *call) error

// send has the store carry out the call.
func (q *call) send() (err error) {
	q.got, err = q.carryOut()
	return err
}

// run makes a call with the hook h, or without one if h is nil.
func (h hook) run(ctx context.Context, c backend.Claim, carryOut execution) (backend.Grant, error) {
	q := &call{ctx: ctx, Claim: c, carryOut: carryOut}
	if h == nil {
		h = (*call).send
	}
	if err := h(q); err != nil {
		return backend.Grant{}, err
	}
	return q.got, nil
}

// leaving returns h, or with f.ends a hook that returns when the context of the call ends, and
// leaves h behind.
func (f *faulty) leaving(h hook) hook {
	if h == nil || f.ends == backend.CancelNone {
		return h
	}
	return func(q *call) error {
		done := make(chan error, 1)
		go func() { done <- h(q) }()
		select {
		case err := <-done:
			return err
		case <-q.ctx.Done():
			return errNet
		}
	}
}

// Wait hides memlock's Wait, so that faulty is no Waiter.
func (f *faulty) Wait() {}

func (f *faulty) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	f.mu.Lock()
	h := f.acquire
	f.acquired = append(f.acquired, c.Token)
	f.mu.Unlock()
	return f.leaving(h).run(ctx, c, func() (backend.Grant, error) {
		return f.Driver.Acquire(ctx, c)
	})
}

func (f *faulty) Renew(ctx context.Context, cs []backend.Claim,
	done func(int, backend.Grant, error)) {
	var wg sync.WaitGroup
	for i, c := range cs {
		wg.Go(func() { g, err := f.renewOne(ctx, c); done(i, g, err) })
	}
	wg.Wait()
}

func (f *faulty) renewOne(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	f.mu.Lock()
	h := f.renew
	f.renewed = append(f.renewed, time.Now())
	f.mu.Unlock()
	return h.run(ctx, c, func() (g backend.Grant, err error) {
		done := func(_ int, got backend.Grant, e error) { g, err = got, e }
		f.Driver.Renew(context.WithoutCancel(ctx), []backend.Claim{c}, done)
		return g, err
	})
}

func (f *faulty) Release(ctx context.Context, c backend.Claim) error {
	f.mu.Lock()
	h := f.release
	f.released = append(f.released, c.Token)
	f.mu.Unlock()
	_, err := f.leaving(h).run(ctx, c, func() (g backend.Grant, err error) {
		return g, f.Driver.Release(ctx, c)
	})
	return err
}

func (f *faulty) Inspect(ctx context.Context, key string) (st backend.Status, err error) {
	_, err = f.inspect.run(ctx, backend.Claim{}, func() (g backend.Grant, err error) {
		st, err = f.Driver.Inspect(ctx, key)
		return g, err
	})
	return st, err
}

func (f *faulty) Break(ctx context.Context, key string) error {
	_, err := f.inspect.run(ctx, backend.Claim{}, func() (g backend.Grant, err error) {
		return g, f.Driver.Break(ctx, key)
	})
	return err
}

// set changes the hooks under mu, because calls may be in flight.
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

func (f *faulty) attempts() int { n, _, _ := f.calls(); return n }

func (f *faulty) renewals() int { _, n, _ := f.calls(); return n }

func (f *faulty) releases() int { _, _, n := f.calls(); return n }

// slow takes d on the way to the store.
func slow(d time.Duration) hook {
	return func(q *call) error {
		time.Sleep(d)
		return q.send()
	}
}

// late takes d on the way back.
func late(d time.Duration) hook {
	return func(q *call) error {
		defer time.Sleep(d)
		return q.send()
	}
}

// trip takes half of d on the way to the store, and half of it on the way back.
func trip(d time.Duration) hook {
	return func(q *call) error {
		time.Sleep(d / 2)
		return late(d / 2)(q)
	}
}

// hung gets no answer, and fails much later.
var hung = hungFor(time.Hour)

// hungFor gets no answer, and fails after d.
func hungFor(d time.Duration) hook {
	return func(*call) error {
		time.Sleep(d)
		return errNet
	}
}

// untilEnd gets no answer, and ends with its context.
func untilEnd(q *call) error {
	<-q.ctx.Done()
	return q.ctx.Err()
}

// lostReply carries the command out and loses the answer.
func lostReply(q *call) error {
	q.send()
	return errNet
}

// failing fails with err, without reaching the store.
func failing(err error) hook { return func(*call) error { return err } }

// failWith makes every call fail with err, without reaching the store.
func failWith(f *faulty, err error) {
	f.acquire, f.renew, f.release = failing(err), failing(err), failing(err)
}

func down(f *faulty) { failWith(f, errNet) }

// onAcquire, onRenew and onRelease set one hook while calls may be in flight.
func (f *faulty) onAcquire(h hook) { f.set(func(f *faulty) { f.acquire = h }) }
func (f *faulty) onRenew(h hook)   { f.set(func(f *faulty) { f.renew = h }) }
func (f *faulty) onRelease(h hook) { f.set(func(f *faulty) { f.release = h }) }

func up(f *faulty) { f.acquire, f.renew, f.release = nil, nil, nil }

// bench is a test in a bubble of virtual time, with a Client over a faulty driver. If a test needs
// another driver, faulty is nil.
type bench struct {
	*testing.T
	*faulty
	*hasp.Client
}

// opened returns a Client over d, which is closed at the end of the test.
func opened(t testing.TB, d backend.Driver, o *hasp.Options) *hasp.Client {
	c := await.Value(hasp.New(d, o))
	t.Cleanup(func() { c.Close() })
	return c
}

// withClient runs a test on a bench. The Client is closed at the end.
func withClient(t *testing.T, o *hasp.Options, run func(t *bench)) {
	t.Helper()
	withEnds(t, backend.CancelNone, o, run)
}

// onBench is withClient with default options.
func onBench(t *testing.T, run func(t *bench)) {
	t.Helper()
	withClient(t, nil, run)
}

// withEnds is withClient with ends as the trait Cancellation.
func withEnds(t *testing.T, ends backend.Cancellation, o *hasp.Options, run func(t *bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		f.ends = ends
		t.Cleanup(func() { time.Sleep(2 * time.Hour) }) // until calls that hang have ended
		run(&bench{t, f, opened(t, f, o)})
	})
}

// runBubble, runClient and runEnds run a subtest in a bubble.
func runBubble(t *testing.T, name string, run func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, run) })
}

func runClient(t *testing.T, name string, o *hasp.Options, run func(t *bench)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { withClient(t, o, run) })
}

func runEnds(t *testing.T, name string, ends backend.Cancellation, o *hasp.Options,
	run func(t *bench)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { withEnds(t, ends, o, run) })
}

func (t *bench) lock(key string, opts ...hasp.Option) *hasp.Lease {
	t.Helper()
	return t.lockIn(t.Context(), key, opts...)
}

func (t *bench) lockIn(ctx context.Context, key string, opts ...hasp.Option) *hasp.Lease {
	t.Helper()
	return lockIn(t, t.Client, ctx, key, opts...)
}

func (t *bench) lockSoon(ctx context.Context, key string, opts ...hasp.Option) <-chan *hasp.Lease {
	t.Helper()
	return lockSoon(t, t.Client, ctx, key, opts...)
}

// lockErr and tryErr return the error of a Lock, or of a TryLock.
func (t *bench) lockErr(key string, opts ...hasp.Option) error {
	return errOf(t.Lock(t.Context(), key, opts...))
}

func (t *bench) tryErr(key string, opts ...hasp.Option) error {
	return errOf(t.TryLock(t.Context(), key, opts...))
}

// lockAll is a LockAll of the bench's Client.
func (t *bench) lockAll(keys []string, opts ...hasp.Option) (*hasp.Leases, error) {
	return hasp.LockAll(t.Context(), t.Client, keys, opts...)
}

func (t *bench) nothingLeft() {
	t.Helper()
	nothingLeft(t, t.Client)
}

// lockNow is a Lock that must succeed.
func lockNow(t testing.TB, l hasp.Locker, key string, opts ...hasp.Option) *hasp.Lease {
	t.Helper()
	return lockIn(t, l, t.Context(), key, opts...)
}

func lockIn(t testing.TB, l hasp.Locker, ctx context.Context, key string,
	opts ...hasp.Option) *hasp.Lease {
	t.Helper()
	lease, err := l.Lock(ctx, key, opts...)
	await.Must(t, err)
	return lease
}

// lockSoon begins a lockIn, and returns when that waits or has the key. It must run in a bubble.
func lockSoon(t testing.TB, l hasp.Locker, ctx context.Context, key string,
	opts ...hasp.Option) <-chan *hasp.Lease {
	t.Helper()
	got := make(chan *hasp.Lease, 1)
	go func() { got <- lockIn(t, l, ctx, key, opts...) }()
	synctest.Wait()
	return got
}

type (
	options = []hasp.Option
	leaseFn = func(context.Context, *hasp.Lease) error // the fn of Do and Lead
)

// seen collects events: observe is the Options.Observe of a Client.
type seen struct {
	mu  sync.Mutex // guards all
	all []hasp.Event
}

func (s *seen) observe(_ context.Context, e hasp.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, e)
}

// lines returns each event as a text. The first event has the number 0.
func (s *seen) lines(fence uint64) (lines []string) {
	for _, e := range s.all {
		lines = append(lines, fmt.Sprint(e.ID-s.all[0].ID, " ", e.Op, " ", e.Key, " ", e.Kind,
			" ", e.Wait, " ", e.Tries, " re-entry ", e.Reentry, " fence ", e.Fence == fence,
			" ", e.Hold, " held ", errors.Is(e.Err, hasp.ErrHeld)))
	}
	return lines
}

func (s *seen) of(kind hasp.EventKind) []hasp.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.all), func(e hasp.Event) bool { return e.Kind != kind })
}

// unlock is an Unlock of a Lease or of Leases that must succeed.
func unlock(t testing.TB, l interface{ Unlock(context.Context) error }) {
	t.Helper()
	if err := l.Unlock(t.Context()); err != nil {
		t.Errorf("unlock: %v", err)
	}
}

// nothingLeft fails the test if c has a line, a hold or a release to make.
func nothingLeft(t testing.TB, c *hasp.Client) {
	t.Helper()
	if lines, holds, reaps := hasp.Leftovers(c); lines+holds+reaps != 0 {
		t.Errorf("left: %d lines, %d holds, %d releases", lines, holds, reaps)
	}
}

// within fails the test if more than most has passed since start.
func within(t testing.TB, what string, start time.Time, most time.Duration) {
	t.Helper()
	if took := time.Since(start); took > most {
		t.Errorf("%s took %v, want at most %v", what, took, most)
	}
}

func (t *bench) free(key string) bool {
	t.Helper()
	st, err := t.faulty.Inspect(t.Context(), key)
	await.Must(t, err)
	return !st.Held
}

func errOf[T any](_ T, err error) error { return err }

// freed fails the test with the text otherwise unless all keys are free.
func (t *bench) freed(otherwise string, keys ...string) {
	t.Helper()
	for _, key := range keys {
		if !t.free(key) {
			t.Errorf("%s: %s", key, otherwise)
		}
	}
}

// equal fails the test unless got is want.
func equal[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// timeout returns a context inside ctx that ends after d.
func timeout(t testing.TB, ctx context.Context, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(ctx, d)
	t.Cleanup(cancel)
	return ctx
}

// want fails the test unless err matches target, or is nil if target is nil. If target is an error
// other than an outage that a caller tests for, err must not match ErrUnavailable as well.
func want(t testing.TB, what string, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Errorf("%s: got %v, want %v", what, err, target)
	}
	if slices.Contains(kinds, target) && errors.Is(err, hasp.ErrUnavailable) {
		t.Errorf("%s: %v matches ErrUnavailable and %v", what, err, target)
	}
}
