package crew

import (
	"os"
	"syscall"
)

// ReservePort reserves a port of the loopback interface until release() is called. It binds a
// socket that does not listen. So the port stays reserved even while the server on it is down.
func ReservePort(port int) (release func(), err error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	defer func() {
		if err != nil {
			syscall.Close(fd)
		}
	}()

	addr := &syscall.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}
	if err := syscall.Bind(fd, addr); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}

	// Set this option only after bind. So the port can be shared with the server, but not with
	// another ReservePort.
	if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		return nil, os.NewSyscallError("setsockopt", err)
	}

	return func() { syscall.Close(fd) }, nil
}
