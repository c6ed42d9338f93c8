package hasp_test

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

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

func BenchmarkDo(b *testing.B) {
	c := hasp.New(memlock.New(), nil)
	defer c.Close()
	b.ReportAllocs()
	for b.Loop() {
		err := hasp.Do(b.Context(), c, "k", func(context.Context, *hasp.Lease) error { return nil })
		if err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDistinctKeys(b *testing.B) {
	c := hasp.New(memlock.New(), nil)
	defer c.Close()
	var n atomic.Int64
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		key := strconv.FormatInt(n.Add(1), 10)
		for pb.Next() {
			l, err := c.Lock(b.Context(), key, hasp.WithTTL(time.Minute))
			if err != nil {
				b.Error(err)
				return
			}
			l.Unlock(b.Context())
		}
	})
}
