package fairlock_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/redistest"
)

// Readers and writers of several drivers come, give up and hold the key at random. No
// writer holds it beside another holder, fences grow, no caller waits for long, and
// nothing is left.
func TestMixOfReadersAndWriters(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	const callers = 24
	during := 3 * time.Second
	if !testing.Short() {
		during = 15 * time.Second
	}
	var ds []*fairlock.Driver
	for range 4 {
		ds = append(ds, r.another(t)) // they poll every 20 s, so that a lost wake-up shows
	}
	var (
		mu                     sync.Mutex // guards all below
		readers, writers       int
		lastWrite              uint64
		holds, together, given int
		longest                time.Duration
	)
	end := time.Now().Add(during)
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			d := ds[i%len(ds)]
			for time.Now().Before(end) {
				c := fenced("k")
				c.Renewed, c.Shared = true, rand.N(3) > 0
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				gives := rand.N(4) == 0
				if gives {
					ctx, cancel = context.WithTimeout(t.Context(), rand.N(20*time.Millisecond))
				}
				began := time.Now()
				var g backend.Grant
				var err error
				if rand.N(5) == 0 {
					g, err = d.Acquire(t.Context(), c)
				} else {
					g, err = d.Wait(ctx, c)
				}
				took := time.Since(began)
				cancel()
				if err != nil {
					if !errors.Is(err, backend.ErrHeld) && !gives {
						t.Errorf("%v after %v", err, took)
					}
					if e := d.Release(t.Context(), c); e != nil && !errors.Is(e, backend.ErrLost) {
						t.Errorf("release: %v", e)
					}
					if !gives && took > 10*time.Second {
						t.Errorf("waited for %v: %v", took, err)
					}
					mu.Lock()
					given++
					mu.Unlock()
					continue
				}

				mu.Lock()
				holds++
				longest = max(longest, took)
				switch {
				case c.Shared:
					readers++
					if readers > 1 {
						together++
					}
					if g.Fence <= lastWrite {
						t.Errorf("a reader has fence %d after %d", g.Fence, lastWrite)
					}
				default:
					writers++
					if g.Fence <= lastWrite {
						t.Errorf("a writer has fence %d after %d", g.Fence, lastWrite)
					}
					lastWrite = g.Fence
				}
				if writers > 1 || writers == 1 && readers > 0 {
					t.Errorf("%d writers and %d readers", writers, readers)
				}
				mu.Unlock()
				time.Sleep(rand.N(2 * time.Millisecond))
				mu.Lock()
				if c.Shared {
					readers--
				} else {
					writers--
				}
				mu.Unlock()
				if err := d.Release(t.Context(), c); err != nil {
					t.Errorf("release: %v", err)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d holds, %d of readers beside others, %d given up, longest wait %v", holds, together, given, longest)
	if together == 0 || longest > 5*time.Second {
		t.Errorf("%d readers beside others, longest wait %v", together, longest)
	}
	atLast(t, "an empty queue", func() bool { return r.Redis.Exists(t.Context(), queueKey, "k").Val() == 0 })
}
