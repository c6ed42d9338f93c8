package hosts

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"
)

// missing returns why the tests make no hosts.
func missing() error {
	if os.Getenv("HASP_TEST_HOSTS") == "" {
		return errors.New(`tests make network namespaces only if HASP_TEST_HOSTS is set, as "make hosts" does`)
	}
	return Missing()
}

// The tests run in a network namespace of their own, if that is possible.
func TestMain(m *testing.M) {
	if missing() == nil {
		if err := Apart(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// start returns a net with two hosts. Each has a server, whose answers are the name of the
// host and the line that it got.
func start(t *testing.T) (*Net, []*Host) {
	if err := missing(); err != nil {
		t.Skip(err)
	}
	n, err := Start(1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	var all []*Host
	for _, name := range []string{"a", "b"} {
		h, err := n.Host()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, h)
		serve(t, h, name)
	}
	return n, all
}

func serve(t *testing.T, h *Host, name string) {
	var l net.Listener
	err := h.Do(func() (err error) {
		l, err = net.Listen("tcp4", "0.0.0.0:1000")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for in := bufio.NewScanner(c); in.Scan(); {
					fmt.Fprintln(c, name, in.Text())
				}
			}()
		}
	}()
}

// dial opens a connection from a host to an address; nil is this process.
func dial(from *Host, to netip.Addr, within time.Duration) (c net.Conn, err error) {
	if from == nil {
		from = &Host{}
	}
	err = from.Do(func() error {
		c, err = net.DialTimeout("tcp", netip.AddrPortFrom(to, 1000).String(), within)
		return err
	})
	return c, err
}

// ask sends a line and returns the answer.
func ask(c net.Conn, line string, within time.Duration) (string, error) {
	if err := c.SetDeadline(time.Now().Add(within)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintln(c, line); err != nil {
		return "", err
	}
	answer, err := bufio.NewReader(c).ReadString('\n')
	return answer, err
}

// enough is longer than any machine needs.
const enough = 20 * time.Second

// must asks, and fails the test unless the answer is the one that is wanted.
func must(t *testing.T, c net.Conn, err error, line, want string) {
	t.Helper()
	if err == nil {
		var got string
		if got, err = ask(c, line, enough); err == nil && got != want+"\n" {
			err = fmt.Errorf("got %q", got)
		}
	}
	if err != nil {
		t.Fatalf("%q: %v, want the answer %q", line, err, want)
	}
}

// timedOut reports whether there was no answer at all.
func timedOut(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

func TestHostsTalkThroughTheSwitch(t *testing.T) {
	n, all := start(t)
	a, b := all[0], all[1]
	for _, from := range []*Host{nil, a, b} {
		c, err := dial(from, b.Addr, enough)
		must(t, c, err, "hello", "b hello")
		c.Close()
	}

	c, err := dial(a, b.Addr, enough)
	must(t, c, err, "before", "b before")
	defer c.Close()
	lift := n.Impose(Fault{Cut: true}, Between([]*Host{a}, []*Host{b})...)
	if _, err := dial(a, b.Addr, 200*time.Millisecond); !timedOut(err) {
		t.Errorf("dial over a cut link: %v, want no answer at all", err)
	}
	if got, err := ask(c, "lost", 200*time.Millisecond); !timedOut(err) {
		t.Errorf("a connection over a cut link: %q, %v, want no answer at all", got, err)
	}
	other, err := dial(nil, b.Addr, enough)
	must(t, other, err, "besides", "b besides")
	other.Close()
	lift()
	if err := c.SetDeadline(time.Now().Add(enough)); err != nil {
		t.Fatal(err)
	}
	if got, err := bufio.NewReader(c).ReadString('\n'); got != "b lost\n" { // TCP has sent it again
		t.Errorf("after the cut: %q, %v", got, err)
	}
}

func TestHostsShareAnAddress(t *testing.T) {
	n, all := start(t)
	addr, err := n.Shared(all...)
	if err != nil {
		t.Fatal(err)
	}
	old, err := dial(nil, addr, enough)
	must(t, old, err, "first", "a first")
	defer old.Close()
	n.Route(addr, all[1].Port)
	c, err := dial(nil, addr, enough)
	must(t, c, err, "second", "b second")
	c.Close()
	if got, err := ask(old, "third", enough); err == nil || timedOut(err) {
		t.Errorf("a connection from before the move: %q, %v, want that the new host resets it", got, err)
	}
}

func TestForgottenConnectionsFallSilent(t *testing.T) {
	n, all := start(t)
	c, err := dial(all[0], all[1].Addr, enough)
	must(t, c, err, "known", "b known")
	defer c.Close()
	if got := n.Forget(0); got == 0 {
		t.Error("no connection was forgotten")
	}
	if got, err := ask(c, "unknown", 200*time.Millisecond); !timedOut(err) {
		t.Errorf("got %q, %v, want no answer", got, err)
	}
	next, err := dial(all[0], all[1].Addr, enough)
	must(t, next, err, "new", "b new")
	next.Close()
}

// The namespace of the machine, and the threads of this process, stay as they are.
func TestHostsChangeNoOtherThread(t *testing.T) {
	_, all := start(t)
	for range 20 {
		if err := all[0].Do(func() error { return io.EOF }); err != io.EOF {
			t.Fatal(err)
		}
		done := make(chan string)
		go func() {
			text, _ := os.Readlink(threadSpace)
			done <- text
		}()
		own, err := os.Readlink("/proc/self/ns/net")
		if got := <-done; err != nil || got != own {
			t.Fatalf("a thread is in %s, the process in %s, %v", got, own, err)
		}
	}
}
