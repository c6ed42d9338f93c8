//go:build !linux

package hostclock

import "time"

// Now returns a time in nanoseconds. All processes of the host share its clock, which must not be
// set meanwhile.
func Now() int64 { return time.Now().UnixNano() }

// suspended returns 0, because the standard library does not give access to the clocks that are
// needed. On Windows Go's monotonic clock counts a suspend itself. On macOS and the BSDs hasp does
// not notice a suspend: a lease is then trusted for its term plus the time of the suspend.
func suspended() time.Duration { return 0 }
