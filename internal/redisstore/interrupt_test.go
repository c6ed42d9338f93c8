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

// Shorter names for the helpers of package redistest.
const soon = await.Patience

var returns, until = await.Return, await.Until

// stores runs f with Stores that have a URL of each kind.
func stores(t *testing.T, f func(t *testing.T, s *Store, srv *redistest.Server)) {
	redistest.EachURL(t, func(t *testing.T, srv *redistest.Server, params map[string]string) {
		f(t, opened(t, srv.URL(), params), srv)
	})
}

// If a server hangs, a call ends with its context: while it waits for the reply, for a
// connection of the pool, or for the handshakes of a new one.
func TestCallsEndWithTheirContext(t *testing.T) { stores(t, callsEnd) }

// callsEnd pauses srv, which has the slot of the key k, and tests that calls end.
func callsEnd(t *testing.T, s *Store, srv *redistest.Server) {
	for _, e := range redistest.Endings {
		if _, err := s.Do(t.Context(), "set", "k", "v"); err != nil {
			t.Fatal(err) // makes a connection as well
		}
		srv.Pause()
		for i, what := range []string{"a read", "a new connection", "a script"} {
			returns(t, e.Name+": "+what, func() {
				ctx, cancel := e.Start(t.Context())
				defer cancel()
				var err error
				if i == 2 {
					_, err = s.Run(ctx, counting, Call{[]string{"{k}n"}, []string{"1"}})
				} else {
					_, err = s.Do(ctx, "get", "k")
				}
				if !e.Match(err) || errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrLost) {
					t.Errorf("%s: %s: got %v", e.Name, what, err)
				}
			})
		}
		srv.Resume()
		returns(t, e.Name+": after it", func() {
			if v, err := s.Do(t.Context(), "get", "k"); v != "v" || err != nil {
				t.Errorf("%s: after it: got %v, %v", e.Name, v, err)
			}
		})
	}
}

// An interrupt ends no call of another caller, and no caller gets the reply of another.
func TestInterruptsEndOnlyTheirOwnCall(t *testing.T) {
	stores(t, func(t *testing.T, s *Store, srv *redistest.Server) {
		const callers, rounds = 12, 250
		for i := range callers {
			await.Value(s.Do(t.Context(), "set", fmt.Sprint("key", i), fmt.Sprint("value", i)))
		}
		var interrupted atomic.Int64
		var wg sync.WaitGroup
		for i := range callers {
			wg.Go(func() {
				patience := 400 * time.Microsecond // of the callers that leave; adjusted to how long a call takes
				for range rounds {
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					leaves := i%2 == 0
					if leaves {
						time.AfterFunc(rand.N(patience), cancel)
					}
					v, err := get(ctx, s, i)
					cancel()
					switch {
					case err == nil && v != fmt.Sprint("value", i):
						t.Errorf("caller %d got %v", i, v)
					case err != nil && !leaves:
						t.Errorf("caller %d, which stayed: %v", i, err)
					case err != nil && !errors.Is(err, context.Canceled):
						t.Errorf("caller %d, which left: %v", i, err)
					case err != nil:
						interrupted.Add(1)
						patience = min(patience*5/4, time.Second)
					case leaves:
						patience = max(patience*4/5, time.Microsecond)
					}
				}
			})
		}
		wg.Wait()
		if n := interrupted.Load(); n == 0 || n == callers/2*rounds {
			t.Errorf("%d of %d calls were interrupted, so the test proves nothing", n, callers/2*rounds)
		}
	})
}

// reading is a script that returns the value of its key.
var reading = NewScript(`return redis.call('GET', KEYS[1])`)

// get reads the key of caller i by a command, a script or a batch.
func get(ctx context.Context, s *Store, i int) (v any, err error) {
	key := fmt.Sprint("key", i)
	switch rand.N(3) {
	case 0:
		return s.Run(ctx, reading, Call{Keys: []string{key}})
	case 1:
		err = context.Canceled // of a call without a reply
		s.RunEach(ctx, reading, []Call{{Keys: []string{key}}}, func(_ int, w any, e error) {
			if v, err = w, e; ctx.Err() != nil && err != nil {
				err = ctx.Err()
			}
		})
		return v, err
	}
	return s.Do(ctx, "get", key)
}

// The pool must notice that the server has closed a connection before it gives the
// connection to a caller, because a command is sent once.
func TestClosedConnectionsAreNotUsed(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true})
	p := srv.Proxy()
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
