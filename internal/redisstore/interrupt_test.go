package redisstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// stores runs f with Stores that have a URL of each kind.
func stores(t *testing.T, f func(t *testing.T, s *Store, srv *redistest.Server)) {
	redistest.EachURL(t, func(t *testing.T, srv *redistest.Server, params map[string]string) {
		f(t, opened(t, srv.URL(), params), srv)
	})
}

// If a server hangs, a call ends with its context: while it waits for the reply, for a
// connection of the pool, or for the handshakes of a new one.
func TestCallsEndWithTheirContext(t *testing.T) { stores(t, callsEnd) }

// A call through any client ends with its context, whatever the settings of the client.
func TestCallsOfAPassedClientEndWithTheirContext(t *testing.T) {
	srv := redistest.Start(t, redistest.Own)
	callsEnd(t, through(t, srv.Addr, false), srv)
}

// callsEnd pauses srv, which has the slot of the key k, and tests that calls end. Only the first
// call may find a connection; after cutWires, it notices that the connection has ended.
func callsEnd(t *testing.T, s *Store, srv *redistest.Server) {
	if s.opened != nil {
		defer s.opened.timeout.Store(s.opened.timeout.Swap(int64(hour))) // of a dial
	}
	for _, e := range redistest.Endings {
		for _, cut := range []bool{false, true} {
			what := fmt.Sprintf("%s, cut=%v", e.Name, cut)
			returns(t, what+": the server works", func() {
				if v, err := s.Do(t.Context(), "set", "{k}s", "v"); err != nil {
					t.Errorf("%s: the server works: got %v, %v", what, v, err)
				}
			})
			if cut && s.opened != nil {
				cutWires(s)
			}
			srv.Pause()
			for _, way := range ways {
				if s.one == nil && way.name == "DoAll" {
					continue // needs a single server
				}
				returns(t, what+": "+way.name, func() {
					ctx, cancel := e.Start(t.Context())
					defer cancel()
					err := way.add(ctx, s, "k").Err
					isVerdict := errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrLost)
					if !e.Match(err) || isVerdict {
						t.Errorf("%s: %s: got %v", what, way.name, err)
					}
				})
			}
			srv.Resume()
		}
	}
}

// An interrupt ends no call of another caller and no later call, and no caller gets the reply to
// another call.
func TestInterruptsEndOnlyTheirOwnCall(t *testing.T) {
	stores(t, func(t *testing.T, s *Store, srv *redistest.Server) {
		for _, callers := range []int{1, 12} {
			const million, calls = 1_000_000, 6000
			var interrupted, answered atomic.Int64
			caller := func(i int) {
				key, last := fmt.Sprint("key", i), int64(i*million)
				await.Value(s.Do(t.Context(), "set", key, fmt.Sprint(last)))
				// How long callers wait that leave. It is adjusted to how long a call takes.
				patience := 400 * time.Microsecond
				for n := range calls / callers {
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					leaves := n%2 == 0
					if leaves {
						time.AfterFunc(rand.N(patience), cancel)
					}
					r := ways[rand.N(len(ways))].add(ctx, s, key)
					cancel()

					v, _ := r.Value.(int64)
					switch {
					case r.Err == nil && (v <= last || v > int64(i*million+calls)):
						t.Errorf("caller %d got %v after %d", i, r.Value, last)
					case r.Err != nil && !leaves:
						t.Errorf("caller %d, which stayed: %v", i, r.Err)
					case r.Err != nil && !errors.Is(r.Err, context.Canceled):
						t.Errorf("caller %d, which left: %v", i, r.Err)
					case r.Err != nil:
						interrupted.Add(1)
						patience = min(patience*5/4, time.Second)
						continue
					case leaves:
						answered.Add(1)
						patience = max(patience*4/5, time.Microsecond)
					}
					last = v
				}
			}
			var wg sync.WaitGroup
			for i := range callers {
				wg.Go(func() { caller(i) })
			}
			wg.Wait()
			if left, stayed := interrupted.Load(), answered.Load(); left == 0 || stayed == 0 {
				t.Errorf("%d callers left, %d were answered: the test proves nothing", left, stayed)
			}
		}
	})
}

// The pool must notice that the server has closed a connection before it gives the
// connection to a caller, because a command is sent once.
func TestClosedConnectionsAreNotUsed(t *testing.T) {
	p := redistest.Start(t, redistest.Own).Proxy()
	s := opened(t, "redis://"+p.Addr(), nil)
	const rounds = 20
	failed := 0
	var err error
	for range rounds {
		_, _ = s.Do(t.Context(), "ping") // ends a connection that was cut before
		pings(t, s)                      // leaves an idle one
		p.Cut()
		time.Sleep(time.Millisecond)
		if _, err = s.Do(t.Context(), "ping"); err != nil {
			failed++
		}
	}
	// A busy kernel may report the end of a connection late, but not often.
	if failed > rounds/2 {
		t.Errorf("%d of %d commands were sent into closed connections: %v", failed, rounds, err)
	}
}
