//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package filelock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

func TestStoppedProcessWithAGuardIsAnOutage(t *testing.T) {
	dir := t.TempDir()
	d := on(dir, nil)
	held := claim("k")
	acquire(t, d, held)
	c := play(t, "guard", dir, "k")
	c.Line(t)
	must(t, c.Pause())

	near := claim(neighbour("k"))
	for what, call := range map[string]func(ctx context.Context) error{
		"acquire": func(ctx context.Context) error { _, err := d.Acquire(ctx, near); return err },
		"release": func(ctx context.Context) error { return d.Release(ctx, held) },
		"break":   func(ctx context.Context) error { return d.Break(ctx, "k") },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
		defer cancel()
		err := call(ctx)
		outage(t, what, err, d.guardFile("guard", stripeOf("k")))
		if !strings.Contains(err.Error(), "if it is stopped, continue or end it") {
			t.Errorf("%s: %v does not say what to do", what, err)
		}
	}

	// An attempt at a held key needs no guard, and other stripes have other guards.
	refused(t, d, claim("k"), backend.ErrHeld)
	if s, err := d.Inspect(t.Context(), "k"); !s.Held || err != nil {
		t.Errorf("inspect says %+v, %v", s, err)
	}
	acquire(t, d, claim(stranger("k")))

	must(t, c.Kill()) // the kernel ends its guard
	release(t, d, held)
	acquire(t, d, near)
}

// anothersGuard locks the guard of key with another driver, as another process would.
func anothersGuard(t *testing.T, dir, key string) *guard {
	t.Helper()
	g, err := on(dir, nil).lockGuard(t.Context(), stripeOf(key))
	must(t, err)
	return g
}

func TestStuckGuardDelaysOnlyItsOwnRenewals(t *testing.T) {
	dir := t.TempDir()
	d := on(dir, nil)
	cs := []backend.Claim{claim("k"), claim(neighbour("k"))}
	stuck := len(cs)
	for i := range 40 {
		if key := fmt.Sprint("key ", i); stripeOf(key) != stripeOf("k") {
			cs = append(cs, claim(key))
		}
	}
	for i := range cs {
		acquire(t, d, cs[i])
	}

	g := anothersGuard(t, dir, "k")
	answered := make(chan int, len(cs))
	go func() {
		defer close(answered)
		d.Renew(t.Context(), cs, func(i int, _ backend.Grant, err error) {
			if err != nil {
				t.Errorf("claim %d: %v", i, err)
			}
			answered <- i
		})
	}()
	for range len(cs) - stuck {
		if i := <-answered; i < stuck {
			t.Errorf("claim %d was renewed without its guard", i)
		}
	}
	g.drop()
	for range answered {
		stuck--
	}
	if stuck != 0 {
		t.Errorf("%d claims were not answered", stuck)
	}
}

func TestCancelEndsTheWaitForAGuardAtOnce(t *testing.T) {
	dir := t.TempDir()
	defer anothersGuard(t, dir, "k").drop()
	d := on(dir, nil)
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	c := claim("k")
	c.Timeout = time.Hour
	result := make(chan error, 3)
	// One call polls the guard's file, and the other two wait for this process's turn.
	go func() { _, err := d.Acquire(ctx, c); result <- err }()
	go func() { result <- d.Release(ctx, c) }()
	go func() {
		d.Renew(ctx, []backend.Claim{c}, func(_ int, _ backend.Grant, err error) { result <- err })
	}()
	for len(d.turns[stripeOf("k")]) == 0 {
		<-time.After(time.Millisecond)
	}

	cancel(cause)
	for range cap(result) {
		// A call that begins after the cancel does not reach the guard.
		if err := <-result; !errors.Is(err, cause) {
			t.Errorf("got %v", err)
		}
	}
}
