package redisstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
)

// soon is what a call may take that is to end within a moment: much longer
// than any machine needs, much shorter than any other bound here.
const soon = 20 * time.Second

// stores opens a server by every kind of URL.
func stores(t *testing.T, f func(t *testing.T, s *Store, srv *redistest.Server)) {
	for name, o := range map[string]*redistest.Options{
		"tcp": {Own: true}, "tls": {Own: true, TLS: true}, "unix": {Own: true, Unix: true}, "password": {Password: "secret"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := redistest.Start(t, o)
			params := map[string]string{}
			if srv.CAFile != "" {
				params["ca"] = srv.CAFile
			}
			s, err := open(t, srv.URL(), params)
			if err != nil {
				t.Fatal(err)
			}
			f(t, s, srv)
		})
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

// endings are how the context of a call ends after a moment, and the errors
// that say so.
var endings = []struct {
	name   string
	start  func(context.Context) (context.Context, context.CancelFunc)
	errors []error
}{
	{"cancelled", func(ctx context.Context) (context.Context, context.CancelFunc) {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		time.AfterFunc(50*time.Millisecond, cancel)
		return ctx, cancel
	}, []error{context.Canceled}},
	{"cancelled without a deadline", func(ctx context.Context) (context.Context, context.CancelFunc) {
		ctx, cancel := context.WithCancel(ctx)
		time.AfterFunc(50*time.Millisecond, cancel)
		return ctx, cancel
	}, []error{context.Canceled}},
	{"deadline", func(ctx context.Context) (context.Context, context.CancelFunc) {
		return context.WithTimeout(ctx, 50*time.Millisecond)
	}, []error{context.DeadlineExceeded, os.ErrDeadlineExceeded}},
}

// A server that hangs holds nobody: not who reads its answer, and not who
// makes a connection, with its handshakes, or waits for one.
func TestCallsEndWithTheirContext(t *testing.T) { stores(t, callsEnd) }

// callsEnd hangs srv, where the keys of k's slot are.
func callsEnd(t *testing.T, s *Store, srv *redistest.Server) {
	for _, e := range endings {
		if _, err := s.Do(t.Context(), "set", "k", "v"); err != nil {
			t.Fatal(err) // and there is a connection now
		}
		srv.Pause()
		for i, what := range []string{"a read", "a new connection", "a script"} {
			ended(t, e.name+": "+what, func() {
				ctx, cancel := e.start(t.Context())
				defer cancel()
				var err error
				if i == 2 {
					_, err = s.Run(ctx, counting, Call{[]string{"{k}n"}, []any{1}})
				} else {
					_, err = s.Do(ctx, "get", "k")
				}
				if !isOneOf(err, e.errors) || errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrLost) {
					t.Errorf("%s: %s: got %v", e.name, what, err)
				}
			})
		}
		srv.Resume()
		ended(t, e.name+": after it", func() {
			if v, err := s.Do(t.Context(), "get", "k"); v != "v" || err != nil {
				t.Errorf("%s: after it: got %v, %v", e.name, v, err)
			}
		})
	}
}

func isOneOf(err error, all []error) bool {
	for _, e := range all {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// Those that wait for a connection to be free, and those who have them.
func TestCallsEndWhileThePoolIsExhausted(t *testing.T) {
	stores(t, func(t *testing.T, s *Store, srv *redistest.Server) {
		rdb := s.rdb.(*redis.Client)
		srv.Pause()
		defer srv.Resume()
		all, cancelAll := context.WithCancel(t.Context())
		defer cancelAll()
		var wg sync.WaitGroup
		for range rdb.Options().PoolSize + 5 {
			wg.Go(func() {
				if _, err := s.Do(all, "get", "k"); !errors.Is(err, context.Canceled) {
					t.Errorf("got %v", err)
				}
			})
		}
		for deadline := time.Now().Add(soon); rdb.PoolStats().PendingRequests < 5; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("nobody waits")
			}
		}
		for _, e := range endings {
			ended(t, e.name, func() {
				ctx, cancel := e.start(t.Context())
				defer cancel()
				if _, err := s.Do(ctx, "get", "k"); !isOneOf(err, e.errors) {
					t.Errorf("%s: got %v", e.name, err)
				}
			})
		}
		cancelAll()
		ended(t, "the rest", wg.Wait)
	})
}

// Nothing of a batch whose context has ended stays behind.
func TestBatchesLeaveNothingBehind(t *testing.T) {
	stores(t, func(t *testing.T, s *Store, srv *redistest.Server) {
		calls := []Call{{[]string{"a"}, []any{1}}, {[]string{"b"}, []any{1}}}
		s.RunEach(t.Context(), counting, calls, func(int, any, error) {})
		srv.Pause()
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(50*time.Millisecond, cancel)
		replies := make(chan reply, len(calls))
		ended(t, "the pipeline", func() { s.pipeline(ctx, s.servers.(single).server, counting, calls, []int{0, 1}, replies) })
		for range calls {
			if r := <-replies; r.err == nil {
				t.Errorf("call %d is answered: %v", r.i, r.v)
			}
		}
		srv.Resume()
		nothingUnderWay(t, s)
		s.RunEach(t.Context(), counting, calls, func(i int, v any, err error) {
			if n, _ := v.(int64); n < 2 || err != nil {
				t.Errorf("after it, call %d: got %v, %v", i, v, err)
			}
		})
	})
}

// nothingUnderWay waits until the last call has been forgotten.
func nothingUnderWay(t *testing.T, s *Store) {
	t.Helper()
	for deadline := time.Now().Add(soon); ; time.Sleep(time.Millisecond) {
		n := s.calls.UnderWay()
		if n == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d calls are still under way", n)
		}
	}
}

// Whoever goes away takes nobody along, and nobody hears what was meant for
// another.
func TestInterruptsHitNobodyElse(t *testing.T) {
	stores(t, func(t *testing.T, s *Store, srv *redistest.Server) {
		const callers, rounds = 12, 250
		for i := range callers {
			if _, err := s.Do(t.Context(), "set", fmt.Sprint("key", i), fmt.Sprint("value", i)); err != nil {
				t.Fatal(err)
			}
		}
		var interrupted atomic.Int64
		var wg sync.WaitGroup
		for i := range callers {
			wg.Go(func() {
				patience := 400 * time.Microsecond // of those who leave; kept at what a call takes
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
						t.Errorf("caller %d hears %v", i, v)
					case err != nil && !leaves:
						t.Errorf("caller %d, who stayed: %v", i, err)
					case err != nil && !errors.Is(err, context.Canceled):
						t.Errorf("caller %d, who left: %v", i, err)
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
			t.Errorf("%d of %d calls were interrupted, which proves nothing", n, callers/2*rounds)
		}
		nothingUnderWay(t, s)
	})
}

// reading is a script that says what is under its key.
var reading = NewScript(`return redis.call('GET', KEYS[1])`)

// get asks for the key of caller i by a command, a script or a batch.
func get(ctx context.Context, s *Store, i int) (v any, err error) {
	key := fmt.Sprint("key", i)
	switch rand.N(3) {
	case 0:
		return s.Run(ctx, reading, Call{Keys: []string{key}})
	case 1:
		err = context.Canceled // of what is left untold
		s.RunEach(ctx, reading, []Call{{Keys: []string{key}}}, func(_ int, w any, e error) {
			if v, err = w, e; ctx.Err() != nil && err != nil {
				err = ctx.Err()
			}
		})
		return v, err
	}
	return s.Do(ctx, "get", key)
}

// Of connections that the server has closed meanwhile the pool must know
// before it hands them out: a command is sent once.
func TestClosedConnectionsAreNotHandedOut(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true})
	p := srv.Proxy()
	s, err := open(t, "redis://"+p.Addr(), nil)
	if err != nil {
		t.Fatal(err)
	}
	const rounds = 20
	if _, err := s.Do(t.Context(), "ping"); err != nil {
		t.Fatal(err)
	}
	failed := 0
	for range rounds {
		p.Cut()
		time.Sleep(time.Millisecond)
		if _, err = s.Do(t.Context(), "ping"); err != nil {
			failed++
		}
	}
	// A busy kernel may take its time to tell of an end, but not often.
	if failed > rounds/2 {
		t.Errorf("%d of %d commands were sent into closed connections: %v", failed, rounds, err)
	}
}
