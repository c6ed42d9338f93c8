//go:build unix

package pglock_test

import (
	"testing"
	"time"
)

// until waits until f returns true. It gives a slow machine a minute.
func until(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !f(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}
