// Package stall measures how long this process stood still, so that a test on a busy machine can
// tell a slow machine from a wrong program.
package stall

import "time"

// tick is the time between two readings of the clock.
const tick = 10 * time.Millisecond

// Watch measures the longest time for which this process did not run a goroutine that was due. If
// probe is not nil, Watch calls it at each tick. If probe calls a server, the time for which that
// server stands still counts as well. The caller must call stop(), which returns the longest time.
func Watch(probe func()) (stop func() time.Duration) {
	quit := make(chan struct{})
	longest := make(chan time.Duration)
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
			worst = max(worst, now.Sub(last)-tick)
			last = now
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
