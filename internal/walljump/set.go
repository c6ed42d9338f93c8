//go:build walljump

package walljump

import "time"

// Can reports whether this program was built by [Build].
func Can() bool { return true }

// Set sets this program's wall clock ahead of the host's clock by d, until the
// next call of Set. In a program that [Build] has not built, Set does nothing.
func Set(d time.Duration) { time.SetWallAhead(d) }
