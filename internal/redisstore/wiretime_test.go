package redisstore

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/lazyctx"
	"github.com/hasplock/hasp/internal/redistest"
)

// asked has somebody send a command, and tells how that ended.
func asked(w *wire, ctx context.Context) <-chan error {
	done := make(chan error, 1)
	go func() {
		_, err := w.do(ctx, []any{"get", "k"})
		done <- err
	}()
	return done
}

// between fails unless an event came in time.
func between(t *testing.T, what string, began time.Time, from, to time.Duration) {
	t.Helper()
	if took := time.Since(began); took < from || took > to {
		t.Errorf("%s: after %v, want %v to %v", what, took, from, to)
	}
}

// One who waits without an end hears that the connection is dead, one with a
// deadline leaves by then, and nobody waits for a dead one twice.
func TestSilentWireIsDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, server, back := piped(t, false)
		go io.Copy(io.Discard, server)
		began := time.Now()
		patient := asked(w, t.Context())
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if err := <-asked(w, ctx); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("with a deadline: got %v", err)
		}
		between(t, "with a deadline", began, 100*time.Millisecond, 100*time.Millisecond)
		if err := <-patient; !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("without: got %v", err)
		}
		between(t, "without", began, silence, silence+2*tick)
		if <-back {
			t.Error("the connection counts as good")
		}
		if err := <-asked(w, t.Context()); err != errUnsent {
			t.Errorf("after it: got %v", err)
		}
	})
}

// A wire that says nothing is given up after a few of its round trips. Those
// who wait already are as patient as they are.
func TestSilentWireIsGivenUpAfterAFewRoundTrips(t *testing.T) {
	for trip, after := range map[time.Duration]time.Duration{
		0: 2 * tick, time.Millisecond: 2 * tick, 100 * time.Millisecond: 400 * time.Millisecond, time.Second: impatience,
	} {
		synctest.Test(t, func(t *testing.T) {
			w, server, back := piped(t, false)
			w.trip = trip
			go io.Copy(io.Discard, server)
			time.Sleep(rest / 2) // silence before anything was asked does not count
			began := time.Now()
			patient := asked(w, t.Context())
			time.Sleep(after - time.Millisecond)
			ctx, cancel := context.WithTimeout(t.Context(), tick)
			defer cancel()
			if err := <-asked(w, ctx); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("trip %v: before it is given up: got %v", trip, err)
			}
			time.Sleep(tick)
			if err := <-asked(w, t.Context()); err != errUnsent {
				t.Errorf("trip %v: after it: got %v", trip, err)
			}
			if err := <-patient; !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("got %v", err)
			}
			<-back
			between(t, "the end", began, silence, silence+2*tick)
		})
	}
}

// The round trips of a wire are measured, so that a server that is far away is
// not taken for a dead one.
func TestServerFarAwayIsNotGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, server, _ := piped(t, false)
		const away = 40 * time.Millisecond
		w.trip = away / 2 // as yet
		go io.Copy(io.Discard, server)
		for far := away; far < impatience; far = far * 3 / 2 {
			for range 10 {
				answered := asked(w, t.Context())
				time.Sleep(far)
				server.Write([]byte("$1\r\nv\r\n"))
				if err := <-answered; err != nil {
					t.Fatalf("%v away: %v", far, err)
				}
			}
		}
	})
}

// Whose context has a deadline, and no timer, leaves by then all the same,
// whether his command is under way or waits for its turn, and so do all others.
func TestCallersWithoutATimerLeaveInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, server, _ := piped(t, true)
		began := time.Now()
		var wg sync.WaitGroup
		ask := func(after time.Duration, ctx *lazyctx.Context, name, want string) {
			end, _ := ctx.Deadline()
			wg.Go(func() {
				defer ctx.End()
				v, err := w.do(ctx, []any{name})
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
		ask(time.Millisecond, within(700*time.Millisecond), "under way", "") // and as long as it is written, the others wait
		ask(0, within(5*time.Second), "stays", "yes")
		ask(0, within(300*time.Millisecond), "waits long", "")
		ask(0, within(50*time.Millisecond), "waits", "")
		ask(0, within(50*time.Millisecond), "waits, too", "")
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

// Whose client is closed leaves at once, though neither his context nor his
// deadline has ended.
func TestCallersLeaveWhenTheirClientIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, server, back := piped(t, false)
		go io.Copy(io.Discard, server)
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
		between(t, "the caller", began, 0, 0)
		server.Close()
		<-back
	})
}

// Who has more time than the wire is answered by a server that was away for a
// while, as on a connection of his own.
func TestSilentWireWaitsForThePatient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, server, back := piped(t, false)
		go io.Copy(io.Discard, server)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		first, second := asked(w, ctx), asked(w, ctx)
		time.Sleep(2 * silence)
		if err := <-asked(w, ctx); err != errUnsent {
			t.Errorf("who comes late: got %v", err)
		}
		fmt.Fprint(server, "$1\r\nv\r\n$1\r\nv\r\n")
		if err := errors.Join(<-first, <-second); err != nil {
			t.Errorf("got %v", err)
		}
		if !<-back { // all are answered
			t.Error("the connection counts as bad")
		}
	})
}

// A connection on which something has begun that nobody asked for is no good.
func TestWireThatIsIdleInTheMiddleOfSomethingIsDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, server, back := piped(t, false)
		go io.Copy(io.Discard, server)
		answered := asked(w, t.Context())
		synctest.Wait()
		fmt.Fprint(server, ">2\r\n+news\r\n:1\r\n+OK\r\n>2\r\n+more\r\n")
		if err := <-answered; err != nil {
			t.Errorf("got %v", err)
		}
		if <-back {
			t.Error("the connection counts as good")
		}
	})
}

// Who makes a wire, and hears nothing, is waited for once.
func TestNobodyHesitatesTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s Store
		var at server
		made, cancel := context.WithTimeout(t.Context(), hesitation)
		defer cancel()
		at.making.Store(&made)
		for _, took := range []time.Duration{hesitation, 0, 0} {
			began := time.Now()
			if v, err := s.share(t.Context(), &at, []any{"ping"}); err != errUnsent {
				t.Errorf("got %v, %v", v, err)
			}
			between(t, "sent otherwise", began, took, took)
		}
	})
}

// Neither a caller that was cancelled nor one whose deadline is short says
// anything about the connection.
func TestWhoLeavesDoesNotEndAWire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, server, _ := piped(t, true)
		go io.Copy(io.Discard, server)
		patient := asked(w, t.Context())
		synctest.Wait()
		for range 10 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			<-asked(w, ctx)
			cancel()
		}
		for range 11 {
			fmt.Fprint(server, "$1\r\nv\r\n")
		}
		if err := <-patient; err != nil {
			t.Errorf("got %v", err)
		}
		synctest.Wait()
		answered := asked(w, t.Context())
		synctest.Wait()
		fmt.Fprint(server, "$1\r\nv\r\n")
		if err := <-answered; err != nil {
			t.Errorf("the next: got %v", err)
		}
	})
}

// A reply that comes slowly is no silence.
func TestSlowReplyIsNoSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, server, back := piped(t, false)
		go io.Copy(io.Discard, server)
		answered := asked(w, t.Context())
		for _, b := range []byte("$12\r\nhello, world\r\n") {
			time.Sleep(silence - time.Millisecond)
			server.Write([]byte{b})
		}
		if err := <-answered; err != nil {
			t.Errorf("got %v", err)
		}
		if !<-back { // nobody asks for more
			t.Error("the connection counts as bad")
		}
	})
}

// Who does not even read what he is sent is dead as well. What was waiting for
// its turn was never sent.
func TestWireThatTakesNothingIsDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, back := piped(t, false)
		began := time.Now()
		first := asked(w, t.Context())
		synctest.Wait()
		second := asked(w, t.Context())
		if err := <-second; err != errUnsent {
			t.Errorf("the second: got %v", err)
		}
		between(t, "the second", began, 2*tick, 3*tick)
		if err := <-first; !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the first: got %v", err)
		}
		<-back
		between(t, "the end", began, silence, silence+2*tick)
	})
}

// A wire ends a moment after the last reply.
func TestIdleWireEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, server, back := piped(t, false)
		go io.Copy(io.Discard, server)
		for range 10 {
			answered := asked(w, t.Context())
			time.Sleep(tick / 2)
			server.Write([]byte("+OK\r\n"))
			if err := <-answered; err != nil {
				t.Fatal(err)
			}
		}
		began := time.Now()
		if !<-back {
			t.Error("the connection counts as bad")
		}
		between(t, "the end", began, rest, rest+2*tick)
	})
}

// bubble runs f in virtual time, with a Store of a server behind a proxy.
func bubble(t *testing.T, f func(t *testing.T, s *Store, at *server, p *faultproxy.Proxy)) {
	synctest.Test(t, func(t *testing.T) {
		v := redistest.Virtual(t)
		d, err := newDialer(address{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		o := options(address{}, d, "virtual:6379")
		dial := v.Proxy.Dialer()
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return d.calls.wrap(conn), nil
		}
		at := newServer(o)
		s := &Store{calls: &d.calls, rdb: at.rdb, servers: single{at}, close: at.rdb.Close}
		defer s.Close()
		f(t, s, at, v.Proxy)
	})
}

// Wires are of virtual time where everything is, and leave no goroutine.
func TestWiresInABubble(t *testing.T) {
	bubble(t, func(t *testing.T, s *Store, at *server, p *faultproxy.Proxy) {
		var shared sync.WaitGroup
		for i := range 20 {
			shared.Go(func() {
				for n := range 20 {
					time.Sleep(time.Millisecond)
					if v, err := s.Run(t.Context(), counting, Call{[]string{fmt.Sprint("n", i)}, []any{1}}); v != int64(n+1) {
						t.Errorf("got %v, %v; want %d", v, err, n+1)
					}
				}
			})
		}
		shared.Wait()
		w := at.wire.Load()
		if w == nil {
			t.Fatal("there is no wire")
		}
		p.Stall()
		began := time.Now()
		at.callers.Add(1)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		if _, err := s.Do(ctx, "get", "n0"); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("stalled: got %v", err)
		}
		between(t, "stalled", began, 2*time.Second, 2*time.Second)
		p.Flow()
		if v, err := s.Do(t.Context(), "get", "n0"); v != "20" {
			t.Errorf("after it: got %v, %v", v, err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if _, err := s.Do(t.Context(), "ping"); !errors.Is(err, redis.ErrClosed) {
			t.Errorf("closed: got %v", err)
		}
	})
}

// A connection that goes dead without a word takes those with it whose commands
// it has, and nobody else.
func TestDeadConnectionTakesFewCallersAlong(t *testing.T) {
	bubble(t, func(t *testing.T, s *Store, at *server, p *faultproxy.Proxy) {
		for i := range 2 {
			at.callers.Add(1)
			if _, err := s.Do(t.Context(), "get", fmt.Sprint("made", i)); err != nil {
				t.Fatal(err)
			}
		}
		w := at.wire.Load()
		if w == nil {
			t.Fatal("there is no wire")
		}
		p.Fail("dead", faultproxy.HangReply)

		var wg sync.WaitGroup
		var failed atomic.Int32
		began := time.Now()
		ask := func(key string) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			wg.Go(func() {
				defer cancel()
				asked := time.Since(began)
				if _, err := s.Do(ctx, "get", key); err != nil {
					failed.Add(1)
					if asked > 3*tick {
						t.Errorf("sent %v after the connection went dead: %v", asked, err)
					}
				}
			})
			time.Sleep(time.Millisecond)
		}
		ask("dead")
		for i := range 2000 {
			ask(fmt.Sprint("k", i))
		}
		wg.Wait()
		if n := failed.Load(); n < 1 || n > int32(3*tick/time.Millisecond)+1 {
			t.Errorf("%d calls failed", n)
		}
		if now := at.wire.Load(); now == nil || now == w {
			t.Error("there is no other wire")
		}
	})
}
