//go:build !linux

package redistest

import (
	"net"
	"strconv"
)

// reserve returns an error unless the port was free just now.
func reserve(port int) (release func(), err error) {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return nil, err
	}
	return func() {}, l.Close()
}
