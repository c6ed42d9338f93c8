package hasp_test

import (
	"context"
	"runtime"
	"strconv"
	"sync"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/memlock"
)

// The two benchmarks below show what the engine adds to a driver: the
// difference is Lock and Unlock with everything they promise.

func BenchmarkDriverAlone(b *testing.B) {
	d := memlock.New()
	ctx := b.Context()
	claim := backend.Claim{Key: "k", Token: "t", Owner: "o", TTL: hasp.DefaultTTL, Timeout: hasp.DefaultTimeout}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := d.Acquire(ctx, claim); err != nil {
			b.Fatal(err)
		}
		if err := d.Release(ctx, claim); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLockUnlock(b *testing.B) {
	c := hasp.New(memlock.New(), nil)
	defer c.Close()
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	b.ReportAllocs()
	for b.Loop() {
		l, err := c.Lock(ctx, "k")
		if err != nil {
			b.Fatal(err)
		}
		if err := l.Unlock(ctx); err != nil {
			b.Fatal(err)
		}
	}
}

// All waiters of one key leave at once. The cost for each must not grow with
// their number.
func BenchmarkCancelWaiters(b *testing.B) {
	for _, n := range []int{1_000, 10_000, 50_000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				c := hasp.New(polled{memlock.New()}, nil)
				l, err := c.Lock(b.Context(), "k")
				if err != nil {
					b.Fatal(err)
				}
				ctx, cancel := context.WithCancel(b.Context())
				var waiters sync.WaitGroup
				for range n {
					waiters.Go(func() { c.Lock(ctx, "k") })
				}
				for hasp.Waiters(c, "k") < n {
					runtime.Gosched()
				}
				b.StartTimer()
				cancel()
				waiters.Wait()
				b.StopTimer()
				l.Unlock(b.Context())
				c.Close()
				b.StartTimer()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/waiter")
		})
	}
}

// polled hides that memlock is a Waiter.
type polled struct{ *memlock.Driver }

func (polled) Traits() backend.Traits { return backend.Traits{Fenced: true} }
func (polled) Wait()                  {}
