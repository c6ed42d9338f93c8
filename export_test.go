package hasp

import (
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/clock"
)

// Leftovers returns the number of c's callers and lines, of its holds, and of its tokens to
// release.
func Leftovers(c *Client) (callers, holds, reaps int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.queue.Callers + c.queue.Lines(), len(c.renewer.holds), len(c.reaper.queue)
}

// Suspendable returns a function that makes c's clock see that the machine has slept for d more.
// Call it before the first Lock.
func Suspendable(c *Client) func(d time.Duration) {
	var slept atomic.Int64
	suspended := func() time.Duration { return clock.Suspended() + time.Duration(slept.Load()) }
	c.clock = clock.New(suspended, c.traits.Reach == backend.Process)
	c.queue.Clock = c.clock
	return func(d time.Duration) { slept.Add(int64(d)) }
}

// Skip moves c's clock forward by d, as if the process had been stopped for d and only the caller
// had run since. No timer has fired.
func Skip(c *Client, d time.Duration) { c.clock.Skip(d) }

// ResumedTokens returns the number of tokens of handles that c has resumed and not forgotten.
func ResumedTokens(c *Client) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.renewer.resumed)
}

// Contended returns the number of keys in c's table of contended keys.
func Contended(c *Client) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.queue.ContendedKeys()
}
