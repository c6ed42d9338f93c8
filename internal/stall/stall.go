// Package stall measures how long this process stood still, so that a test on a busy
// machine can tell a slow machine from a wrong program.
package stall

import "time"

// tick is the pause between two looks at the clock.
const tick = 10 * time.Millisecond

// Watch measures the longest time for which this process did not run a goroutine that
// was due. If probe is not nil, it calls probe with each look, so that the time of a
// server that stands still counts as well. It ends when the caller calls stop.
func Watch(probe func()) (stop func() time.Duration) {
	quit, longest := make(chan struct{}), make(chan time.Duration)
	go func() {
		var worst time.Duration
		last := time.Now()
		t := time.NewTicker(tick)
		defer t.Stop()

		for {
			ended := false
			select {
			case <-t.C:
			case <-quit:
				ended = true
			}
			if probe != nil {
				probe()
			}
			now := time.Now()
			worst, last = max(worst, now.Sub(last)-tick), now
			if ended {
				longest <- worst
				return
			}
		}
	}()

	return func() time.Duration {
		close(quit)
		return <-longest
	}
}
