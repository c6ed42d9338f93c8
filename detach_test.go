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

func TestDetachAndResume(t *testing.T) {
	withClient(t, &hasp.Options{Prefix: "p:"}, func(t *bench) {
		l := t.lock("k", hasp.WithFence(), hasp.WithLinger())
		ctx, cancel := context.WithCancel(l.Context()) // which does not read the clock
		defer cancel()
		x := detachNow(t, l, time.Minute)
		want(t, "the cause of the context", context.Cause(ctx), hasp.ErrReleased)
		want(t, "Err", l.Err(), hasp.ErrReleased)
		want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrReleased)
		want(t, "Detach again", errOf(l.Detach(t.Context(), time.Minute)), hasp.ErrReleased)
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
			want(t, "Detach of a hold with two leases", errOf(both.Detach(t.Context(), time.Minute)), hasp.ErrInvalid)
		}
		equal(t, "renewals, of which none by a Detach that was refused", t.renewals(), before)
		unlock(t, inner)

		// A caller of the same Client waits for the key.
		next := t.lockSoon(t.Context(), "k")
		unlock(t, l2)
		unlock(t, <-next)
		want(t, "Resume of a released key", errOf(t.Resume(t.Context(), x)), hasp.ErrLost)
		time.Sleep(time.Second)
		t.nothingLeft()
	})
}

// The Client that has detached a lease is closed. Another Client has the settings of the lease from
// the handle.
func TestResumeKeepsTheSettings(t *testing.T) {
	for name, tc := range map[string]struct {
		opts  []hasp.Option
		again []hasp.Option // options of Resume
		key   string        // as stored
		check func(t *bench, l *hasp.Lease)
		after time.Duration // how long the key stays taken after Unlock
	}{
		"min hold":             {options{hasp.WithMinHold(time.Hour)}, nil, "k", nil, 59 * time.Minute},
		"max hold":             {options{hasp.WithMaxHold(2 * time.Minute)}, options{hasp.WithMaxHold(time.Hour)}, "k", ends(2*time.Minute - 20*time.Second), 0},
		"a max hold of Resume": {options{hasp.WithMaxHold(time.Hour)}, options{hasp.WithMaxHold(2 * time.Second)}, "k", ends(2 * time.Second), 0},
		"no renewal":           {nil, options{hasp.WithoutRenewal()}, "k", ends(hasp.DefaultTTL), 0},
		"another term":         {nil, options{hasp.WithTTL(time.Hour), hasp.WithoutRenewal()}, "k", ends(time.Hour), 0},
		"slot": {options{hasp.WithSlots(1)}, nil, "k#0", func(t *bench, l *hasp.Lease) {
			want(t, "another slot", t.tryErr("k", hasp.WithSlots(1)), hasp.ErrHeld)
			unlock(t, t.lockIn(l.Context(), "k", hasp.WithSlots(1)))
		}, 0},
		"shared": {options{hasp.WithShared()}, nil, "k", func(t *bench, _ *hasp.Lease) {
			unlock(t, t.lock("k", hasp.WithShared()))
			want(t, "exclusive", t.tryErr("k"), hasp.ErrHeld)
		}, 0},
	} {
		runTwo(t, name, nil, func(t *bench, b *hasp.Client) {
			x := detachNow(t, t.lock("k", tc.opts...), time.Minute)
			want(t, "Close", t.Client.Close(), nil)
			time.Sleep(20 * time.Second)
			other := &bench{T: t.T, Client: b}
			l := other.resume(x, tc.again...)
			if tc.check != nil {
				tc.check(other, l)
			}
			unlocked := l.Unlock(t.Context())
			st, err := b.Inspect(t.Context(), tc.key)
			want(t, "Inspect", err, nil)
			if unlocked == nil && (st.Held != (tc.after > 0) || st.TTL < tc.after) {
				t.Errorf("after Unlock: %+v", st)
			}
		})
	}
}

// The max hold ends as it would have ended without Detach, however long the call of Resume takes.
func TestResumeDoesNotProlongTheMaxHold(t *testing.T) {
	withTwo(t, nil, func(t *bench, b *hasp.Client) {
		end := time.Now().Add(time.Minute)
		x := detachNow(t, lockNow(t, b, "k", hasp.WithMaxHold(time.Minute)), time.Minute)
		time.Sleep(45 * time.Second)
		t.onRenew(slow(2 * time.Second))
		l := t.resume(x)
		time.Sleep(time.Until(end))
		want(t, "at its end", l.Err(), hasp.ErrLost)
	})
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

// After an unknown outcome, Resume releases nothing and may be repeated.
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
				want(t, "Resume", errOf(t.Resume(t.Context(), x)), hasp.ErrUnavailable)
				ctx, cancel := context.WithCancel(t.Context())
				cancel()
				want(t, "Resume with a context that has ended", errOf(t.Resume(ctx, x)), context.Canceled)
				t.set(up)
				time.Sleep(10 * time.Second)
				equal(t, "releases", t.releases(), 0)
				t.nothingLeft()
				unlock(t, t.resume(x))
				t.freed("the key is held after Unlock", "k")
			})
		}
	}
}

// The store may keep the key for the whole time of Detach, so the release is repeated for that long.
func TestUnlockOfAResumedLeaseDuringAnOutage(t *testing.T) {
	withClient(t, nil, func(t *bench) {
		l := t.resume(detachNow(t, t.lock("k"), time.Hour))
		t.set(down)
		want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrUnavailable)
		time.Sleep(30 * time.Minute)
		t.set(up)
		time.Sleep(10 * time.Second)
		t.freed("the key is held after the outage", "k")
	})
}

// A Detach whose outcome is unknown leaves the lease to its caller.
func TestDetachOfUnknownOutcome(t *testing.T) {
	withClient(t, nil, func(t *bench) {
		l := t.lock("k")
		t.onRenew(lostReply)
		want(t, "Detach", errOf(l.Detach(t.Context(), time.Hour)), hasp.ErrUnavailable)

		// Another caller re-enters during the call.
		var inner *hasp.Lease
		t.onRenew(func(q *call) error {
			inner = t.lockIn(l.Context(), "k")
			return q.send()
		})
		want(t, "Detach during a re-entry", errOf(l.Detach(t.Context(), time.Hour)), hasp.ErrInvalid)
		unlock(t, inner)
		t.set(up)
		time.Sleep(5 * time.Minute)
		want(t, "Err", l.Err(), nil)
		unlock(t, l)
		t.freed("the key is held after Unlock", "k")
	})
}

func TestResumeRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		spoil func(x *hasp.Handle)
		opts  []hasp.Option
		want  error
	}{
		"no handle":          {func(x *hasp.Handle) { *x = hasp.Handle{} }, nil, hasp.ErrInvalid},
		"no token":           {func(x *hasp.Handle) { x.Token = "" }, nil, hasp.ErrInvalid},
		"no term":            {func(x *hasp.Handle) { x.TTL = 0 }, nil, hasp.ErrInvalid},
		"slot":               {func(x *hasp.Handle) { x.Slot = 101 }, nil, hasp.ErrInvalid},
		"an option":          {nil, options{hasp.WithFence()}, hasp.ErrInvalid},
		"a min hold":         {nil, options{hasp.WithMinHold(1)}, hasp.ErrInvalid},
		"linger":             {nil, options{hasp.WithLinger()}, hasp.ErrInvalid},
		"shared":             {nil, options{hasp.WithShared()}, hasp.ErrInvalid},
		"slots":              {nil, options{hasp.WithSlots(2)}, hasp.ErrInvalid},
		"a wait":             {nil, options{hasp.WithMaxWait(time.Second)}, hasp.ErrInvalid},
		"a term":             {nil, options{hasp.WithTTL(1)}, hasp.ErrInvalid},
		"another token":      {func(x *hasp.Handle) { x.Token = x.Token[1:] + x.Token[:1] }, nil, hasp.ErrLost},
		"another key":        {func(x *hasp.Handle) { x.Key = "other" }, nil, hasp.ErrLost},
		"another slot":       {func(x *hasp.Handle) { x.Slot = 1 }, nil, hasp.ErrLost},
		"max hold is over":   {func(x *hasp.Handle) { x.MaxHold = time.Now() }, nil, hasp.ErrLost},
		"the term has ended": {func(*hasp.Handle) { time.Sleep(2 * time.Minute) }, nil, hasp.ErrLost},
	} {
		runClient(t, name, nil, func(t *bench) {
			good := detachNow(t, t.lock("k"), time.Minute)
			x := good
			if tc.spoil != nil {
				tc.spoil(&x)
			}
			want(t, "Resume", errOf(t.Resume(t.Context(), x, tc.opts...)), tc.want)
			t.nothingLeft()
			if name != "the term has ended" {
				unlock(t, t.resume(good)) // the hold is as before
			}
		})
	}
}

func TestHandleOfAnotherStoreOrAClosedClient(t *testing.T) {
	withClient(t, nil, func(t *bench) {
		x := detachNow(t, t.lock("k"), time.Minute)
		other := await.Value(memlock.New(nil))
		want(t, "Resume on another store", errOf(other.Resume(t.Context(), x)), hasp.ErrLost)
		want(t, "Close", other.Close(), nil)
		want(t, "Resume after Close", errOf(other.Resume(t.Context(), x)), hasp.ErrClosed)
		l := t.lock("\xff")
		want(t, "Detach of a key that is not UTF-8", errOf(l.Detach(t.Context(), time.Minute)), hasp.ErrInvalid)
		unlock(t, l)
		l = t.lock("m", hasp.WithMaxHold(time.Minute))
		want(t, "Detach past the max hold", errOf(l.Detach(t.Context(), time.Hour)), hasp.ErrInvalid)
		unlock(t, l)
	})
}

// A second resumer gets an error, at once on the same Client, and later on another one.
func TestTwoResumers(t *testing.T) {
	withTwo(t, nil, func(t *bench, b *hasp.Client) {
		x := detachNow(t, t.lock("k"), time.Minute)
		l1 := t.resume(x)
		want(t, "Resume by the same Client", errOf(t.Resume(t.Context(), x)), hasp.ErrInvalid)
		l2 := (&bench{T: t.T, Client: b}).resume(x)
		unlock(t, l1)
		time.Sleep(hasp.DefaultTTL / 2)
		want(t, "the second lease", l2.Err(), hasp.ErrLost)
		want(t, "Unlock of the second lease", l2.Unlock(t.Context()), hasp.ErrLost)

		// An Unlock of the first lease would end the second one.
		x = detachNow(t, t.lock("k"), time.Minute)
		l1 = t.resume(x, hasp.WithTTL(time.Second), hasp.WithoutRenewal())
		time.Sleep(2 * time.Second)
		want(t, "Resume after the loss of the first lease", errOf(t.Resume(t.Context(), x)), hasp.ErrInvalid)
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
		want(t, "Resume", errOf(t.Resume(t.Context(), x)), hasp.ErrLost)

		var got []string
		for _, e := range s.all {
			got = append(got, fmt.Sprint(e.ID-s.all[0].ID, " ", e.Op, " ", e.Kind, " ", e.Fence == x.Fence, " ", e.Hold, " ", e.Tries))
		}
		wanted := []string{"0 lock requested false 0s 0", "0 lock acquired true 0s 1", "0 lock detached true 1s 0",
			"1 resume requested false 0s 0", "1 resume acquired true 0s 1", "1 resume released true 0s 0",
			"2 resume requested false 0s 0", "2 resume refused false 0s 1"}
		if fmt.Sprintf("%q", got) != fmt.Sprintf("%q", wanted) {
			t.Errorf("got  %q\nwant %q", got, wanted)
		}
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

func TestHeld(t *testing.T) {
	withClient(t, nil, func(t *bench) {
		outer := t.lock("outer")
		inner := t.lockIn(outer.Context(), "inner")
		all := await.Value(hasp.LockAll(inner.Context(), t.Client, []string{"a", "b"}))
		for key, held := range map[string]bool{"outer": true, "inner": true, "a": true, "b": true, "": false, "inn": false} {
			equal(t, "Held of "+key, hasp.Held(all.Context(), key), held)
		}
		unlock(t, all)
		unlock(t, inner)
		if hasp.Held(inner.Context(), "inner") || !hasp.Held(inner.Context(), "outer") || hasp.Held(t.Context(), "outer") {
			t.Error("after the Unlock of the inner lease, or without a lease")
		}
		unlock(t, outer)
	})
}

// While a Client resumes a handle, or has the lease of a Resume, a second Resume is refused before
// it calls the store. Otherwise its call could renew the hold just before the Unlock of the first
// lease, and return a lease on a free key. A Resume that has failed may be repeated.
func TestSecondResumeDuringAnUnlock(t *testing.T) {
	withTwo(t, nil, func(t *bench, rival *hasp.Client) {
		x := detachNow(t, t.lock("k"), time.Minute)
		t.onRenew(failing(errNet))
		want(t, "Resume during an outage", errOf(t.Resume(t.Context(), x)), hasp.ErrUnavailable)
		t.set(up)
		first := t.resume(x)

		t.onRenew(func(q *call) error {
			defer time.Sleep(20 * time.Millisecond) // the way back
			return q.send()
		})
		second := make(chan error)
		go func() { second <- errOf(t.Resume(t.Context(), x)) }()
		time.Sleep(10 * time.Millisecond)
		unlock(t, first)
		theirs := lockNow(t, rival, "k")
		want(t, "the second Resume", <-second, hasp.ErrInvalid)
		unlock(t, theirs)
	})
}

// No caller can resume a min hold: its token, which may be guessed, is not a token of Detach.
func TestResumeOfAMinHold(t *testing.T) {
	withClient(t, nil, func(t *bench) {
		l := t.lock("k", hasp.WithMinHold(time.Hour))
		token := t.acquired[0]
		unlock(t, l)
		for _, forged := range []string{"(kept)", "kept-" + token, "kept"} {
			_, err := t.Resume(t.Context(), hasp.Handle{Key: "k", Token: forged, TTL: time.Minute})
			want(t, "Resume of "+forged, err, hasp.ErrInvalid)
		}
		want(t, "Resume of the token", errOf(t.Resume(t.Context(), hasp.Handle{Key: "k", Token: token, TTL: time.Minute})), hasp.ErrLost)
	})
}

// The token of a lease that was lost is forgotten once the store cannot have it any more.
func TestResumedTokensAreForgotten(t *testing.T) {
	withClient(t, nil, func(t *bench) {
		for i := range 100 {
			x := detachNow(t, t.lock("k"), time.Minute)
			l := t.resume(x)
			await.Must(t, t.faulty.Break(t.Context(), "k"))
			if i%2 == 0 {
				want(t, "Extend", l.Extend(t.Context(), time.Minute), hasp.ErrLost)
			} else {
				want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrLost)
			}
			want(t, "Resume after the loss", errOf(t.Resume(t.Context(), x)), hasp.ErrInvalid)
		}
		time.Sleep(time.Hour)
		unlock(t, t.resume(detachNow(t, t.lock("k"), time.Minute)))
		equal(t, "tokens", hasp.ResumedTokens(t.Client), 0)
	})
}
