package main

import (
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// bearLimits has this process see a full disk as an error.
func bearLimits() { signal.Notify(make(chan os.Signal, 1), syscall.SIGXFSZ) }

// limitFiles has no file of a process grow until lift.
func limitFiles(pid int) (lift func() error, err error) {
	var old unix.Rlimit
	if err := unix.Prlimit(pid, unix.RLIMIT_FSIZE, nil, &old); err != nil {
		return nil, os.NewSyscallError("prlimit", err)
	}
	lift = func() error { return os.NewSyscallError("prlimit", unix.Prlimit(pid, unix.RLIMIT_FSIZE, &old, nil)) }
	return lift, os.NewSyscallError("prlimit", unix.Prlimit(pid, unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 0, Max: old.Max}, nil))
}
