// Package await lets a test wait for an event that must happen, on a machine of any speed. It waits
// much longer than any machine needs.
package await

import (
	"errors"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/stall"
)

// Patience is how long a test waits for an event.
const Patience = 90 * time.Second

// Must ends the test if err is not nil.
func Must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Value returns v, and panics if err is not nil.
func Value[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// Crowd skips a test with many goroutines if -short is set. In virtual time, such a test takes up
// to a hundred times as long with the race detector.
func Crowd(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("has a crowd, which takes long with -race")
	}
}

// Return calls f. If f does not return in time, the test fails.
func Return(t testing.TB, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(Patience):
		t.Fatalf("%s does not return", what)
	}
}

// Until calls f until it returns true.
func Until(t testing.TB, what string, f func() bool) {
	t.Helper()
	Success(t, what, func() error {
		if !f() {
			return errNot
		}
		return nil
	})
}

var errNot = errors.New("it is not so")

// Success calls f until it returns nil.
func Success(t testing.TB, what string, f func() error) {
	t.Helper()
	pause, end := time.Millisecond, time.Now().Add(Patience)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v: %v", what, Patience, err)
		}
		time.Sleep(pause)
		pause = min(2*pause, 20*time.Millisecond)
	}
}

// InTime calls f, which returns what is wrong. If something is wrong, the test fails if f returned
// within limit; if f took longer, InTime tries again. If f always takes longer, the test is
// skipped.
func InTime(t testing.TB, limit time.Duration, f func() (wrong string)) {
	t.Helper()
	again(t, limit, f, func() func() time.Duration {
		began := time.Now()
		return func() time.Duration { return time.Since(began) }
	})
}

// Undisturbed is InTime for an f that waits. If anything is wrong, the test fails unless this
// process or probe, such as a call to a server, stood still for longer than limit meanwhile.
func Undisturbed(t testing.TB, limit time.Duration, probe func(), f func() (wrong string)) {
	t.Helper()
	again(t, limit, f, func() func() time.Duration { return stall.Watch(probe) })
}

// again calls f until nothing is wrong, or until something is wrong and the delay that stop returns
// is within limit: then the test fails.
func again(t testing.TB, limit time.Duration, f func() (wrong string), watch func() (stop func() time.Duration)) {
	t.Helper()
	for range 20 {
		stop := watch()
		wrong := f()
		slow := stop()
		switch {
		case wrong == "":
			return
		case slow <= limit:
			t.Fatal(wrong)
		}
		t.Logf("tried again, because the machine was slow (%v, want %v at most): %s", slow, limit, wrong)
	}
	t.Skip("this machine is too slow")
}
