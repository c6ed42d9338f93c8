package hasp_test

import (
	"context"
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
