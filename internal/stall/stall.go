// Package stall measures how long this process stood still. With it, a test can tell a slow machine
// from a wrong program.
package stall

import "time"

// tick is how often Watch reads the clock.
const tick = 10 * time.Millisecond

// Watch measures until the caller calls stop, which returns the longest time for which this process
// did not run a goroutine that was due. If probe is not nil, Watch calls it at each tick. So if
// probe asks a server, the time for which the server stands still counts as well.
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
