package redistest

import (
	"os"
	"syscall"
)

// reserve reserves a port of the loopback interface until release is called; port
// 0 means any. A bound socket that does not listen keeps it reserved, also while
// the server on it is down.
func reserve(port int) (got int, release func(), err error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, nil, os.NewSyscallError("socket", err)
	}
	defer func() {
		if err != nil {
			syscall.Close(fd)
		}
	}()
	reuse := func() error {
		return os.NewSyscallError("setsockopt", syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1))
	}
	if port == 0 {
		// With this option the kernel picks a port of the lower half. So the port
		// 10,000 higher exists, which a cluster node needs.
		if err := reuse(); err != nil {
			return 0, nil, err
		}
	}
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return 0, nil, os.NewSyscallError("bind", err)
	}
	// Not before bind: a given port must not be shared with another reserve, only
	// with the server.
	if err := reuse(); err != nil {
		return 0, nil, err
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		return 0, nil, os.NewSyscallError("getsockname", err)
	}
	return name.(*syscall.SockaddrInet4).Port, func() { syscall.Close(fd) }, nil
}
