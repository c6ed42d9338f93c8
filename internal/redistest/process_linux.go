package redistest

import (
	"os"
	"os/exec"
	"syscall"
)

// endWithParent has the kernel end the child when the test binary dies, even
// by SIGKILL.
func endWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}

func stop(p *os.Process) error { return p.Signal(syscall.SIGSTOP) }
func cont(p *os.Process) error { return p.Signal(syscall.SIGCONT) }

// reserve returns a port of the loopback interface, any if it is 0, that nobody
// else is given until release, also while the server on it is down: a socket
// that does not listen has it, too.
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
		// Then any port is one of the lower half, above which the bus of a
		// cluster's node has room.
		if err := reuse(); err != nil {
			return 0, nil, err
		}
	}
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return 0, nil, os.NewSyscallError("bind", err)
	}
	// Not before: who asks for this port shares it with nobody but the server.
	if err := reuse(); err != nil {
		return 0, nil, err
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		return 0, nil, os.NewSyscallError("getsockname", err)
	}
	return name.(*syscall.SockaddrInet4).Port, func() { syscall.Close(fd) }, nil
}
