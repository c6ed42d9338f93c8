//go:build !unix

package redistest

import (
	"errors"
	"net"
	"os"
	"os/exec"
)

func endWithParent(*exec.Cmd) {}

func stop(*os.Process) error { return errors.ErrUnsupported }
func cont(*os.Process) error { return errors.ErrUnsupported }

// freePort returns a port that nobody had a moment ago.
func freePort() (port int, release func(), err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, nil, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, func() {}, nil
}
