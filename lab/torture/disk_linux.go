package main

import (
	"os"
	"os/signal"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// bearLimits makes a write beyond a limit of the file size return an error.
func bearLimits() { signal.Notify(make(chan os.Signal, 1), syscall.SIGXFSZ) }

// dieOfLimits undoes bearLimits: the kernel kills the process within a write that
// is too long. Go's runtime would end it later, with a stack trace.
func dieOfLimits() error {
	var old, none [4]uint64 // struct kernel_sigaction: the default, without flags
	_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(unix.SIGXFSZ),
		uintptr(unsafe.Pointer(&none)), uintptr(unsafe.Pointer(&old)), 8, 0, 0)
	if errno != 0 {
		return os.NewSyscallError("rt_sigaction", errno)
	}
	return nil
}

// limitFiles limits the file size of a process until lift is called.
func limitFiles(pid int, bytes uint64) (lift func() error, err error) {
	var old unix.Rlimit
	if err := unix.Prlimit(pid, unix.RLIMIT_FSIZE, nil, &old); err != nil {
		return nil, os.NewSyscallError("prlimit", err)
	}
	lift = func() error { return os.NewSyscallError("prlimit", unix.Prlimit(pid, unix.RLIMIT_FSIZE, &old, nil)) }
	return lift, os.NewSyscallError("prlimit", unix.Prlimit(pid, unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: bytes, Max: old.Max}, nil))
}

// mountSmall mounts a small disk at dir. It needs the right to mount.
func mountSmall(dir string) (unmount func() error, err error) {
	if err := unix.Mount("hasp-torture", dir, "tmpfs", 0, "size=2m,mode=0700"); err != nil {
		return nil, os.NewSyscallError("mount", err)
	}
	return func() error { return os.NewSyscallError("umount", unix.Unmount(dir, unix.MNT_DETACH)) }, nil
}
