package hasp_test

import (
	"context"
	"fmt"
	"iter"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

// trap is a context whose methods call spring.
type trap struct {
	context.Context
	spring func(method string)
}

func (c trap) Done() <-chan struct{} { c.spring("Done"); return c.Context.Done() }

func (c trap) Err() error { c.spring("Err"); return c.Context.Err() }

// If code of the caller panics or ends the goroutine during Lock, Lock leaves nothing behind.
func TestLockThatDoesNotReturn(t *testing.T) {
	for _, tc := range []struct {
		where string
		taken bool // another Client holds the key
		first bool // another caller of this Client is the head of the line
		opts  []hasp.Option
		more  []hasp.Option // only of the call
	}{
		{where: "requested"},
		{where: "acquired"},
		{where: "acquired", opts: options{shared}},
		{where: "acquired", more: options{hasp.WithMinHold(time.Hour)}},
		{where: "acquired", opts: options{oneSlot}},
		{where: "acquired", first: true},
		{where: "Backoff", taken: true},
		{where: "Backoff", taken: true, opts: options{shared}},
		{where: "Err", taken: true},
		{where: "Done", taken: true},
		{where: "Done", taken: true, first: true},
		{where: "Err", taken: true, first: true, more: options{hasp.WithFence()}}, // no hold is handed over
		{where: "Done", taken: true, opts: options{oneSlot}},
		{where: "Err", taken: true, opts: options{oneSlot}},
		{where: "Backoff", taken: true, first: true, opts: options{oneSlot}},
	} {
		for _, ordered := range []bool{false, true} {
			runBubble(t, fmt.Sprintf("%+v ordered=%t", tc, ordered), func(t *testing.T) {
				var armed atomic.Bool
				how := func() { panic("the caller's") }
				spring := func(where string) {
					if where == tc.where && armed.Swap(false) {
						how()
					}
				}

				store := new(memlock.Store)
				d := store.Driver()
				if !ordered {
					d = faultyOver(store)
				}
				c := opened(t, d, &hasp.Options{
					Observe: func(_ context.Context, e hasp.Event) { spring(string(e.Kind)) },
					Backoff: func(int) time.Duration { spring("Backoff"); return time.Second },
				})
				other := opened(t, store.Driver(), nil)

				for range 2 {
					var before *hasp.Lease
					if tc.taken {
						before = lockNow(t, other, "k", tc.opts...)
					}
					var ahead <-chan *hasp.Lease
					if tc.first {
						ahead = lockSoon(t, c, t.Context(), "k", tc.opts...)
					}

					ended := make(chan struct{})
					go func() {
						defer close(ended)
						defer func() { recover() }()
						if tc.where != "Err" {
							armed.Store(true)
						} else {
							time.AfterFunc(time.Second, func() { armed.Store(true) }) // not the first Err, because Lock calls it before it has acquired anything
						}
						opts := slices.Concat(tc.opts, tc.more)
						if l, err := c.Lock(trap{t.Context(), spring}, "k", opts...); err == nil {
							unlock(t, l) // with this driver, the code that panics was not called
						}
					}()
					time.Sleep(5 * time.Second)
					if before != nil {
						unlock(t, before)
					}
					if tc.first {
						unlock(t, <-ahead)
					}
					<-ended
					armed.Store(false)

					// The key is free. No line has a head that has gone, or a caller that takes
					// no ticket.
					start := time.Now()
					unlock(t, lockNow(t, c, "k", tc.opts...))
					unlock(t, lockNow(t, other, "k", tc.opts...))
					within(t, "the next Lock", start, 2*time.Second)
					synctest.Wait()
					nothingLeft(t, c)
					how = runtime.Goexit // in the second round
				}
			})
		}
	}
}

func TestErrorOfAContextThatCannotBeCompared(t *testing.T) {
	onBench(t, func(t *bench) {
		l := t.lock("k")
		ctx := timeout(t, t.Context(), time.Second)
		want(t, "Lock", errOf(t.Lock(oddContext{ctx}, "k")), hasp.ErrHeld)
		unlock(t, l)
	})
}

// oddContext ends with an error that is a slice.
type oddContext struct{ context.Context }

type oddError []string

func (oddError) Error() string { return "odd" }

func (c oddContext) Err() error {
	if c.Context.Err() != nil {
		return oddError{}
	}
	return nil
}

// panicking is a driver whose calls run on the caller's goroutine. The method that armed names
// panics once.
type panicking struct {
	*waiting
	armed string
	after int // how many calls do not panic
}

func (d *panicking) spring(method string) {
	if d.armed != method {
		return
	}
	if d.after--; d.after < 0 {
		d.armed = ""
		panic("of a hook")
	}
}

func (d *panicking) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	d.spring("Renew")
	d.faulty.Renew(ctx, cs, done)
}

func (d *panicking) List(context.Context, string, time.Duration) iter.Seq2[backend.Entry, error] {
	return func(func(backend.Entry, error) bool) { d.spring("List") }
}

// A call that does not return has an unknown outcome. The Client goes on as after a lost reply: it
// renews a lease that is held, frees a key that is not, and has no call in flight.
func TestDriverThatPanics(t *testing.T) {
	for _, tc := range []struct {
		name, method string
		call         func(t *bench, l *hasp.Lease)
		after        int  // see panicking
		ended        bool // the lease of "k" has ended
	}{
		{name: "Lock", method: "Acquire", call: func(t *bench, _ *hasp.Lease) { t.lock("other") }},
		{name: "TryLock of a slot", method: "Acquire", call: func(t *bench, _ *hasp.Lease) { t.tryErr("other", oneSlot) }},
		{name: "Unlock", method: "Release", call: func(t *bench, l *hasp.Lease) { l.Unlock(t.Context()) }, ended: true},
		{name: "Extend", method: "Renew", call: func(t *bench, l *hasp.Lease) { l.Extend(t.Context(), time.Minute) }},
		{name: "Detach", method: "Renew", call: func(t *bench, l *hasp.Lease) { l.Detach(t.Context(), time.Minute) }},
		{name: "Resume", method: "Renew", after: 1, call: func(t *bench, l *hasp.Lease) {
			x := detachNow(t, l, time.Minute)
			defer func() { unlock(t, t.resume(x)) }() // the handle can still be resumed
			t.resume(x)
		}, ended: true},
		{name: "Break", method: "Break", call: func(t *bench, l *hasp.Lease) {
			defer l.Unlock(t.Context())
			t.Client.Break(t.Context(), "k")
		}, ended: true},
		{name: "List", method: "List", call: func(t *bench, _ *hasp.Lease) {
			for range t.Client.List(t.Context(), "") {
			}
		}},
	} {
		runBubble(t, tc.name, func(t *testing.T) {
			w := hooked{traits: inNoOrder}.over(new(memlock.Store))
			d := &panicking{w, "", tc.after}
			late := func(method string) hook {
				return func(q *call) error {
					defer d.spring(method)
					return q.send()
				}
			}
			w.acquire = late("Acquire")
			w.inspect = late("Break")
			w.release = func(q *call) error {
				d.spring("Release")
				return q.send()
			}
			b := &bench{t, w.faulty, opened(t, d, nil)}
			l := b.lock("k")
			d.armed = tc.method
			panics(t, tc.name, func() { tc.call(b, l) })

			time.Sleep(3 * hasp.DefaultTTL)
			if !tc.ended {
				unlock(t, l)
			}
			b.freed("not free", "k", "other", "other#0")
			unlock(t, b.lock("k"))
			unlock(t, b.lock("other"))
			synctest.Wait()
			b.nothingLeft()
			began := time.Now()
			await.Must(t, b.Client.Close())
			within(t, "Close", began, 0)
		})
	}
}

// A nil argument is refused, and changes nothing.
func TestNilArguments(t *testing.T) {
	onBench(t, func(t *bench) {
		var none context.Context
		if hasp.LeasesOf(none) != nil || hasp.Held(none, "k") {
			t.Error("there are leases in no context")
		}
		for name, do := range underLock {
			fn := func(context.Context, *hasp.Lease) error { t.Error("fn ran"); return nil }
			want(t, name+" without a context", do(none, t.Client, fn), hasp.ErrInvalid)
			want(t, name+" without a Locker", do(t.Context(), nil, fn), hasp.ErrInvalid)
			want(t, name+" with a nil Client", do(t.Context(), (*hasp.Client)(nil), fn), hasp.ErrInvalid)
		}
		l := t.lock("k")
		for what, err := range map[string]error{
			"Open":    errOf(hasp.Open(none, "memlock://", nil)),
			"New":     errOf(hasp.New(nil, nil)),
			"Do":      hasp.Do(t.Context(), t.Client, "other", nil),
			"DoAll":   hasp.DoAll(t.Context(), t.Client, []string{"other"}, nil),
			"Lock":    errOf(t.Lock(none, "other")),
			"TryLock": errOf(t.TryLock(none, "other")),
			"Unlock":  l.Unlock(none),
			"Extend":  l.Extend(none, time.Minute),
			"Detach":  errOf(l.Detach(none, time.Minute)),
			"Resume":  errOf(t.Resume(none, hasp.Handle{Key: "other", Token: "t", TTL: time.Minute})),
			"Inspect": errOf(t.Client.Inspect(none, "k")),
			"Break":   t.Client.Break(none, "k"),
		} {
			want(t, what, err, hasp.ErrInvalid)
		}
		for _, err := range t.Client.List(none, "") {
			want(t, "List", err, hasp.ErrInvalid)
		}
		t.freed("locked", "other")
		unlock(t, l)
	})
}

// Each EventRequested is followed by one event, also if the call does not return. If Observe panics
// when a lease is detached, no caller has the handle, so the key is freed.
func TestEventsOfCallsThatDoNotReturn(t *testing.T) {
	var s seen
	o := &hasp.Options{Backoff: func(int) time.Duration { panic("of the caller") }, Observe: func(ctx context.Context, e hasp.Event) {
		s.observe(ctx, e)
		if e.Kind == hasp.EventDetached {
			panic("of the caller")
		}
	}}
	withTwo(t, o, func(t *bench, rival *hasp.Client) {
		attempt := func(call func()) {
			defer func() { _ = recover() }()
			call()
			t.Error("the call has returned")
		}
		l := lockNow(t, rival, "k")
		attempt(func() { t.Lock(t.Context(), "k") })
		equal(t, "refusals", len(s.of(hasp.EventRefused)), 1)
		unlock(t, l)

		l = t.lock("k")
		attempt(func() { l.Detach(t.Context(), time.Hour) })
		synctest.Wait()
		t.freed("held without a handle", "k")
	})
}
