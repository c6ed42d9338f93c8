package hasp

import "time"

// Skip moves c's clock forward by d, as if the process had been stopped for d
// and only the caller had run since. No timer has fired.
func Skip(c *Client, d time.Duration) { c.clock.slept.Add(int64(d)) }
