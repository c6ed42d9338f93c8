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

func TestTCPLink(t *testing.T) {
	addr, got := echo(t)
	l, err := TCP(addr)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dial := func() net.Conn {
		c, err := net.Dial("tcp", l.Store)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	const soon, long = 100 * time.Millisecond, 20 * time.Second
	c := dial()
	if err := ask(c, "up", long); err != nil {
		t.Errorf("up: %v", err)
	}

	l.Set(Slow)
	began := time.Now()
	if err := ask(c, "slow", long); err != nil || time.Since(began) < Delay {
		t.Errorf("slow: %v after %v, want a reply after %v", err, time.Since(began), Delay)
	}

	l.Set(Hung)
	n := got.Load()
	if err := ask(c, "hung", soon); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("hung: %v, want no answer", err)
	}
	if got.Load() != n {
		t.Error("hung: the line arrived")
	}

	l.Set(Deaf)
	c = dial()
	if err := ask(c, "deaf", soon); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("deaf: %v, want no answer", err)
	}
	for end := time.Now().Add(long); got.Load() < n+2; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("deaf: that line, or the one before, did not arrive")
		}
	}
	// A late reply must not be taken for that to the next line.
	l.Set(Up)
	if err := ask(c, "up again", long); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a connection whose reply was lost: %v, want its end", err)
	}

	c = dial()
	if err := ask(c, "up", long); err != nil {
		t.Errorf("up again: %v", err)
	}
	l.Set(Down)
	if err := ask(c, "down", long); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("down: %v, want the connection's end", err)
	}
	if c, err := net.Dial("tcp", l.Store); err == nil {
		if err := ask(c, "down", long); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("down: %v on a new connection, want its end", err)
		}
		c.Close()
	}
}
