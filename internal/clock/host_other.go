//go:build !linux

package clock

import "time"

// Now returns a time in nanoseconds. All processes of the host share its clock, which must not be
// set while hasp runs.
func Now() int64 { return time.Now().UnixNano() }

// SinceBoot returns no identifier, and the time of Now.
func SinceBoot() (boot string, up time.Duration) { return "", time.Duration(Now()) }

// suspended returns 0, because the standard library does not give access to the clocks that are
// needed. On Windows that is right, because Go's monotonic clock itself counts a suspend. On macOS
// and the BSDs hasp does not notice a suspend. A lease is then trusted for its term plus the time
// of the suspend.
func suspended() time.Duration { return 0 }
