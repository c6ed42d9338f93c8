package hasp_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/memlock"
)

func TestContextEndsAtTheDeadlineWhenTheStoreIsUnreachable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		c := hasp.New(f, nil)
		defer c.Close()
		start := time.Now()
		l := lockNow(t, c, "k")
		child, cancel := context.WithCancel(l.Context())
		defer cancel()
		f.set(down)
		<-child.Done()
		if got, want := time.Since(start), hasp.DefaultTTL-backend.Drift(hasp.DefaultTTL); got != want {
			t.Errorf("told after %v, want %v", got, want)
		}
		if free(t, f, "k") {
			t.Error("told after another could have held the key")
		}
		want(t, "cause", context.Cause(child), hasp.ErrLost)
		want(t, "Err", l.Err(), hasp.ErrLost)
		f.set(up)
		want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrLost)
		want(t, "second Unlock", l.Unlock(t.Context()), hasp.ErrLost)
	})
}

func TestContextEndsAtTheDeadlineWhenRenewHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		hang := make(chan struct{})
		// A driver that breaks its contract and ignores its context.
		f.renew = func(context.Context, backend.Claim, func() (backend.Grant, error)) (backend.Grant, error) {
			<-hang
			return backend.Grant{}, errNet
		}
		c := hasp.New(f, nil)
		start := time.Now()
		l := lockNow(t, c, "k")
		<-l.Context().Done()
		if got, want := time.Since(start), hasp.DefaultTTL-backend.Drift(hasp.DefaultTTL); got != want {
			t.Errorf("told after %v, want %v", got, want)
		}
		close(hang)
		c.Close()
	})
}

func TestLossIsToldAtOnceWhenTheStoreSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		var events []hasp.Event
		c := hasp.New(f, &hasp.Options{Observe: func(e hasp.Event) { events = append(events, e) }})
		defer c.Close()
		start := time.Now()
		l := lockNow(t, c, "k")
		if err := f.Break(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		<-l.Context().Done()
		if got := time.Since(start); got > hasp.DefaultTTL/3 {
			t.Errorf("told after %v, want at the first renewal", got)
		}
		want(t, "cause", context.Cause(l.Context()), hasp.ErrLost)
		synctest.Wait()
		if n := len(events); n != 2 || events[1].Kind != hasp.EventLost || events[1].Err != hasp.ErrLost || events[1].Hold <= 0 {
			t.Errorf("got events %v, want acquired and lost", events)
		}
	})
}

func TestSuspendOfTheMachineEndsALease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := hasp.New(newFaulty(), nil)
		defer c.Close()
		suspend := hasp.Suspendable(c)
		l := lockNow(t, c, "k")
		suspend(time.Minute)
		start := time.Now()
		<-l.Context().Done()
		if got := time.Since(start); got > time.Second {
			t.Errorf("noticed after %v, want within a second", got)
		}
		want(t, "cause", context.Cause(l.Context()), hasp.ErrLost)
	})
}

func TestGrantThatComesTooLateIsGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		f.acquire = func(c backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
			send()
			time.Sleep(c.TTL)
			return backend.Grant{}, nil
		}
		c := hasp.New(f, &hasp.Options{TTL: time.Second})
		defer c.Close()
		_, err := c.TryLock(t.Context(), "k")
		if err == nil || errors.Is(err, hasp.ErrHeld) {
			t.Errorf("got %v, want an outage", err)
		}
		synctest.Wait()
		if !free(t, f, "k") {
			t.Error("the late grant was not released")
		}
	})
}

func TestMaxHoldIsPassedByNoRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty()
		c := hasp.New(f, &hasp.Options{TTL: time.Second})
		defer c.Close()
		start := time.Now()
		l := lockNow(t, c, "k", hasp.WithMaxHold(5500*time.Millisecond))
		want(t, "Extend past it", l.Extend(t.Context(), time.Minute), hasp.ErrInvalid)
		<-l.Context().Done()
		if got := time.Since(start); got != 5500*time.Millisecond {
			t.Errorf("ended after %v, want 5.5s", got)
		}
		want(t, "cause", context.Cause(l.Context()), hasp.ErrLost)
		want(t, "Unlock", l.Unlock(t.Context()), hasp.ErrLost)
		synctest.Wait()
		if !free(t, f, "k") {
			t.Error("Unlock left the key to its term")
		}
	})
}

func TestDeadlineIsThatOfLocksContext(t *testing.T) {
	c := hasp.New(memlock.New(), nil)
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	l, err := c.Lock(ctx, "k")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Unlock(ctx)
	want, _ := ctx.Deadline()
	if got, ok := l.Context().Deadline(); !ok || !got.Equal(want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if left := time.Until(l.Expires()); left <= 0 || left > hasp.DefaultTTL {
		t.Errorf("lease expires in %v", left)
	}
}
