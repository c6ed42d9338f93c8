package hasp_test

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
)

// listen is what Listen does. It may close wake.
type listen func(ctx context.Context, wake chan struct{}) error

// waking is a faulty driver that is a Waker.
type waking struct {
	*faulty

	mu        sync.Mutex             // guards all below
	listen    listen                 // nil for nothing
	begun     []time.Time            // when Listen was called
	listening map[chan struct{}]bool // the wake channels of the callers that listen
}

func (w *waking) Listen(ctx context.Context, _ backend.Claim) (<-chan struct{}, func(), error) {
	w.mu.Lock()
	w.begun = append(w.begun, time.Now())
	listen := w.listen
	w.mu.Unlock()
	wake := make(chan struct{}, 1)
	if listen != nil {
		if err := listen(ctx, wake); err != nil {
			return nil, nil, err
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.listening[wake] = true
	return wake, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if !w.listening[wake] {
			panic("stop was called twice")
		}
		delete(w.listening, wake)
	}, nil
}

// withWaker runs a test in a bubble, with a Client over a driver that is a Waker.
func withWaker(t *testing.T, o *hasp.Options, run func(t *testing.T, w *waking, c *hasp.Client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &waking{faulty: newFaulty(), listening: map[chan struct{}]bool{}}
		c := opened(t, w, o)
		run(t, w, c)
	})
}

func (w *waking) wake() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for wake := range w.listening {
		wake <- struct{}{}
	}
}

// A caller that listens asks when it is woken, at the end of the holder's term, once a second, and
// just before its wait ends. A caller that cannot listen polls, and tries to listen once a second.
func TestCallersThatListen(t *testing.T) {
	const at = 3300 * time.Millisecond // when the holder releases the key
	closes := func(after time.Duration) listen {
		return func(_ context.Context, wake chan struct{}) error {
			time.AfterFunc(after, func() { close(wake) })
			return nil
		}
	}
	for name, tc := range map[string]struct {
		listen  listen
		ttl     time.Duration // of the holder; 0 means long
		told    bool          // whether the release wakes the callers
		opts    []hasp.Option
		within  time.Duration // longest time from the release, or from the end of ttl, to the grant
		asked   int           // most attempts; 0 means any number, because the caller polls
		listens int           // least number of calls of Listen
		foreign bool          // the holder is another program, which wakes nobody
	}{
		"woken":                {told: true, asked: 7, listens: 1},
		"a foreign holder":     {foreign: true, within: 200 * time.Millisecond, listens: 1},
		"the message is lost":  {within: time.Second, asked: 7, listens: 1},
		"the holder dies":      {ttl: 2500 * time.Millisecond, within: 2 * time.Millisecond, asked: 6, listens: 1},
		"before its own end":   {opts: options{hasp.WithMaxWait(at + 5*time.Millisecond)}, within: 5 * time.Millisecond, asked: 7, listens: 1},
		"listens no more":      {listen: closes(100 * time.Millisecond), within: 100 * time.Millisecond, listens: 3},
		"listens not long":     {listen: closes(0), within: 100 * time.Millisecond, listens: 4},
		"cannot listen":        {listen: func(context.Context, chan struct{}) error { return errNet }, within: 100 * time.Millisecond, listens: 4},
		"Listen does not end":  {listen: func(ctx context.Context, _ chan struct{}) error { <-ctx.Done(); return ctx.Err() }, within: 1100 * time.Millisecond, listens: 2},
		"Listen is left alone": {listen: func(context.Context, chan struct{}) error { time.Sleep(5 * time.Second); return nil }, within: 1100 * time.Millisecond, listens: 2},
	} {
		t.Run(name, func(t *testing.T) {
			withWaker(t, &hasp.Options{Timeout: 6 * time.Second}, func(t *testing.T, w *waking, c *hasp.Client) {
				w.listen = tc.listen
				w.acquire = func(q *call) error {
					err := q.send()
					var held *backend.HeldError
					if errors.As(err, &held) {
						held.Foreign = tc.foreign
					}
					return err
				}
				heldByAnother(t, w.faulty, cmp.Or(tc.ttl, time.Hour))
				time.AfterFunc(at, func() {
					w.Driver.Release(context.Background(), backend.Claim{Key: "k", Token: "stranger"})
					if tc.told {
						w.wake()
					}
				})
				free := time.Now().Add(cmp.Or(tc.ttl, at))
				lease := lockNow(t, c, "k", tc.opts...)
				between(t, "the time from the end of the hold to the grant", time.Since(free), 0, tc.within)
				unlock(t, lease)
				time.Sleep(10 * time.Second) // until a Listen that was left behind has ended
				w.mu.Lock()
				defer w.mu.Unlock()
				equal(t, "callers that still listen", len(w.listening), 0)
				between(t, "calls of Listen", len(w.begun), tc.listens, tc.listens+1)
				if n := len(w.acquired); tc.asked > 0 && n > tc.asked {
					t.Errorf("%d attempts, want %d at most", n, tc.asked)
				}
			})
		})
	}
}

// If the key is released after the refusal, and before the caller listens, the caller gets it
// immediately.
func TestReleaseBeforeACallerListens(t *testing.T) {
	withWaker(t, nil, func(t *testing.T, w *waking, c *hasp.Client) {
		heldByAnother(t, w.faulty, time.Hour)
		w.listen = func(ctx context.Context, _ chan struct{}) error {
			return w.Driver.Release(ctx, backend.Claim{Key: "k", Token: "stranger"})
		}
		began := time.Now()
		lease := lockNow(t, c, "k")
		within(t, "Lock", began, 0)
		unlock(t, lease)
	})
}

// If only Listen fails, that is no outage. A caller that leaves stops listening. If shared holds
// have refused it, the token of its last claim is released, because that claim keeps out new shared
// callers.
func TestCallersThatListenAndLeave(t *testing.T) {
	for _, fails := range []bool{false, true} {
		for _, shared := range []bool{false, true} {
			withWaker(t, nil, func(t *testing.T, w *waking, c *hasp.Client) {
				if fails {
					w.listen = func(context.Context, chan struct{}) error { return errNet }
				}
				stranger := backend.Claim{Key: "k", Token: "stranger", TTL: time.Hour, Shared: shared}
				await.Must(t, errOf(w.Driver.Acquire(t.Context(), stranger)))
				ctx := timeout(t, t.Context(), 10*time.Second)
				wantOnly(t, "Lock", errOf(c.Lock(ctx, "k")), hasp.ErrHeld, context.DeadlineExceeded)
				synctest.Wait()
				nothingLeft(t, c)
				w.mu.Lock()
				defer w.mu.Unlock()
				equal(t, "callers that still listen", len(w.listening), 0)
				want := []string(nil)
				if shared {
					want = w.acquired[len(w.acquired)-2 : len(w.acquired)-1] // not the last claim: it has no WillRetry, and keeps out no caller
				}
				if !slices.Equal(w.released, want) {
					t.Errorf("fails %t, shared %t: released %q, want %q", fails, shared, w.released, want)
				}
			})
		}
	}
}
