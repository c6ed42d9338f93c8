package hasp_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

// detachNow is a Detach that must succeed. The handle goes through JSON, as between two processes.
func detachNow(t testing.TB, l *hasp.Lease, ttl time.Duration) (x hasp.Handle) {
	t.Helper()
	made, err := l.Detach(t.Context(), ttl)
	text, err2 := json.Marshal(made)
	await.Must(t, errors.Join(err, err2, json.Unmarshal(text, &x)))
	return x
}

func (t *bench) resume(x hasp.Handle, opts ...hasp.Option) *hasp.Lease {
	t.Helper()
	l, err := t.Resume(t.Context(), x, opts...)
	await.Must(t, err)
	return l
}

func (t *bench) resumeErr(x hasp.Handle, opts ...hasp.Option) error {
	return errOf(t.Resume(t.Context(), x, opts...))
}

func detachErr(t testing.TB, l *hasp.Lease, ttl time.Duration) error {
	return errOf(l.Detach(t.Context(), ttl))
}

func TestDetachAndResume(t *testing.T) {
	withClient(t, &hasp.Options{Prefix: "p:"}, func(t *bench) {
		l := t.lock("k", hasp.WithFence(), hasp.WithLinger())
		ctx, cancel := context.WithCancel(l.Context()) // which does not read the clock
		defer cancel()
		x := detachNow(t, l, time.Minute)
		want(t, "the cause of the context", context.Cause(ctx), hasp.ErrReleased)
		want(t, "Err", l.Err(), hasp.ErrReleased)
		want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrReleased)
		want(t, "Detach again", detachErr(t, l, time.Minute), hasp.ErrReleased)
		t.nothingLeft()
		if left := time.Until(x.Until); left < time.Minute || left > time.Minute+time.Second {
			t.Error("Until", left)
		}
		time.Sleep(59 * time.Second)
		want(t, "TryLock", t.tryErr("k"), hasp.ErrHeld)
		if _, renews, releases := t.calls(); renews != 1 || releases != 0 {
			t.Errorf("%d renewals, %d releases", renews, releases)
		}

		l2 := t.resume(x)
		if l2.Fence() != l.Fence() || l2.Fence() == 0 || l2.Key() != "k" {
			t.Error("fences", l.Fence(), l2.Fence(), l2.Key())
		}
		time.Sleep(5 * time.Minute)
		want(t, "a lease that is renewed", l2.Err(), nil)
		inner := await.Value(t.TryLock(l2.Context(), "k"))
		before := t.renewals()
		for _, both := range []*hasp.Lease{l2, inner} {
			want(t, "Detach of a hold with two leases", detachErr(t, both, time.Minute), hasp.ErrInvalid)
		}
		equal(t, "renewals, of which none by a Detach that was refused", t.renewals(), before)
		unlock(t, inner)

		// A caller of the same Client waits for the key.
		next := t.lockSoon(t.Context(), "k")
		unlock(t, l2)
		unlock(t, <-next)
		want(t, "Resume of a released key", t.resumeErr(x), hasp.ErrLost)
		time.Sleep(time.Second)
		t.nothingLeft()
	})
}

// The Client that has detached a lease is closed. Another Client has the settings of the lease from
// the handle. The max hold ends as it would have ended without Detach, however long the call of
// Resume takes.
func TestResumeKeepsTheSettings(t *testing.T) {
	for name, tc := range map[string]struct {
		opts  []hasp.Option
		again []hasp.Option // options of Resume
		check func(t *bench, l *hasp.Lease)
	}{
		"min hold": {options{hasp.WithMinHold(time.Hour)}, nil, func(t *bench, l *hasp.Lease) {
			unlock(t, l)
			t.keptFor("k", time.Hour-22*time.Second)
		}},
		"max hold":             {options{hasp.WithMaxHold(2 * time.Minute)}, options{hasp.WithMaxHold(time.Hour)}, ends(98 * time.Second)},
		"a max hold of Resume": {options{hasp.WithMaxHold(time.Hour)}, options{hasp.WithMaxHold(2 * time.Second)}, ends(2 * time.Second)},
		"no renewal":           {nil, options{hasp.WithoutRenewal()}, ends(hasp.DefaultTTL)},
		"another term":         {nil, options{hasp.WithTTL(time.Hour), hasp.WithoutRenewal()}, ends(time.Hour)},
		"slot": {options{hasp.WithSlots(1)}, nil, func(t *bench, l *hasp.Lease) {
			want(t, "another slot", t.tryErr("k", hasp.WithSlots(1)), hasp.ErrHeld)
			unlock(t, t.lockIn(l.Context(), "k", hasp.WithSlots(1)))
		}},
		"shared": {options{hasp.WithShared()}, nil, func(t *bench, _ *hasp.Lease) {
			unlock(t, t.lock("k", hasp.WithShared()))
			want(t, "exclusive", t.tryErr("k"), hasp.ErrHeld)
		}},
	} {
		runTwo(t, name, nil, func(t *bench, other *hasp.Client) {
			x := detachNow(t, lockNow(t, other, "k", tc.opts...), time.Minute)
			want(t, "Close", other.Close(), nil)
			time.Sleep(20 * time.Second)
			t.onRenew(slow(2 * time.Second))
			l := t.resume(x, tc.again...)
			t.set(up)
			tc.check(t, l)
			if l.Unlock(t.Context()) == nil {
				t.freed("it is held after Unlock", "k", "k#0")
			}
		})
	}
}

// ends returns a check that the lease ends after d by itself, and no sooner.
func ends(d time.Duration) func(*bench, *hasp.Lease) {
	return func(t *bench, l *hasp.Lease) {
		early := backend.Drift(d) + time.Millisecond
		time.Sleep(d - early)
		want(t, "just before the end", l.Err(), nil)
		time.Sleep(2 * early)
		want(t, "after the end", l.Err(), hasp.ErrLost)
	}
}

// After an unknown outcome, Resume releases nothing and may be repeated. The store may keep the key
// for the whole time of Detach, so Unlock repeats the release for that long.
func TestResumeOfUnknownOutcome(t *testing.T) {
	for name, hook := range map[string]hook{
		"lost reply": lostReply,
		"down":       failing(errNet),
		"silence":    untilEnd,
		"late answer": func(q *call) error {
			err := q.send()
			q.got.Until = time.Now().Add(-1)
			return err
		},
	} {
		for _, prompt := range everyEnd {
			runEnds(t, fmt.Sprint(name, prompt), prompt, nil, func(t *bench) {
				x := detachNow(t, t.lock("k"), time.Hour)
				t.onRenew(hook)
				want(t, "Resume", t.resumeErr(x), hasp.ErrUnavailable)
				ctx, cancel := context.WithCancel(t.Context())
				cancel()
				want(t, "Resume with a context that has ended", errOf(t.Resume(ctx, x)), context.Canceled)
				t.set(up)
				time.Sleep(10 * time.Second)
				equal(t, "releases", t.releases(), 0)
				t.nothingLeft()

				l := t.resume(x)
				t.set(down)
				want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrUnavailable)
				time.Sleep(30 * time.Minute)
				t.set(up)
				time.Sleep(10 * time.Second)
				t.freed("the key is held after the outage", "k")
			})
		}
	}
}

// A Detach whose outcome is unknown leaves the lease to its caller. The store may keep the key for
// the time of Detach, so a release without an answer is repeated for that long.
func TestDetachOfUnknownOutcome(t *testing.T) {
	onBench(t, func(t *bench) {
		l := t.lock("k")
		t.onRenew(lostReply)
		want(t, "Detach", detachErr(t, l, time.Hour), hasp.ErrUnavailable)

		// Another caller re-enters during the call.
		var inner *hasp.Lease
		t.onRenew(func(q *call) error {
			inner = t.lockIn(l.Context(), "k")
			return q.send()
		})
		want(t, "Detach during a re-entry", detachErr(t, l, time.Hour), hasp.ErrInvalid)
		unlock(t, inner)
		t.set(up)
		time.Sleep(5 * time.Minute)
		want(t, "Err", l.Err(), nil)
		t.set(down)
		want(t, "Unlock", l.Unlock(t.Context()), errNet)
		time.Sleep(40 * time.Minute)
		t.set(up)
		time.Sleep(10 * time.Second)
		t.freed("the key is held 10 s after the outage", "k")
	})
}

func TestDetachAndResumeRefuse(t *testing.T) {
	onBench(t, func(t *bench) {
		good := detachNow(t, t.lock("k"), time.Minute)
		for target, changes := range map[error][]string{
			hasp.ErrInvalid: {
				`{"key": "", "token": "", "ttl_ns": 0}`,
				`{"token": ""}`,
				`{"token": "(kept)"}`, // the tokens of min holds, which may be guessed, are none of Detach
				`{"token": "kept-AAAAAAAAAAAAAAAAAAAAAA"}`,
				`{"ttl_ns": 0}`,
				`{"slot": 101}`,
			},
			hasp.ErrLost: {
				`{"token": "AAAAAAAAAAAAAAAAAAAAAA"}`,
				`{"key": "other"}`,
				`{"slot": 1}`,
				`{"max_hold": "1999-12-31T00:00:00Z"}`,
			},
		} {
			for _, change := range changes {
				x := good
				await.Must(t, json.Unmarshal([]byte(change), &x))
				want(t, "Resume with "+change, t.resumeErr(x), target)
			}
		}
		for i, o := range (options{
			hasp.WithFence(), hasp.WithMinHold(1), hasp.WithLinger(), hasp.WithShared(), hasp.WithSlots(2), hasp.WithMaxWait(time.Second), hasp.WithTTL(1),
		}) {
			want(t, fmt.Sprint("Resume with option ", i), t.resumeErr(good, o), hasp.ErrInvalid)
		}
		t.nothingLeft()
		other := opened(t, memlock.NewDriver(), nil)
		want(t, "Resume on another store", errOf(other.Resume(t.Context(), good)), hasp.ErrLost)
		want(t, "Close", other.Close(), nil)
		want(t, "Resume after Close", errOf(other.Resume(t.Context(), good)), hasp.ErrClosed)
		unlock(t, t.resume(good)) // the hold is as before

		late := detachNow(t, t.lock("k"), time.Minute)
		time.Sleep(2 * time.Minute)
		want(t, "Resume after the term", t.resumeErr(late), hasp.ErrLost)
		t.nothingLeft()

		want(t, "Detach of a key that is not UTF-8", detachErr(t, t.lock("\xff"), time.Minute), hasp.ErrInvalid)
		want(t, "Detach past the max hold", detachErr(t, t.lock("m", hasp.WithMaxHold(time.Minute)), time.Hour), hasp.ErrInvalid)
	})
}

// A second resumer gets an error, at once on the same Client, and later on another one. The Client
// refuses it before it calls the store. Otherwise that call could renew the hold just before the
// Unlock of the first lease, and return a lease on a free key.
func TestTwoResumers(t *testing.T) {
	withTwo(t, nil, func(t *bench, b *hasp.Client) {
		x := detachNow(t, t.lock("k"), time.Minute)
		l1 := t.resume(x)
		before := t.renewals()
		for range 2 {
			want(t, "Resume by the same Client", t.resumeErr(x), hasp.ErrInvalid)
		}
		equal(t, "renewals, of which none by a Resume that was refused", t.renewals(), before)
		l2 := await.Value(b.Resume(t.Context(), x))
		unlock(t, l1)
		time.Sleep(hasp.DefaultTTL / 2)
		want(t, "the second lease", l2.Err(), hasp.ErrLost)

		// An Unlock of the first lease would end the second one.
		x = detachNow(t, t.lock("k"), time.Minute)
		l1 = t.resume(x, hasp.WithTTL(time.Second), hasp.WithoutRenewal())
		time.Sleep(2 * time.Second)
		want(t, "Resume after the loss of the first lease", t.resumeErr(x), hasp.ErrInvalid)
		want(t, "Unlock of the first lease", l1.Unlock(t.Context()), hasp.ErrLost)
	})
}

func TestEventsOfDetachAndResume(t *testing.T) {
	var s seen
	withClient(t, &hasp.Options{Observe: s.observe}, func(t *bench) {
		var x hasp.Handle
		err := hasp.Do(t.Context(), t.Client, "k", func(_ context.Context, l *hasp.Lease) error {
			time.Sleep(time.Second)
			x = detachNow(t, l, time.Minute)
			return nil
		}, hasp.WithFence())
		want(t, "Do", err, nil)
		unlock(t, t.resume(x))
		want(t, "Resume", t.resumeErr(x), hasp.ErrLost)

		begin(t, s.lines(x.Fence),
			"0 lock k requested 0s 0 re-entry false fence false 0s",
			"0 lock k acquired 0s 1 re-entry false fence true 0s",
			"0 lock k detached 0s 0 re-entry false fence true 1s",
			"1 resume k requested 0s 0 re-entry false fence false 0s",
			"1 resume k acquired 0s 1 re-entry false fence true 0s",
			"1 resume k released 0s 0 re-entry false fence true 0s",
			"2 resume k requested 0s 0 re-entry false fence false 0s",
			"2 resume k refused 0s 1 re-entry false fence false 0s")
	})
}

func TestHandleIsPrintedWithoutItsToken(t *testing.T) {
	x := hasp.Handle{Key: "k", Token: "secret"}
	if got := x.LogValue().String(); got != `hasp.Handle("k")` {
		t.Errorf("a log has %s", got)
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x"} {
		if got := fmt.Sprintf(verb, x) + fmt.Sprintf(verb, &x); got != `hasp.Handle("k")hasp.Handle("k")` {
			t.Errorf("%s: %s", verb, got)
		}
	}
}

// Inside many leases, a context has all their keys, and the deadline of the outermost Lock's
// context.
func TestContextInsideManyLeases(t *testing.T) {
	held := func(ctx context.Context) (keys string) {
		for _, key := range []string{"outer", "inner", "a", "b", "", "inn"} {
			if hasp.Held(ctx, key) {
				keys += key + " "
			}
		}
		return keys
	}
	onBench(t, func(t *bench) {
		ctx := timeout(t, t.Context(), time.Hour)
		outer := t.lockIn(ctx, "outer")
		inner := t.lockIn(outer.Context(), "inner")
		all := await.Value(hasp.LockAll(inner.Context(), t.Client, []string{"a", "b"}))
		equal(t, "held", held(all.Context()), "outer inner a b ")
		wanted, _ := ctx.Deadline()
		got, _ := all.All()[1].Context().Deadline()
		equal(t, "deadline", got, wanted)
		unlock(t, all)
		unlock(t, inner)
		equal(t, "held after the Unlock of the inner lease", held(inner.Context()), "outer ")
		equal(t, "held without a lease", held(t.Context()), "")
		unlock(t, outer)
	})
}

// The token of a lease that was lost is forgotten once the store cannot have it any more.
func TestResumedTokensAreForgotten(t *testing.T) {
	onBench(t, func(t *bench) {
		for i := range 100 {
			x := detachNow(t, t.lock("k"), time.Minute)
			l := t.resume(x)
			await.Must(t, t.faulty.Break(t.Context(), "k"))
			if i%2 == 0 {
				want(t, "Extend", l.Extend(t.Context(), time.Minute), hasp.ErrLost)
			} else {
				want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrLost)
			}
			want(t, "Resume after the loss", t.resumeErr(x), hasp.ErrInvalid)
		}
		time.Sleep(time.Hour)
		unlock(t, t.resume(detachNow(t, t.lock("k"), time.Minute)))
		equal(t, "tokens", hasp.ResumedTokens(t.Client), 0)
	})
}
