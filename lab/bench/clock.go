package main

import (
	"time"

	"github.com/hasplock/hasp/internal/hostclock"
)

// started and shared are the same moment, by Go's clock and by the clock that
// all processes of the host share. Go's clock costs less to read.
var started, shared = synchronize()

// synchronize reads both clocks many times and keeps the closest pair.
func synchronize() (at time.Time, ns int64) {
	least := time.Hour
	for range 1000 {
		before := time.Now()
		n := hostclock.Now()
		if d := time.Since(before); d < least {
			least, at, ns = d, before.Add(d/2), n
		}
	}
	return at, ns
}

// now returns the time in nanoseconds of a clock that all processes of the host
// share.
func now() int64 { return shared + int64(time.Since(started)) }
