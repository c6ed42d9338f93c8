//go:build walljump

package walljump

import "time"

// Can reports whether this program was built by [Build].
func Can() bool { return true }

// Set sets this program's wall clock ahead of the host's by d, at once and
// until the next Set. In a program that [Build] has not built it does nothing.
func Set(d time.Duration) { time.SetWallAhead(d) }
