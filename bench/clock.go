package main

import (
	"time"

	"github.com/hasplock/hasp/internal/hostclock"
)

// started is one moment, by Go's clock and by one that all processes of the
// host share. Go's is the cheaper one to read.
var started, shared = synchronize()

// synchronize reads both clocks until that takes no time.
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

// now is a moment in nanoseconds that all processes of the host agree on.
func now() int64 { return shared + int64(time.Since(started)) }
