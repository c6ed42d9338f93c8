package hasp

import (
	"sync/atomic"
	"time"
)

// Leftovers returns the number of c's callers and lines, of its holds, and of its tokens to
// release.
func Leftovers(c *Client) (callers, holds, reaps int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.queue.callers + len(c.queue.lines), len(c.renewer.holds), len(c.reaper.queue)
}

// Suspendable returns a function that makes c's clock see that the machine has slept for d more.
// Call it before the first Lock.
func Suspendable(c *Client) func(d time.Duration) {
	before := c.clock.suspended
	var slept atomic.Int64
	c.clock.suspended = func() time.Duration { return before() + time.Duration(slept.Load()) }
	return func(d time.Duration) { slept.Add(int64(d)) }
}

// Skip moves c's clock forward by d, as if the process had been stopped for d and only the caller
// had run since. No timer has fired.
func Skip(c *Client, d time.Duration) { c.clock.slept.Add(int64(d)) }

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
	return len(c.queue.contended.keys)
}
