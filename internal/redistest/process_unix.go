//go:build unix && !linux

package redistest

import (
	"net"
	"os"
	"os/exec"
	"syscall"
)

// endWithParent does nothing here: a test binary that is killed leaves its
// servers running.
func endWithParent(*exec.Cmd) {}

func stop(p *os.Process) error { return p.Signal(syscall.SIGSTOP) }
func cont(p *os.Process) error { return p.Signal(syscall.SIGCONT) }

// freePort returns a port that nobody had a moment ago.
func freePort() (port int, release func(), err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, nil, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, func() {}, nil
}
