//go:build !linux

package hasp

import "time"

// suspended is zero where the standard library has no way to a clock that
// counts a suspend apart from one that does not. On Windows Go's monotonic
// clock counts it itself.
func suspended() time.Duration { return 0 }
