//go:build !linux

package hasp

import "time"

// suspended is zero where the standard library has no way to a clock that
// counts a suspend apart from one that does not. On Windows Go's monotonic
// clock counts it itself. On macOS and the BSDs the clock does not notice a
// suspend: a lease is then trusted for its term plus the time of the suspend.
func suspended() time.Duration { return 0 }
