package conformance

import (
	"bufio"
	"io"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

const soon, long = 100 * time.Millisecond, 20 * time.Second

// TestTCPLink asks an echo server over a link in each state.
func TestTCPLink(t *testing.T) {
	var got atomic.Int32 // lines that have arrived
	l, err := TCP(redistest.Serve(t, func(c net.Conn) {
		defer c.Close()
		for lines := bufio.NewScanner(c); lines.Scan(); {
			got.Add(1)
			io.WriteString(c, lines.Text()+"\n")
		}
	}))
	await.Must(t, err)
	t.Cleanup(l.Close)

	dial := func() net.Conn {
		c, err := net.Dial("tcp", l.Store)
		await.Must(t, err)
		t.Cleanup(func() { c.Close() })
		return c
	}

	// ask sends a line and fails the test unless it comes back, no answer comes, or the
	// connection ends.
	ask := func(c net.Conn, line, want string) {
		t.Helper()
		wait := long
		if want == "silence" {
			wait = soon
		}
		c.SetReadDeadline(time.Now().Add(wait))
		io.WriteString(c, line+"\n")
		back, err := bufio.NewReader(c).ReadString('\n')
		answer := "end"
		switch {
		case err == nil && back == line+"\n":
			answer = "echo"
		case os.IsTimeout(err):
			answer = "silence"
		}
		if answer != want {
			t.Errorf("%s: %s (%q, %v), want %s", line, answer, back, err, want)
		}
	}

	c := dial()
	ask(c, "up", "echo")

	l.Set(Slow)
	began := time.Now()
	ask(c, "slow", "echo")
	if d := time.Since(began); d < Delay {
		t.Errorf("slow: a reply after %v, want %v", d, Delay)
	}

	l.Set(Hung)
	n := got.Load()
	ask(c, "hung", "silence")
	if got.Load() != n {
		t.Error("hung: the line arrived")
	}

	l.Set(Deaf)
	c = dial()
	ask(c, "deaf", "silence")
	await.Until(t, "this line and the one before", func() bool { return got.Load() == n+2 })

	// The client could take a late reply for the reply to its next line.
	l.Set(Up)
	ask(c, "up, after a reply was lost", "end")
	c = dial()
	ask(c, "up again", "echo")

	l.Set(Down)
	ask(c, "down", "end")
	if c, err := net.Dial("tcp", l.Store); err == nil {
		ask(c, "down, on a new connection", "end")
		c.Close()
	}
}
