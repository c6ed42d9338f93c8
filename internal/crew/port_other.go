//go:build !linux

package crew

import (
	"net"
	"strconv"
)

// ReservePort returns an error unless the port is free. On this system it cannot keep the port
// free.
func ReservePort(port int) (release func(), err error) {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return nil, err
	}
	return func() {}, l.Close()
}
