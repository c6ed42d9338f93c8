package otelhasp_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	nooptrace "go.opentelemetry.io/otel/trace/noop"

	"github.com/hasplock/hasp"
	_ "github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/redistest"
	_ "github.com/hasplock/hasp/memlock"
	"github.com/hasplock/hasp/otelhasp"
)

// counting is a Locker that counts what callers of Lock and TryLock see. It knows nothing
// of events.
type counting struct {
	c *hasp.Client

	mu      sync.Mutex
	want    map[string]int64 // figures
	leases  []*hasp.Lease    // all that callers got, but for re-entries
	inner   []*hasp.Lease    // those that have re-entered
	unknown map[*hasp.Lease]bool
}

func (k *counting) count(figure string, n int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.want[figure] += n
}

func (k *counting) Lock(ctx context.Context, key string, opts ...hasp.Option) (*hasp.Lease, error) {
	l, err := k.c.Lock(ctx, key, opts...)
	return k.got("lock", l, err)
}

func (k *counting) TryLock(ctx context.Context, key string, opts ...hasp.Option) (*hasp.Lease, error) {
	l, err := k.c.TryLock(ctx, key, opts...)
	return k.got("trylock", l, err)
}

func (k *counting) got(op string, l *hasp.Lease, err error) (*hasp.Lease, error) {
	why := ""
	switch {
	case err == nil:
		k.mu.Lock()
		k.leases = append(k.leases, l)
		k.mu.Unlock()
	case errors.Is(err, hasp.ErrUnavailable):
		why = "unavailable"
	case errors.Is(err, context.Canceled):
		why = "canceled"
	case errors.Is(err, hasp.ErrHeld):
		why = "held"
	case errors.Is(err, context.DeadlineExceeded):
		why = "deadline_exceeded"
	case errors.Is(err, hasp.ErrInvalid):
		why = "invalid"
	default:
		why = err.Error()
	}
	if why == "" {
		k.count("wait_time hasp.operation.name="+op, 1)
	} else {
		k.count("wait_time error.type="+why+" hasp.operation.name="+op, 1)
	}
	if op == "lock" && (why == "held" || why == "deadline_exceeded") {
		k.count("timeouts", 1)
	}
	return l, err
}

// unlock unlocks a lease, and notes an outcome that is unknown.
func (k *counting) unlock(l *hasp.Lease) {
	if err := l.Unlock(context.Background()); errors.Is(err, hasp.ErrUnavailable) {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.unknown[l] = true
	}
}

// act makes one random call, or a few.
func (k *counting) act(ctx context.Context, r *rand.Rand) {
	key := fmt.Sprint("key ", r.IntN(5))
	short := time.Duration(r.IntN(1000)) * time.Microsecond
	switch n := r.IntN(100); {
	case n < 40:
		if l, err := k.Lock(ctx, key); err == nil {
			k.unlock(l)
		}
	case n < 55:
		if l, err := k.TryLock(ctx, key); err == nil {
			k.unlock(l)
		}
	case n < 65:
		if l, err := k.Lock(ctx, key, hasp.WithMaxWait(short)); err == nil {
			time.Sleep(short) // so that others wait for longer than they may
			k.unlock(l)
		}
	case n < 70:
		ctx, cancel := context.WithCancel(ctx)
		stop := time.AfterFunc(short, cancel)
		if l, err := k.Lock(ctx, key); err == nil {
			k.unlock(l)
		}
		stop.Stop()
		cancel()
	case n < 75:
		ctx, cancel := context.WithTimeout(ctx, short)
		if l, err := k.Lock(ctx, key); err == nil {
			k.unlock(l)
		}
		cancel()
	case n < 80: // lost, unless another caller's Break came first
		if l, err := k.Lock(ctx, key); err == nil {
			k.c.Break(ctx, key)
			k.unlock(l)
		}
	case n < 83: // lost
		if l, err := k.Lock(ctx, key, hasp.WithMaxHold(short+1)); err == nil {
			<-l.Context().Done()
			k.unlock(l)
		}
	case n < 86:
		k.Lock(ctx, key, hasp.WithTTL(short/2)) // invalid
	case n < 90:
		if l, err := k.Lock(ctx, key); err == nil {
			if inner, err := k.c.Lock(l.Context(), key); err == nil {
				k.mu.Lock()
				k.inner = append(k.inner, inner)
				k.mu.Unlock()
				k.unlock(inner)
			} else {
				k.got("lock", nil, err)
			}
			k.unlock(l)
		}
	case n < 94:
		if l, err := k.Lock(ctx, key, hasp.WithShared()); err == nil {
			k.unlock(l)
		}
	case n < 97:
		if l, err := k.Lock(ctx, "slots", hasp.WithSlots(2), hasp.WithMaxWait(short)); err == nil {
			k.unlock(l)
		}
	default:
		if all, err := hasp.LockAll(ctx, k, []string{"key 0", "key 1", "key 2"}, hasp.WithMaxWait(10*time.Millisecond)); err == nil {
			for _, l := range all.All() {
				k.unlock(l)
			}
		}
	}
}

// calls returns how many calls there were.
func (k *counting) calls() (n int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for figure, count := range k.want {
		if figure != "timeouts" {
			n += count
		}
	}
	return n
}

// A run with everything that can end a wait or a hold, from several goroutines. At its end
// each figure is what the callers have counted.
func TestFiguresOfARunAreExact(t *testing.T) {
	for _, tc := range []struct {
		strategy string
		calls    int64
	}{{"memlock", 10000}, {"fairlock", 1500}} {
		t.Run(tc.strategy, func(t *testing.T) {
			url := "memlock://"
			if tc.strategy == "fairlock" {
				url = "fairlock+" + redistest.Start(t, nil).URL() + "?prefix=exact:"
			}
			var mu sync.Mutex
			var waits, holds float64
			var failed int64
			m := newMeter()
			c, err := hasp.Open(t.Context(), url, &hasp.Options{Timeout: 20 * time.Second, Observe: otelhasp.Observe(func(_ context.Context, e hasp.Event) {
				mu.Lock()
				defer mu.Unlock()
				if !e.Reentry {
					waits += e.Wait.Seconds()
					holds += e.Hold.Seconds()
				}
				if e.Kind == hasp.EventRenewFailed {
					failed++
				}
			}, otelhasp.WithMeterProvider(m), otelhasp.WithTracerProvider(nooptrace.NewTracerProvider()))})
			must(t, err)
			k := &counting{c: c, want: map[string]int64{}, unknown: map[*hasp.Lease]bool{}}

			var wg sync.WaitGroup
			for i := range uint64(8) {
				wg.Go(func() {
					r := rand.New(rand.NewPCG(i, 1))
					for k.calls() < tc.calls {
						k.act(t.Context(), r)
					}
				})
			}
			wg.Wait()
			t.Logf("%d calls", k.calls())

			// Close ends these. Their Unlock only frees the key.
			const left = 7
			k.want["use_time error.type=closed"] = left
			for i := range left {
				l, err := c.Lock(t.Context(), fmt.Sprint("left ", i))
				must(t, err)
				k.count("wait_time hasp.operation.name=lock", 1)
				wg.Go(func() {
					<-l.Context().Done()
					must(t, l.Unlock(context.Background()))
				})
			}
			must(t, c.Close())
			wg.Wait()

			for _, l := range k.leases {
				switch err := l.Err(); {
				case k.unknown[l]:
					k.want["use_time error.type=unavailable"]++
				case err == hasp.ErrReleased:
					k.want["use_time"]++
				case err == hasp.ErrLost:
					k.want["use_time error.type=lost"]++
					k.want["losses"]++
				default:
					t.Errorf("a lease has ended with %v", err)
				}
			}
			for _, l := range k.inner {
				if l.Err() == hasp.ErrLost {
					k.want["losses"]++
				}
			}
			mu.Lock()
			defer mu.Unlock()
			if failed > 0 {
				k.want["renewal_failures"] = failed
			}
			maps.DeleteFunc(k.want, func(_ string, n int64) bool { return n == 0 })
			m.want(t, k.want)
			_, seconds := m.figures(t)
			if w, u := seconds["wait_time"], seconds["use_time"]; math.Abs(w-waits) > 1e-6 || math.Abs(u-holds) > 1e-6 {
				t.Errorf("waited %v s and used %v s, want %v and %v", w, u, waits, holds)
			}

			// The run had some of each.
			for _, figure := range []string{"wait_time hasp.operation.name=lock", "wait_time hasp.operation.name=trylock",
				"wait_time error.type=held hasp.operation.name=lock", "wait_time error.type=held hasp.operation.name=trylock",
				"wait_time error.type=invalid hasp.operation.name=lock", "timeouts", "losses", "use_time error.type=closed"} {
				if k.want[figure] == 0 {
					t.Errorf("no %q in this run", figure)
				}
			}
			t.Log(k.want)
		})
	}
}
