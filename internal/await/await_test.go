package await

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// double is a testing.TB that records how the test ended.
type double struct {
	testing.TB
	end string
}

func (d *double) Helper()                   {}
func (d *double) Logf(string, ...any)       {}
func (d *double) Fatal(args ...any)         { d.stop("fail: " + fmt.Sprint(args...)) }
func (d *double) Skip(args ...any)          { d.stop("skip") }
func (d *double) Fatalf(f string, a ...any) { d.stop("fail: " + fmt.Sprintf(f, a...)) }
func (d *double) stop(end string)           { d.end = end; panic(d) }

// takes returns an f for Undisturbed. Each call lasts for the next of times and returns "wrong".
// After the last of times, nothing is wrong.
func takes(times ...time.Duration) func() string {
	return func() string {
		if len(times) == 0 {
			return ""
		}
		time.Sleep(times[0])
		times = times[1:]
		return "wrong"
	}
}

func TestEnds(t *testing.T) {
	for name, c := range map[string]struct {
		f     func(t testing.TB)
		end   string
		after time.Duration
	}{
		"right": {func(t testing.TB) {
			Undisturbed(t, time.Second, nil, takes())
		}, "", 0},
		"waits and is wrong": {func(t testing.TB) {
			Undisturbed(t, time.Second, nil, takes(time.Hour))
		}, "fail: wrong", time.Hour},
		"the probe is slow": {func(t testing.TB) {
			Undisturbed(t, time.Second, func() { time.Sleep(2 * time.Second) }, takes(time.Second))
		}, "", 2 * time.Second},
		"the probe is always slow": {func(t testing.TB) {
			Undisturbed(t, time.Second, func() {
				time.Sleep(2 * time.Second)
			}, func() string { return "wrong" })
		}, "skip", 40 * time.Second},
		"no event": {func(t testing.TB) { Until(t, "it", func() bool { return false }) },
			"fail: it: not within 1m30s: it is not so", Patience},
		"no return": {func(t testing.TB) { Return(t, "it", func() { time.Sleep(time.Hour) }) },
			"fail: it does not return", Patience},
		"an error": {func(t testing.TB) { Must(t, errors.New("never")) }, "fail: never", 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				defer time.Sleep(2 * time.Hour) // until calls that do not return have ended
				began := time.Now()
				d := &double{}
				func() {
					defer func() { recover() }() // of the method stop
					c.f(d)
				}()
				if after := time.Since(began); d.end != c.end || after < c.after {
					t.Errorf("got %q after %v, want %q after %v", d.end, after, c.end, c.after)
				}
			})
		})
	}
}
