//go:build !unix

package redistest

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"strconv"
)

func endWithParent(*exec.Cmd) {}

func stop(*os.Process) error { return errors.ErrUnsupported }
func cont(*os.Process) error { return errors.ErrUnsupported }

// reserve returns a port that nobody had a moment ago, any if it is 0.
func reserve(port int) (got int, release func(), err error) {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return 0, nil, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, func() {}, nil
}
