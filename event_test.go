package hasp_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// An event of a call has the context of the call. The other events have the values of Lock's
// context, even if that has ended.
func TestObserveGetsTheContext(t *testing.T) {
	type keyOf struct{}
	var mu sync.Mutex
	got := map[hasp.EventKind]string{}
	o := &hasp.Options{TTL: time.Second, Observe: func(ctx context.Context, e hasp.Event) {
		mu.Lock()
		defer mu.Unlock()
		got[e.Kind] = fmt.Sprint(ctx.Value(keyOf{}), " ", ctx.Err() != nil)
	}}
	withClient(t, o, func(t *bench) {
		named := func(name string) context.Context { return context.WithValue(t.Context(), keyOf{}, name) }

		l := t.lockIn(named("lock"), "k")
		ended, cancel := context.WithCancel(named("unlock"))
		cancel()
		want(t, "Unlock", l.Unlock(ended), nil)

		lost, end := context.WithCancel(named("lost"))
		t.lockIn(lost, "lost")
		want(t, "TryLock", errOf(t.TryLock(named("try"), "lost")), hasp.ErrHeld)
		end()
		t.set(down)
		time.Sleep(5 * time.Second)
		t.set(up)
		t.Client.Close()

		for kind, want := range map[hasp.EventKind]string{
			hasp.EventRequested: "try false", hasp.EventAcquired: "lost false", hasp.EventRefused: "try false",
			hasp.EventReleased: "unlock true", hasp.EventLost: "lost false", hasp.EventRenewFailed: "lost false",
		} {
			equal(t, "the context of "+string(kind), got[kind], want)
		}
	})
}

// An event of an outage has the same error as the call. The end of a context of the engine does not
// look like the end of the caller's context.
func TestErrorsOfEvents(t *testing.T) {
	var s seen
	withClient(t, &hasp.Options{Observe: s.observe}, func(t *bench) {
		l := t.lock("k", hasp.WithFence())
		t.set(down)
		t.onRenew(untilEnd)
		time.Sleep(hasp.DefaultTTL * 2 / 3)
		want(t, "TryLock", t.tryErr("other"), hasp.ErrUnavailable)
		ctx := timeout(t, t.Context(), time.Second)
		wantOutage(t, "Lock", errOf(t.Lock(ctx, "other")), errNet, context.DeadlineExceeded)
		want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrUnavailable)
		synctest.Wait()

		failed, refused := s.of(hasp.EventRenewFailed), s.of(hasp.EventRefused)
		wantOutage(t, "renew failed", failed[0].Err)
		if e := failed[0]; e.Key != "k" || e.Fence == 0 || e.Fence != l.Fence() {
			t.Errorf("got %+v, want the key and its fence", e)
		}
		wantOutage(t, "refused", refused[0].Err)
		wantOutage(t, "refused when the context had ended", refused[1].Err, errNet, context.DeadlineExceeded)
		wantOutage(t, "released", s.of(hasp.EventReleased)[0].Err)
		t.set(up)
	})
}

// If an observer blocks, no lease is lost, no context ends late, and Close waits for Timeout at
// most.
func TestBlockedObserverCostsNoLease(t *testing.T) {
	var told atomic.Int32
	o := &hasp.Options{TTL: time.Second, Observe: func(_ context.Context, e hasp.Event) {
		if e.Kind == hasp.EventLost {
			told.Add(1)
			time.Sleep(10 * time.Second)
		}
	}}
	withClient(t, o, func(t *bench) {
		var healthy []*hasp.Lease
		for i := range 20 {
			healthy = append(healthy, t.lock(fmt.Sprint(i)))
		}
		for _, key := range []string{"broken", "broken, too"} {
			t.lock(key)
			t.faulty.Break(t.Context(), key)
		}
		time.Sleep(5 * time.Second)
		if n := told.Load(); n != 1 {
			t.Fatalf("%d losses told while the observer blocks on the first, want 1", n)
		}
		l := healthy[0]
		ctx := l.Context()
		t.faulty.Break(t.Context(), l.Key())
		lost := time.Now()
		<-ctx.Done()
		within(t, "the end of a context after the loss", lost, time.Second)
		for _, l := range healthy[1:] {
			unlock(t, l)
		}

		began := time.Now()
		t.Client.Close()
		within(t, "Close", began, 2*hasp.DefaultTimeout)
		time.Sleep(time.Minute) // until the observer returns
		equal(t, "losses told", told.Load(), 3)
	})
}

// While the observer lags far behind, events of failed renewals are dropped, and losses are kept.
func TestLaggingObserverIsBounded(t *testing.T) {
	var block chan struct{}
	counts := map[hasp.EventKind]int{}
	o := &hasp.Options{TTL: time.Second, Observe: func(_ context.Context, e hasp.Event) {
		if e.Kind == hasp.EventLost || e.Kind == hasp.EventRenewFailed {
			<-block
			counts[e.Kind]++
		}
	}}
	withClient(t, o, func(t *bench) {
		block = make(chan struct{}) // in the bubble
		const n = 3000
		for i := range n {
			t.lock(fmt.Sprint(i))
		}
		t.set(down)
		time.Sleep(2 * time.Second)
		close(block)
		synctest.Wait()
		if counts[hasp.EventLost] != n || counts[hasp.EventRenewFailed] < n || counts[hasp.EventRenewFailed] > 3*n {
			t.Errorf("%v, want %d lost and some thousand renewals", counts, n)
		}
	})
}

// A loss is reported even after Close. In the first case Observe still runs with EventAcquired when
// Close returns, and the goroutine that reports losses has ended. In the second case an Unlock
// finds the loss.
func TestLossIsReportedAfterClose(t *testing.T) {
	for _, tc := range []struct {
		observer, release time.Duration // how long Observe and a release take
		unlock            error
	}{
		{observer: 10 * time.Second, unlock: hasp.ErrClosed},
		{release: 500 * time.Millisecond, unlock: hasp.ErrLost},
	} {
		var s seen
		o := &hasp.Options{TTL: backend.MinTTL, Timeout: time.Second, Observe: func(ctx context.Context, e hasp.Event) {
			if e.Kind == hasp.EventAcquired {
				time.Sleep(tc.observer)
			}
			s.observe(ctx, e)
		}}
		withEnds(t, backend.CancelByDeadline, o, func(t *bench) {
			t.release = func(q *call) error {
				time.Sleep(tc.release)
				return backend.ErrLost
			}
			unlocked := make(chan error)
			go func() { l := t.lock("k"); unlocked <- l.Unlock(t.Context()) }()
			synctest.Wait()
			t.Client.Close()
			want(t, "Unlock", <-unlocked, tc.unlock)
			begin(t, s.lines(0), "0 lock k requested", "0 lock k acquired", "0 lock k lost")
		})
	}
}

// records is a slog.Handler that keeps each record as text.
type records struct {
	slog.Handler // nil; no logger adds attributes or groups
	least        slog.Level

	mu    sync.Mutex // guards all below
	lines []string
	ctxs  []context.Context
}

func (r *records) Enabled(_ context.Context, l slog.Level) bool { return l >= r.least }

func (r *records) Handle(ctx context.Context, rec slog.Record) error {
	line := rec.Level.String() + " " + rec.Message
	rec.Attrs(func(a slog.Attr) bool {
		if a.Key != "id" {
			line += " " + a.String()
		} else if a.Value.Uint64() == 0 {
			line += " no id"
		}
		return true
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = append(r.lines, line)
	r.ctxs = append(r.ctxs, ctx)
	return nil
}

// begin fails the test unless the lines begin with the texts in wanted.
func begin(t testing.TB, lines []string, wanted ...string) {
	t.Helper()
	if !slices.EqualFunc(lines, wanted, strings.HasPrefix) {
		t.Errorf("got  %q\nwant %q", lines, wanted)
	}
}

func TestLogEvents(t *testing.T) {
	r := &records{least: slog.LevelDebug}
	withClient(t, &hasp.Options{TTL: 10 * time.Second, Observe: hasp.LogEvents(slog.New(r))}, func(t *bench) {
		t.acquire = slow(time.Second)
		type keyOf struct{}
		l := t.lockIn(context.WithValue(t.Context(), keyOf{}, "trace"), "a b", hasp.WithFence())
		want(t, "TryLock", t.tryErr("a b"), hasp.ErrHeld)
		time.Sleep(2 * time.Second)
		unlock(t, l)

		t.set(up)
		t.lock("lost")
		t.faulty.Break(t.Context(), "lost")
		time.Sleep(10 * time.Second)
		t.lock("closed")
		t.set(down)
		want(t, "TryLock", t.tryErr("down"), hasp.ErrUnavailable)
		time.Sleep(3500 * time.Millisecond)
		t.set(up)
		t.Client.Close()

		for _, ctx := range r.ctxs[:2] {
			equal(t, "the value in the context of the call", ctx.Value(keyOf{}), "trace")
		}
		got := slices.DeleteFunc(r.lines, func(line string) bool { return strings.Contains(line, "requested") })
		last := got[len(got)-1] // after further failures of the renewal
		begin(t, append(slices.Clip(got[:8]), last),
			fmt.Sprintf(`DEBUG hasp: acquired key=a b op=lock wait=1s fence=%d`, l.Fence()),
			`DEBUG hasp: refused key=a b op=trylock wait=0s err=hasp: trylock "a b": held by another caller of this Client (a nested call needs the lease's context), 10s left`,
			fmt.Sprintf(`DEBUG hasp: released key=a b op=lock hold=2s fence=%d`, l.Fence()),
			`DEBUG hasp: acquired key=lost op=lock wait=0s`,
			`ERROR hasp: lost key=lost op=lock hold=`,
			`DEBUG hasp: acquired key=closed op=lock wait=0s`,
			`WARN hasp: refused key=down op=trylock wait=0s err=hasp: trylock "down": connection reset`,
			`WARN hasp: renew failed key=closed op=lock failures=1 err=connection reset`,
			`DEBUG hasp: lost key=closed op=lock hold=`)
		if !strings.HasSuffix(last, "err=client closed") {
			t.Errorf("got %q at last, want the lease that Close ended", last)
		}
		if strings.Contains(fmt.Sprint(r.lines), "no id") {
			t.Errorf("want an id in each of %q", r.lines)
		}
	})
}

// A lease that is held for ten terms is logged once, but not if Do holds it. A row of failed
// renewals is logged when it begins and when it ends.
func TestLogEventsOfLevelInfo(t *testing.T) {
	r := &records{least: slog.LevelInfo}
	withClient(t, &hasp.Options{Observe: hasp.LogEvents(slog.New(r))}, func(t *bench) {
		l := t.lock("forgotten")
		hasp.Do(t.Context(), t.Client, "used", func(context.Context, *hasp.Lease) error {
			time.Sleep(time.Hour)
			return nil
		})
		t.set(down)
		time.Sleep(hasp.DefaultTTL / 2) // a renewal fails, and the term outlasts the outage in any case
		t.set(up)
		time.Sleep(hasp.DefaultTTL)
		unlock(t, l)
		unlock(t, t.lock("unlocked"))
		t.Client.Close()
		begin(t, r.lines,
			"INFO hasp: still held key=forgotten op=lock hold=5m",
			"WARN hasp: renew failed key=forgotten op=lock failures=1 ",
			"INFO hasp: renewed key=forgotten op=lock failures=")
	})
}

// Without a logger, LogEvents uses the default logger, even if that is set later.
func TestLogEventsWithoutALogger(t *testing.T) {
	// SetDefault also redirects package log.
	defer log.SetFlags(log.Flags())
	defer log.SetOutput(log.Writer())
	defer slog.SetDefault(slog.Default())

	observe := hasp.LogEvents(nil)
	r := &records{}
	slog.SetDefault(slog.New(r))
	observe(t.Context(), hasp.Event{Kind: hasp.EventRenewFailed, Failures: 1, Err: errNet})
	begin(t, r.lines, "WARN")
}

// A wait of ten terms, or of a minute, is reported once, and names the holder.
func TestEventOfALongWait(t *testing.T) {
	var s seen
	withTwo(t, &hasp.Options{Owner: "me", Observe: s.observe}, func(t *bench, rival *hasp.Client) {
		theirs, mine := lockNow(t, rival, "theirs"), t.lock("mine")
		term := hasp.WithTTL(time.Second)
		t.Lock(timeout(t, t.Context(), 9*time.Second), "theirs", term)
		t.TryLock(t.Context(), "theirs", term)
		equal(t, "events of short waits", len(s.of(hasp.EventStillWaiting)), 0)

		t.Lock(timeout(t, t.Context(), 11*time.Second), "theirs", term)
		t.Lock(timeout(t, t.Context(), time.Hour), "mine")
		unlock(t, mine)
		unlock(t, theirs)

		got := s.of(hasp.EventStillWaiting)
		if len(got) != 2 {
			t.Fatalf("got %v", got)
		}
		var held *hasp.HeldError
		for i, e := range got {
			if !errors.As(e.Err, &held) || held.Here != (i == 1) || held.Owner == "" || held.RetryAfter <= 0 {
				t.Errorf("%s: got %+v", e.Key, e)
			}
		}
		if waited := got[1].Wait; waited < time.Minute || waited > time.Minute+time.Second {
			t.Errorf("got an event after %v", waited)
		}
	})
}
