//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package filelock

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/crew"
)

// stopped starts a process that has the guard of key, and stops it.
func stopped(t *testing.T, dir, key string) *crew.Child {
	t.Helper()
	c := play(t, "guard", dir, key)
	c.Line(t)
	must(t, c.Pause())
	return c
}

func TestStoppedProcessWithAGuardIsNamed(t *testing.T) {
	dir := t.TempDir()
	d := New(dir, nil)
	held := claim("k")
	acquire(t, d, held)
	c := stopped(t, dir, "k")
	names := func(what string, err error) {
		t.Helper()
		outage(t, what, err, d.guardFile("guard", stripeOf("k")))
		if want := fmt.Sprintf("process %d ", c.Pid); !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v does not name %s", what, err, want)
		}
	}

	short := func(key string) backend.Claim {
		c := claim(key)
		c.Timeout = 150 * time.Millisecond
		return c
	}
	near, far := neighbour("k"), stranger("k")
	_, err := d.Acquire(t.Context(), short(near))
	names("acquire", err)
	mine := held
	mine.Timeout = 150 * time.Millisecond
	names("release", d.Release(t.Context(), mine))
	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
	defer cancel()
	names("break", d.Break(ctx, "k"))

	// An attempt at a held key needs no guard, and other stripes have their own.
	refused(t, d, claim("k"), backend.ErrHeld)
	if s, err := d.Inspect(t.Context(), "k"); !s.Held || err != nil {
		t.Errorf("inspect says %+v, %v", s, err)
	}
	others := claim(far)
	acquire(t, d, others)
	release(t, d, others)

	must(t, c.Resume())
	c.Finish(t)
	release(t, d, held)
	acquire(t, d, claim(near))
}

func TestGuardOfThisProcessIsNotNamedAsAnothers(t *testing.T) {
	d := New(t.TempDir(), nil)
	g, err := d.lockGuard(t.Context(), stripeOf("k"))
	must(t, err)
	defer g.drop()
	c := claim("k")
	c.Timeout = time.Millisecond
	_, err = d.Acquire(t.Context(), c)
	outage(t, "acquire", err, "locked by other calls of this process")
	if strings.Contains(err.Error(), "end it") {
		t.Error(err)
	}
}

func TestStuckGuardDelaysOnlyItsOwnRenewals(t *testing.T) {
	dir := t.TempDir()
	d := New(dir, nil)
	stuck := []backend.Claim{claim("k"), claim(neighbour("k"))}
	cs := append([]backend.Claim{}, stuck...)
	for i := range 40 {
		if key := fmt.Sprint("key ", i); stripeOf(key) != stripeOf("k") {
			cs = append(cs, claim(key))
		}
	}
	for i := range cs {
		acquire(t, d, cs[i])
	}
	c := stopped(t, dir, "k")

	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex // guards answers
	answers := map[int]error{}
	returned := make(chan struct{})
	all := make(chan struct{})
	go func() {
		defer close(returned)
		d.Renew(ctx, cs, func(i int, _ backend.Grant, err error) {
			mu.Lock()
			defer mu.Unlock()
			if answers[i] = err; len(answers) == len(cs)-len(stuck) {
				close(all)
			}
		})
	}()
	<-all // while the blocked claims wait: their timeout is 10 s
	mu.Lock()
	for i, err := range answers {
		if err != nil || i < len(stuck) {
			t.Errorf("claim %d: %v", i, err)
		}
	}
	mu.Unlock()
	// tryGuard has the turn for a moment, before the goroutine that calls lockGuard
	// starts. So both conditions mean that lockGuard waits for the guard.
	stacks := make([]byte, 1<<20)
	for !bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte("lockGuard")) || len(d.turns[stripeOf("k")]) == 0 {
		<-time.After(time.Millisecond)
	}
	cancel()
	<-returned
	for i := range stuck {
		outage(t, "renewal", answers[i], d.guardFile("guard", stripeOf("k")))
		if !errors.Is(answers[i], context.Canceled) {
			t.Errorf("claim %d: %v", i, answers[i])
		}
	}
	c.End()
	for _, err := range renew(d, cs...) {
		must(t, err)
	}
}

func TestCancelEndsTheWaitForAGuardAtOnce(t *testing.T) {
	dir := t.TempDir()
	stopped(t, dir, "k")
	d := New(dir, nil)
	cause := errors.New("enough")
	for _, inLine := range []bool{false, true} { // of this process's goroutines
		ctx, cancel := context.WithCancelCause(t.Context())
		c := claim("k")
		c.Timeout = time.Hour
		result := make(chan error, 2)
		go func() { _, err := d.Acquire(ctx, c); result <- err }()
		if inLine {
			go func() { result <- d.Release(ctx, c) }()
		}
		for len(d.turns[stripeOf("k")]) == 0 { // until one has this process's turn
			<-time.After(time.Millisecond)
		}
		start := time.Now()
		cancel(cause)
		for range cap(result) {
			if err := <-result; !errors.Is(err, cause) {
				t.Errorf("got %v", err)
			}
			if !inLine {
				break
			}
		}
		if took := time.Since(start); took > 5*time.Second {
			t.Errorf("returned after %v", took)
		}
	}
}
