//go:build !linux && !darwin

package filelock

// bootClock returns the zero instant, because this platform has no reliable identifier of a boot.
// Without an identifier, a clock that starts at 0 at each boot is worse than the wall clock.
func bootClock() instant { return instant{} }
