package conformance

import (
	"bufio"
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"
)

// echo is a server that counts the lines it gets and sends them back.
func echo(t *testing.T) (addr string, got *atomic.Int32) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	got = new(atomic.Int32)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for lines := bufio.NewScanner(c); lines.Scan(); {
					got.Add(1)
					io.WriteString(c, lines.Text()+"\n")
				}
			}()
		}
	}()
	return l.Addr().String(), got
}

// ask sends a line and waits for it to come back.
func ask(c net.Conn, line string, wait time.Duration) error {
	c.SetReadDeadline(time.Now().Add(wait))
	if _, err := io.WriteString(c, line+"\n"); err != nil {
		return err
	}
	back, err := bufio.NewReader(c).ReadString('\n')
	if err == nil && back != line+"\n" {
		err = errors.New("another line came back: " + back)
	}
	return err
}

const soon, long = 100 * time.Millisecond, 20 * time.Second

// linked is a TCP link to an echo server.
type linked struct {
	*Link
	t   *testing.T
	got *atomic.Int32 // lines that have arrived
}

func newLinked(t *testing.T) linked {
	t.Helper()
	addr, got := echo(t)
	l, err := TCP(addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return linked{l, t, got}
}

func (l linked) dial() net.Conn {
	l.t.Helper()
	c, err := net.Dial("tcp", l.Store)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { c.Close() })
	return c
}

// silent fails the test unless no answer comes to line.
func (l linked) silent(c net.Conn, line string) {
	l.t.Helper()
	if err := ask(c, line, soon); !errors.Is(err, os.ErrDeadlineExceeded) {
		l.t.Errorf("%s: %v, want no answer", line, err)
	}
}

// ended fails the test unless the connection has ended.
func (l linked) ended(c net.Conn, line string) {
	l.t.Helper()
	if err := ask(c, line, long); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		l.t.Errorf("%s: %v, want the end of the connection", line, err)
	}
}

// arrives fails the test unless n lines arrive.
func (l linked) arrives(n int32) {
	l.t.Helper()
	for end := time.Now().Add(long); l.got.Load() < n; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			l.t.Fatalf("%d lines arrived, want %d", l.got.Load(), n)
		}
	}
}

func TestTCPLink(t *testing.T) {
	l := newLinked(t)
	c := l.dial()
	if err := ask(c, "up", long); err != nil {
		t.Errorf("up: %v", err)
	}

	l.Set(Slow)
	began := time.Now()
	if err := ask(c, "slow", long); err != nil || time.Since(began) < Delay {
		t.Errorf("slow: %v after %v, want a reply after %v", err, time.Since(began), Delay)
	}

	l.Set(Hung)
	n := l.got.Load()
	l.silent(c, "hung")
	if l.got.Load() != n {
		t.Error("hung: the line arrived")
	}

	l.Set(Deaf)
	c = l.dial()
	l.silent(c, "deaf")
	l.arrives(n + 2) // this line and the one before

	// The client could take a late reply for the reply to its next line.
	l.Set(Up)
	l.ended(c, "up, after a reply was lost")
	c = l.dial()
	if err := ask(c, "up", long); err != nil {
		t.Errorf("up again: %v", err)
	}

	l.Set(Down)
	l.ended(c, "down")
	if c, err := net.Dial("tcp", l.Store); err == nil {
		l.ended(c, "down, on a new connection")
		c.Close()
	}
}
