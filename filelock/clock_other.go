//go:build !linux && !darwin

package filelock

// bootClock answers that there is none: this platform has no identifier of a
// boot that a program can rely on, and a clock that may have started again is
// worse than the wall clock.
func bootClock() instant { return instant{} }
