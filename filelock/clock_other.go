//go:build !linux && !darwin

package filelock

// bootClock returns the zero instant. This platform has no reliable identifier of a
// boot, and a clock that may have started again is worse than the wall clock.
func bootClock() instant { return instant{} }
