package hasp_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// lostReply carries the command out and loses the answer.
func lostReply(_ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
	send()
	return backend.Grant{}, errNet
}

// onlyOnce has hook apply to the first attempt.
func onlyOnce(f *faulty, hook func(backend.Claim, func() (backend.Grant, error)) (backend.Grant, error)) {
	f.acquire = func(c backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
		f.set(func(f *faulty) { f.acquire = nil })
		return hook(c, send)
	}
}

func noTokenTwice(t *testing.T, f *faulty) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	tokens := slices.Sorted(slices.Values(f.acquired))
	if len(slices.Compact(tokens)) != len(f.acquired) {
		t.Errorf("a token was used for two attempts")
	}
}

func TestReplyLostOnAcquire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		onlyOnce(f, lostReply)
		c := hasp.New(f, nil)
		start := time.Now()
		l := lockNow(t, c, "k")
		if waited := time.Since(start); waited > 2*time.Second {
			t.Errorf("the key that the lost attempt held was had after %v", waited)
		}
		noTokenTwice(t, f)
		time.Sleep(time.Minute)
		synctest.Wait()
		if f.released[0] != f.acquired[0] {
			t.Errorf("released %v, want the token of the lost attempt first", f.released)
		}
		if err := l.Unlock(t.Context()); err != nil {
			t.Error(err)
		}
		c.Close()
	})
}

func TestReplyLostOnTryLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		c := hasp.New(f, nil)
		defer c.Close()
		for times := 1; times <= 2; times++ { // the goroutine that cleans up ends in between
			onlyOnce(f, lostReply)
			_, err := c.TryLock(t.Context(), "k")
			want(t, "TryLock", err, errNet)
			if errors.Is(err, hasp.ErrHeld) {
				t.Error("an outage was told as held")
			}
			synctest.Wait()
			if !free(t, f, "k") {
				t.Error("what the lost attempt took was not released")
			}
			time.Sleep(hasp.DefaultTimeout + time.Millisecond)
			synctest.Wait()
			if _, _, releases := f.calls(); releases != 2*times {
				t.Errorf("%d releases, want one at once and one after Timeout, %d times", releases, times)
			}
		}
	})
}

// The command reaches the store after the first clean-up has been there.
func TestAcquireThatOvertakesItsCleanUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		onlyOnce(f, func(_ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
			time.AfterFunc(time.Second, func() { send() })
			return backend.Grant{}, errNet
		})
		c := hasp.New(f, nil)
		defer c.Close()
		_, err := c.TryLock(t.Context(), "k")
		want(t, "TryLock", err, errNet)
		time.Sleep(time.Second + time.Millisecond)
		if free(t, f, "k") {
			t.Fatal("the late command did not land: nothing is tested")
		}
		time.Sleep(hasp.DefaultTimeout)
		if !free(t, f, "k") {
			t.Error("the late grant was left behind")
		}
	})
}

func TestCancelAfterTheCommandWasSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		onlyOnce(f, func(_ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
			time.Sleep(2 * time.Second)
			return send()
		})
		c := hasp.New(f, nil)
		defer c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		_, err := c.Lock(ctx, "k")
		if waited := time.Since(start); waited > time.Second+50*time.Millisecond {
			t.Errorf("returned %v after the end of its context", waited-time.Second)
		}
		want(t, "Lock", err, context.DeadlineExceeded)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if !free(t, f, "k") {
			t.Error("the grant that came after the caller had left was not released")
		}
	})
}

func TestReplyLostOnRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		c := hasp.New(f, nil)
		defer c.Close()
		l := lockNow(t, c, "k")
		f.release = func(_ backend.Claim, send func() error) error {
			send()
			return errNet
		}
		err := l.Unlock(t.Context())
		want(t, "Unlock", err, errNet)
		want(t, "Err", l.Err(), hasp.ErrReleased)
		f.set(up)
		time.Sleep(time.Second) // the background hears "not mine", which is success
		if err := l.Unlock(t.Context()); err != nil {
			t.Errorf("Unlock called again: %v", err)
		}
		want(t, "and again", l.Unlock(t.Context()), hasp.ErrReleased)
		if _, _, releases := f.calls(); releases != 2 {
			t.Errorf("%d releases, want the lost one and its repeat", releases)
		}
	})
}

func TestUnlockCalledAgainAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		c := hasp.New(f, nil)
		defer c.Close()
		l := lockNow(t, c, "k")
		f.set(down)
		want(t, "Unlock", l.Unlock(t.Context()), errNet)
		want(t, "again", l.Unlock(t.Context()), errNet)
		f.set(up)
		if err := l.Unlock(t.Context()); err != nil {
			t.Errorf("with the store back: %v", err)
		}
		want(t, "and again", l.Unlock(t.Context()), hasp.ErrReleased)
		time.Sleep(time.Minute)
		if _, renews, _ := f.calls(); renews != 0 {
			t.Errorf("%d renewals after Unlock", renews)
		}
		if lines, holds, reaps := hasp.Leftovers(c); lines+holds+reaps != 0 {
			t.Errorf("left: %d lines, %d holds, %d releases", lines, holds, reaps)
		}
	})
}

func TestUnlockDuringAnOutageThatOutlastsTheTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		c := hasp.New(f, nil)
		defer c.Close()
		l := lockNow(t, c, "k")
		f.set(down)
		want(t, "Unlock", l.Unlock(t.Context()), errNet)
		time.Sleep(hasp.DefaultTTL * 2)
		f.set(up)
		want(t, "Unlock after the term", l.Unlock(t.Context()), hasp.ErrLost)
	})
}

// A release that arrives late frees nobody else's hold.
func TestLateReleaseSparesTheSuccessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		c := hasp.New(f, nil)
		defer c.Close()
		l := lockNow(t, c, "k")
		f.release = func(_ backend.Claim, send func() error) error {
			time.AfterFunc(40*time.Second, func() { send() })
			return errNet
		}
		want(t, "Unlock", l.Unlock(t.Context()), errNet)
		f.set(up)
		next := lockNow(t, c, "k")
		time.Sleep(time.Minute)
		if err := next.Unlock(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestUnlockIgnoresTheEndOfItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		c := hasp.New(f, nil)
		defer c.Close()
		ctx, cancel := context.WithCancel(t.Context())
		l, err := c.Lock(ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		<-l.Context().Done()
		if err := l.Err(); err != nil {
			t.Errorf("Err is about the hold only, got %v", err)
		}
		if err := l.Unlock(ctx); err != nil {
			t.Error(err)
		}
		if !free(t, f, "k") {
			t.Error("the key is still held")
		}
	})
}

func TestUnlockOfAHungStoreReturnsWithinTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		c := hasp.New(f, nil)
		l := lockNow(t, c, "k")
		hang := make(chan struct{})
		f.set(func(f *faulty) {
			f.release = func(backend.Claim, func() error) error {
				<-hang
				return errNet
			}
		})
		start := time.Now()
		err := l.Unlock(t.Context())
		if took := time.Since(start); err == nil || took > hasp.DefaultTimeout+50*time.Millisecond {
			t.Errorf("got %v after %v", err, took)
		}
		close(hang)
		c.Close()
	})
}

// A lease that its deadline ended may still be kept in the store, by a renewal
// whose reply was lost. Its Unlock frees it rather than leave it to its term.
func TestUnlockOfALostLeaseFreesWhatTheStoreKeeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		f.renew = func(_ context.Context, _ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
			send()
			return backend.Grant{}, errNet
		}
		c := hasp.New(f, nil)
		defer c.Close()
		l := lockNow(t, c, "k")
		<-l.Context().Done()
		if free(t, f, "k") {
			t.Fatal("the store does not keep it: nothing is tested")
		}
		want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrLost)
		synctest.Wait()
		if !free(t, f, "k") {
			t.Error("the key was left to its term")
		}
	})
}

// What a driver that ends its calls by itself leaves behind is released too.
func TestCancelOfACallThatEndsPromptly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		f.ends = backend.EndsPromptly
		onlyOnce(f, func(_ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
			time.Sleep(2 * time.Second)
			return send()
		})
		c := hasp.New(f, nil)
		defer c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := c.Lock(ctx, "k")
		want(t, "Lock", err, context.DeadlineExceeded)
		time.Sleep(1500 * time.Millisecond)
		if free(t, f, "k") {
			t.Fatal("the late command did not land: nothing is tested")
		}
		time.Sleep(hasp.DefaultTimeout)
		synctest.Wait()
		if !free(t, f, "k") {
			t.Error("the grant that came after the caller had left was not released")
		}
	})
}

// An answer counts although the engine's own context of the call has ended by
// the time its caller looks: that takes long where many contexts derive from it.
func TestAnswerIsHeardHoweverLongItsContextTakesToEnd(t *testing.T) {
	c := hasp.New(prolific{newFaulty()}, &hasp.Options{TTL: time.Hour, Timeout: 10 * time.Minute})
	defer c.Close()
	l, err := c.TryLock(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Unlock(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// prolific derives many contexts from that of a call.
type prolific struct{ *faulty }

func (p prolific) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	for range 200_000 {
		_, cancel := context.WithCancel(ctx)
		_ = cancel // they end with ctx
	}
	return p.faulty.Acquire(ctx, c)
}

// A second Unlock waits for the first, and reports its outcome.
func TestTwoUnlocksAtOnce(t *testing.T) {
	for _, answered := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			f := newFaulty()
			f.release = func(_ backend.Claim, send func() error) error {
				time.Sleep(time.Second)
				if !answered {
					return errNet
				}
				return send()
			}
			c := hasp.New(f, nil)
			defer c.Close()
			l := lockNow(t, c, "k")
			first := make(chan error, 1)
			go func() { first <- l.Unlock(t.Context()) }()
			synctest.Wait()
			second := l.Unlock(t.Context())
			if answered {
				want(t, "second", second, hasp.ErrReleased)
				want(t, "first", <-first, nil)
			} else {
				want(t, "second", second, errNet)
				want(t, "first", <-first, errNet)
			}
		})
	}
}

// Every call of a Client after Close returns ErrClosed, including an Unlock whose
// outcome was unknown before.
func TestUnlockOfUnknownOutcomeAfterClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		f.release = func(backend.Claim, func() error) error { return errNet }
		c := hasp.New(f, nil)
		l := lockNow(t, c, "k")
		want(t, "Unlock", l.Unlock(t.Context()), errNet)
		c.Close()
		want(t, "after Close", l.Unlock(t.Context()), hasp.ErrClosed)
	})
}

// A part of the store that hangs does not keep the rest from being cleaned up.
func TestCleanUpPassesAHungPartOfTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		f.ends = backend.EndsPromptly
		f.acquire = lostReply
		f.release = func(c backend.Claim, send func() error) error {
			if c.Key != "well" {
				time.Sleep(time.Hour)
			}
			return send()
		}
		c := hasp.New(f, nil)
		for i := range 300 {
			if _, err := c.TryLock(t.Context(), fmt.Sprint("hung", i)); err == nil {
				t.Fatal("want no answer")
			}
			time.Sleep(time.Millisecond)
		}
		if _, err := c.TryLock(t.Context(), "well"); err == nil {
			t.Fatal("want no answer")
		}
		time.Sleep(hasp.DefaultTimeout)
		if !free(t, f, "well") {
			t.Error("the key is still held after a Timeout")
		}
		c.Close()
		time.Sleep(2 * time.Hour)
	})
}

// Repeated releases for that part do not keep the rest from clean-up either.
func TestCleanUpPassesTheRepeatsForAHungPart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		f.ends = backend.EndsPromptly
		f.acquire = lostReply
		f.release = func(c backend.Claim, send func() error) error {
			if c.Key != "well" {
				time.Sleep(hasp.DefaultTimeout)
				return errNet
			}
			return send()
		}
		c := hasp.New(f, nil)
		for i := range 3000 {
			if _, err := c.TryLock(t.Context(), fmt.Sprint("hung", i)); err == nil {
				t.Fatal("want no answer")
			}
			time.Sleep(10 * time.Millisecond)
		}
		if _, err := c.TryLock(t.Context(), "well"); err == nil {
			t.Fatal("want no answer")
		}
		time.Sleep(100 * time.Millisecond)
		if !free(t, f, "well") {
			t.Error("the key is still held")
		}
		c.Close()
		time.Sleep(time.Minute) // for calls that hang
	})
}

// The store may keep the key for as long as an Extend asked that was not
// answered. A release that was not answered either is repeated for as long.
func TestUnlockAfterAnExtendWithoutAReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		c := hasp.New(f, nil)
		defer c.Close()
		l := lockNow(t, c, "k")
		f.set(func(f *faulty) {
			f.renew = func(_ context.Context, _ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
				send()
				return backend.Grant{}, errNet
			}
		})
		want(t, "Extend", l.Extend(t.Context(), 10*time.Minute), errNet)
		f.set(down)
		want(t, "Unlock", l.Unlock(t.Context()), errNet)
		time.Sleep(40 * time.Second)
		f.set(up)
		time.Sleep(10 * time.Second)
		if !free(t, f, "k") {
			t.Error("the key is held 10 s after the outage")
		}
	})
}
