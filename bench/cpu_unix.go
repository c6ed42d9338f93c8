//go:build unix

package main

import (
	"syscall"
	"time"
)

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err) // of a call that every Unix has
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
