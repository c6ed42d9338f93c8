//go:build !linux

package redistest

import (
	"net"
	"strconv"
)

// reserve returns a port that was free just now; port 0 means any.
func reserve(port int) (got int, release func(), err error) {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return 0, nil, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, func() {}, nil
}
