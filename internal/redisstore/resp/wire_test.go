package resp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"testing"
	"time"
)

// soon is what a call may take that is to end within a moment: much longer
// than any machine needs, much shorter than any other bound here.
const soon = 20 * time.Second

// until waits for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(soon); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v", what, soon)
		}
	}
}

// ended fails unless f returns soon.
func ended(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(soon):
		t.Fatalf("%s goes on", what)
	}
}

// piped is a wire to a server that the test plays, and what its connection was
// worth in the end.
func piped(t *testing.T, kept bool) (w *Wire, server net.Conn, back <-chan bool) {
	near, far := net.Pipe()
	ended := make(chan bool, 1)
	w = &Wire{conn: near, base: near, kept: kept, back: func(ok bool) { ended <- ok }}
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.Read()
		w.End()
	}()
	t.Cleanup(func() {
		far.Close()
		<-done
	})
	return w, far, ended
}

// A command whose caller left before it was written is not written.
func TestWhoLeftBeforeTheWriteIsNotSent(t *testing.T) {
	w, server, _ := piped(t, true)
	var wg sync.WaitGroup
	send := func(ctx context.Context, name string, want error) {
		wg.Go(func() {
			if v, err := w.Do(ctx, []any{name}); !errors.Is(err, want) {
				t.Errorf("%s: got %v, %v", name, v, err)
			}
		})
	}
	send(t.Context(), "first", nil) // and as long as it is written, the others wait
	until(t, "the first is sent", func() bool { _, sent := w.Pending(); return sent == 1 })
	leave, cancel := context.WithCancel(t.Context())
	send(leave, "second", os.ErrDeadlineExceeded)
	until(t, "the second is queued", func() bool { queued, _ := w.Pending(); return queued == 1 })
	send(t.Context(), "third", nil)
	until(t, "the third is queued", func() bool { queued, _ := w.Pending(); return queued == 2 })
	cancel()
	until(t, "the second has left", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.queue[0].met.Load()
	})
	const want = "*1\r\n$5\r\nfirst\r\n*1\r\n$5\r\nthird\r\n"
	got := make([]byte, len(want))
	for n := 0; n < len(got); {
		m, err := server.Read(got[n:])
		if err != nil {
			t.Fatal(err)
		}
		n += m
	}
	if string(got) != want {
		t.Errorf("got %q", got)
	}
	fmt.Fprint(server, "+1\r\n+3\r\n")
	ended(t, "a call", wg.Wait)
}

// What is no reply, or nobody's, ends the wire and not the program.
func TestNonsenseEndsAWire(t *testing.T) {
	for _, text := range []string{"HTTP/1.1 400 Bad Request\r\n", "+unasked\r\n", "$5\r\nlonger\r\n", "*-7\r\n", "\r\n", "$99999999999\r\n"} {
		w, server, _ := piped(t, true)
		fmt.Fprint(server, text)
		ended(t, text, func() {
			buf := make([]byte, 1)
			if _, err := server.Read(buf); err == nil {
				t.Errorf("%q: it goes on", text)
			}
		})
		if _, err := w.Do(t.Context(), []any{"ping"}); err != ErrUnsent {
			t.Errorf("%q: got %v", text, err)
		}
	}
}

// A status that is no reply to what was asked ends the wire: what comes next,
// nobody knows for whom, grants nothing.
func TestAfterAWrongStatusNobodyIsAnswered(t *testing.T) {
	for _, first := range []string{"evalsha", "eval", "set"} {
		w, server, _ := piped(t, true)
		var wg sync.WaitGroup
		ask := func(name string) {
			wg.Go(func() {
				if v, err := w.Do(t.Context(), []any{name}); err == nil {
					t.Errorf("%s after %s: got %v", name, first, v)
				}
			})
		}
		ask(first) // and as long as it is written, the other waits
		until(t, "the first is sent", func() bool { _, sent := w.Pending(); return sent == 1 })
		ask("set")
		until(t, "the second is queued", func() bool { queued, _ := w.Pending(); return queued == 1 })
		for range 2 {
			if _, err := server.Read(make([]byte, 100)); err != nil {
				t.Fatal(err)
			}
		}
		fmt.Fprint(server, "+FINE\r\n+OK\r\n")
		ended(t, "a call", wg.Wait)
	}
}
