package redistest

import (
	"net"
	"strconv"
	"testing"
)

func TestAPortIsItsServersAlsoWhileThatIsDown(t *testing.T) {
	port, release, err := reserve(0)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	for range 2 {
		if _, release, err := reserve(port); err == nil {
			release()
			t.Error("a port that is reserved is reserved again")
		}
		server, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			t.Fatalf("its own server: %v", err)
		}
		if _, release, err := reserve(port); err == nil {
			release()
			t.Error("a port that is listened on is reserved")
		}
		server.Close()
	}
}
