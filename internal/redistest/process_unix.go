//go:build unix && !linux

package redistest

import (
	"net"
	"os"
	"os/exec"
	"strconv"
	"syscall"
)

// endWithParent does nothing here: a test binary that is killed leaves its
// servers running.
func endWithParent(*exec.Cmd) {}

func stop(p *os.Process) error { return p.Signal(syscall.SIGSTOP) }
func cont(p *os.Process) error { return p.Signal(syscall.SIGCONT) }

// reserve returns a port that nobody had a moment ago, any if it is 0.
func reserve(port int) (got int, release func(), err error) {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return 0, nil, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, func() {}, nil
}
