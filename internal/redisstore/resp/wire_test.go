package resp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/lazyctx"
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
	t.Cleanup(func() { far.Close(); <-done })
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
		m := await.Value(server.Read(got[n:]))
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
			await.Value(server.Read(make([]byte, 100)))
		}
		fmt.Fprint(server, "+FINE\r\n+OK\r\n")
		returns(t, "a call", wg.Wait)
	}
}

// asked sends a command on a goroutine of its own, and returns a channel that gets its error.
func asked(w *Wire, ctx context.Context) <-chan error {
	done := make(chan error, 1)
	go func() { _, err := w.ask(ctx, []string{"get", "k"}); done <- err }()
	return done
}

// overWire runs f in virtual time, with a wire whose server reads and answers nothing.
func overWire(t *testing.T, kept bool, f func(t *testing.T, w *Wire, server net.Conn, back <-chan bool)) {
	synctest.Test(t, func(t *testing.T) {
		w, server, back := piped(t, kept)
		go io.Copy(io.Discard, server)
		f(t, w, server, back)
	})
}

// answered fails the test unless a caller gets what the server sends after a while.
func answered(t *testing.T, w *Wire, server net.Conn, after time.Duration, reply string) {
	t.Helper()
	caller := asked(w, t.Context())
	time.Sleep(after)
	server.Write([]byte(reply))
	if err := <-caller; err != nil {
		t.Errorf("after %v: got %v", after, err)
	}
}

// diesOfSilence fails unless a wire ends because nothing has arrived since began. A caller
// without a deadline gets its error then.
func diesOfSilence(t *testing.T, caller <-chan error, back <-chan bool, began time.Time) {
	t.Helper()
	if err := <-caller; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a caller without a deadline: got %v", err)
	}
	if <-back {
		t.Error("the connection counts as good")
	}
	between(t, "the end", began, silence, silence+2*tick)
}

// A wire on which nothing arrives is given up after a few of its round trips. Callers
// that wait already go on waiting.
func TestSilentWireIsGivenUpAfterAFewRoundTrips(t *testing.T) {
	for trip, after := range map[time.Duration]time.Duration{
		0: 2 * tick, time.Millisecond: 2 * tick, 100 * time.Millisecond: 400 * time.Millisecond, time.Second: impatience,
	} {
		overWire(t, false, func(t *testing.T, w *Wire, server net.Conn, back <-chan bool) {
			w.trip = trip
			time.Sleep(rest / 2) // silence before the first command does not count
			began := time.Now()
			patient := asked(w, t.Context())
			time.Sleep(after - time.Millisecond)
			ctx, cancel := context.WithTimeout(t.Context(), tick)
			defer cancel()
			if err := <-asked(w, ctx); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("trip %v: before it is given up: got %v", trip, err)
			}
			time.Sleep(tick)
			if err := <-asked(w, t.Context()); err != ErrUnsent {
				t.Errorf("trip %v: after it: got %v", trip, err)
			}
			diesOfSilence(t, patient, back, began)
		})
	}
}

// The round trips of a wire are measured. So a server that is far away does not count as dead.
func TestServerFarAwayIsNotGivenUp(t *testing.T) {
	overWire(t, false, func(t *testing.T, w *Wire, server net.Conn, _ <-chan bool) {
		const away = 40 * time.Millisecond
		w.trip = away / 2 // so far
		for far := away; far < impatience; far = far * 3 / 2 {
			for range 10 {
				answered(t, w, server, far, "$1\r\nv\r\n")
			}
		}
	})
}

// A caller whose context has a deadline without a timer leaves in time, whether its
// command is in flight or queued.
func TestCallersWithoutATimerLeaveInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, server, _ := piped(t, true)
		began := time.Now()
		var wg sync.WaitGroup
		ask := func(after time.Duration, ctx *lazyctx.Context, name, want string) {
			end, _ := ctx.Deadline()
			wg.Go(func() {
				defer ctx.End()
				v, err := w.ask(ctx, []string{name})
				if want == "" && !errors.Is(err, os.ErrDeadlineExceeded) || want != "" && v != want {
					t.Errorf("%s: got %v, %v", name, v, err)
				}
				if want == "" {
					between(t, name, end, 0, 0)
				}
			})
			time.Sleep(after)
		}
		within := func(d time.Duration) *lazyctx.Context { return lazyctx.WithTimeout(t.Context(), nil, d) }
		ask(time.Millisecond, within(700*time.Millisecond), "under way", "") // while it is being written, the others wait
		ask(0, within(5*time.Second), "stays", "yes")
		ask(0, within(300*time.Millisecond), "waits long", "")
		ask(0, within(50*time.Millisecond), "waits", "")
		ask(0, within(50*time.Millisecond), "waits as well", "")
		ask(0, within(0), "too late", "")
		time.Sleep(60 * time.Millisecond)
		ask(0, within(20*time.Millisecond), "comes later", "")
		time.Sleep(time.Second)
		go func() {
			in := bufio.NewReader(server)
			for _, reply := range []string{"+no\r\n", "+yes\r\n"} {
				for range 3 {
					if _, err := in.ReadString('\n'); err != nil {
						t.Error(err)
					}
				}
				fmt.Fprint(server, reply)
			}
		}()
		wg.Wait()
		between(t, "the last", began, time.Second, 2*time.Second)
	})
}

// When its Client is closed, a caller leaves within a tick, before its context ends.
func TestCallersLeaveWhenTheirClientIsClosed(t *testing.T) {
	overWire(t, false, func(t *testing.T, w *Wire, server net.Conn, back <-chan bool) {
		closing, closeClient := context.WithCancel(t.Context())
		ctx := lazyctx.WithTimeout(t.Context(), closing, time.Second)
		defer ctx.End()
		leaves := asked(w, ctx)
		synctest.Wait()
		closeClient()
		began := time.Now()
		if err := <-leaves; !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		between(t, "the caller", began, 0, tick)
		server.Close()
		<-back
	})
}

// A caller with a late deadline gets the reply of a server that was silent for a while, as
// on a connection of its own.
func TestSilentWireStillAnswersCallersThatWait(t *testing.T) {
	overWire(t, false, func(t *testing.T, w *Wire, server net.Conn, back <-chan bool) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		first, second := asked(w, ctx), asked(w, ctx)
		time.Sleep(2 * silence)
		if err := <-asked(w, ctx); err != ErrUnsent {
			t.Errorf("a later caller: got %v", err)
		}
		fmt.Fprint(server, "$1\r\nv\r\n$1\r\nv\r\n")
		if err := errors.Join(<-first, <-second); err != nil {
			t.Errorf("got %v", err)
		}
		if !<-back { // all commands are answered
			t.Error("the connection counts as bad")
		}
	})
}

// A connection on which a part of a message has arrived does not go back to the pool.
func TestWireThatIsIdleInTheMiddleOfAMessageIsDead(t *testing.T) {
	overWire(t, false, func(t *testing.T, w *Wire, server net.Conn, back <-chan bool) {
		answered(t, w, server, tick, "$2\r\nOK\r\n*2\r\n+more\r\n")
		if <-back {
			t.Error("the connection counts as good")
		}
	})
}

// A reply that arrives slowly does not count as silence.
func TestSlowReplyIsNoSilence(t *testing.T) {
	overWire(t, false, func(t *testing.T, w *Wire, server net.Conn, back <-chan bool) {
		caller := asked(w, t.Context())
		for _, b := range []byte("$12\r\nhello, world\r\n") {
			time.Sleep(silence - time.Millisecond)
			server.Write([]byte{b})
		}
		if err := <-caller; err != nil {
			t.Errorf("got %v", err)
		}
		if !<-back { // no caller sends another command
			t.Error("the connection counts as bad")
		}
	})
}

// A server that does not read counts as dead as well. Queued commands are not sent.
func TestWireWhoseServerDoesNotReadIsDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, back := piped(t, false)
		began := time.Now()
		first := asked(w, t.Context())
		synctest.Wait()
		second := asked(w, t.Context())
		if err := <-second; err != ErrUnsent {
			t.Errorf("the second: got %v", err)
		}
		between(t, "the second", began, 2*tick, 3*tick)
		diesOfSilence(t, first, back, began)
	})
}

// A wire ends a moment after the last reply.
func TestIdleWireEnds(t *testing.T) {
	overWire(t, false, func(t *testing.T, w *Wire, server net.Conn, back <-chan bool) {
		for range 10 {
			answered(t, w, server, tick/2, "+OK\r\n")
		}
		began := time.Now()
		if !<-back {
			t.Error("the connection counts as bad")
		}
		between(t, "the end", began, rest, rest+2*tick)
	})
}
