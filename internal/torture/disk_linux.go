package main

import (
	"os"
	"os/signal"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// bearLimits has this process see a limit of its files as an error.
func bearLimits() { signal.Notify(make(chan os.Signal, 1), syscall.SIGXFSZ) }

// dieOfLimits undoes bearLimits for good: the kernel ends the process within
// the write that is one byte too long. Go's runtime would do it later, and
// with many words.
func dieOfLimits() error {
	var old, none [4]uint64 // struct kernel_sigaction: the default, without flags
	_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(unix.SIGXFSZ),
		uintptr(unsafe.Pointer(&none)), uintptr(unsafe.Pointer(&old)), 8, 0, 0)
	if errno != 0 {
		return os.NewSyscallError("rt_sigaction", errno)
	}
	return nil
}

// limitFiles has no file of a process grow beyond some bytes until lift.
func limitFiles(pid int, bytes uint64) (lift func() error, err error) {
	var old unix.Rlimit
	if err := unix.Prlimit(pid, unix.RLIMIT_FSIZE, nil, &old); err != nil {
		return nil, os.NewSyscallError("prlimit", err)
	}
	lift = func() error { return os.NewSyscallError("prlimit", unix.Prlimit(pid, unix.RLIMIT_FSIZE, &old, nil)) }
	return lift, os.NewSyscallError("prlimit", unix.Prlimit(pid, unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: bytes, Max: old.Max}, nil))
}

// mountSmall puts a disk of its own under dir that is soon full. Only some
// users may do that.
func mountSmall(dir string) (unmount func() error, err error) {
	if err := unix.Mount("hasp-torture", dir, "tmpfs", 0, "size=2m,mode=0700"); err != nil {
		return nil, os.NewSyscallError("mount", err)
	}
	return func() error { return os.NewSyscallError("umount", unix.Unmount(dir, unix.MNT_DETACH)) }, nil
}
