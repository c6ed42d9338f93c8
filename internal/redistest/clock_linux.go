package redistest

import (
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

const clocksCanJump = true

// setClock writes d to the file at path, in one atomic store, so that the server
// never reads half of it.
func setClock(path string, d time.Duration) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := syscall.Mmap(int(f.Fd()), 0, 8, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	(*atomic.Int64)(unsafe.Pointer(&b[0])).Store(int64(d))
	return os.NewSyscallError("munmap", syscall.Munmap(b))
}
