// Package await lets a test wait for an event on a machine of any speed, because the package waits
// for much longer than any machine needs.
package await

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/stall"
)

// Patience is how long a test waits for an event.
const Patience = 90 * time.Second

// Timeout returns a context that ends with the test, and after d at the latest.
func Timeout(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// ErrorIs fails the test unless err matches target, or is nil if target is nil.
func ErrorIs(t testing.TB, what string, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Errorf("%s: got %v, want %v", what, err, target)
	}
}

// ErrorOf returns the error of a call that has another result.
func ErrorOf[T any](_ T, err error) error { return err }

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

// Crowd skips a test with many goroutines if -short is set, as with the race detector, which makes
// these tests in virtual time up to a hundred times as slow.
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

// Until calls f until f returns true.
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

// Success calls f until f returns nil.
func Success(t testing.TB, what string, f func() error) {
	t.Helper()
	pause := time.Millisecond
	end := time.Now().Add(Patience)
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

// Undisturbed calls f. If f returns a text, something is wrong, and the test fails. But if this
// process stood still for longer than limit while f ran, Undisturbed tries again. It also tries
// again if probe, such as a call to a server, took longer than limit. If every try was disturbed,
// the test is skipped.
func Undisturbed(t testing.TB, limit time.Duration, probe func(), f func() (wrong string)) {
	t.Helper()
	for range 20 {
		stop := stall.Watch(probe)
		wrong := f()
		still := stop()
		switch {
		case wrong == "":
			return
		case still <= limit:
			t.Fatal(wrong)
		}
		t.Logf("tried again, because the machine stood still (%v, want %v at most): %s", still,
			limit, wrong)
	}
	t.Skip("this machine is too slow")
}
