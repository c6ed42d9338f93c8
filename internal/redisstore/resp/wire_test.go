package resp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"testing"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// Shorter names for the helpers of package redistest.
var returns, until, between = await.Return, await.Until, redistest.Between

// piped returns a wire, and the server's end of its connection. At the end of the wire,
// back says whether the connection is in order.
func piped(t *testing.T, kept bool) (w *Wire, server net.Conn, back <-chan bool) {
	near, far := net.Pipe()
	ended := make(chan bool, 1)
	w = NewWire(NewConn(near, near), 0, kept, func(ok bool) { ended <- ok })
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

// ask is Do in the form of most calls of Go.
func (w *Wire) ask(ctx context.Context, args []string) (any, error) {
	var r [1]Reply
	if !w.Do(ctx, r[:], [][]string{args}) {
		return nil, ErrUnsent
	}
	return r[0].Value, r[0].Err
}

// If a caller leaves before its command is written, the command is not sent.
func TestCommandOfACallerThatLeftIsNotSent(t *testing.T) {
	w, server, _ := piped(t, true)
	var wg sync.WaitGroup
	send := func(ctx context.Context, name string, want error) {
		wg.Go(func() {
			if v, err := w.ask(ctx, []string{name}); !errors.Is(err, want) {
				t.Errorf("%s: got %v, %v", name, v, err)
			}
		})
	}
	send(t.Context(), "first", nil) // while it is being written, the others wait
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
	returns(t, "a call", wg.Wait)
}

// An invalid reply, or one without a command, ends the wire.
func TestInvalidRepliesEndAWire(t *testing.T) {
	for _, text := range []string{"HTTP/1.1 400 Bad Request\r\n", "+unasked\r\n", "$5\r\nlonger\r\n", "*-7\r\n", "\r\n", "$99999999999\r\n"} {
		w, server, _ := piped(t, true)
		fmt.Fprint(server, text)
		returns(t, text, func() {
			buf := make([]byte, 1)
			if _, err := server.Read(buf); err == nil {
				t.Errorf("%q: the wire goes on", text)
			}
		})
		if _, err := w.ask(t.Context(), []string{"ping"}); err != ErrUnsent {
			t.Errorf("%q: got %v", text, err)
		}
	}
}

// A reply OK to a command that never has one ends the wire. The replies may be out of
// step with the commands, so the next reply must not grant anything.
func TestNoReplyCountsAfterAWrongStatus(t *testing.T) {
	for _, first := range []string{"evalsha", "eval", "set"} {
		w, server, _ := piped(t, true)
		var wg sync.WaitGroup
		ask := func(name string) {
			wg.Go(func() {
				if v, err := w.ask(t.Context(), []string{name}); err == nil {
					t.Errorf("%s after %s: got %v", name, first, v)
				}
			})
		}
		ask(first) // while it is being written, the other waits
		until(t, "the first is sent", func() bool { _, sent := w.Pending(); return sent == 1 })
		ask("set")
		until(t, "the second is queued", func() bool { queued, _ := w.Pending(); return queued == 1 })
		for range 2 {
			if _, err := server.Read(make([]byte, 100)); err != nil {
				t.Fatal(err)
			}
		}
		fmt.Fprint(server, "+FINE\r\n+OK\r\n")
		returns(t, "a call", wg.Wait)
	}
}
