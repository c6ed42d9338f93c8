package crew

import (
	"fmt"
	"math/rand/v2"
)

// FreeAddr reserves an address of the loopback interface, host:port, until this process ends. A
// server may start on it, stop, and start again. The port is below the ports that most systems give
// to connections.
func FreeAddr() (addr string, err error) {
	for range 100 {
		port := 22000 + rand.N(10000)
		if _, err = ReservePort(port); err == nil {
			return fmt.Sprint("127.0.0.1:", port), nil
		}
	}

	return "", err
}
