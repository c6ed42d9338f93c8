package conformance

import (
	"cmp"
	"context"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// Bench runs the same benchmarks for every driver. The terms of its holds are Harness.Long, so the
// engine renews no hold while a benchmark runs.
//
//	driver         Acquire and Release of a key that no other caller wants
//	client         Lock and Unlock of a key by one goroutine, while no other caller wants the key
//	client-many    Lock and Unlock by many goroutines, each with a key of its own
//	contended      Lock and Unlock of one key by many goroutines of four Clients
//	handover       a key goes from one driver to the waiter of another, and back
//	renew          one hold's share of a Renew of 1,000 holds
func Bench(b *testing.B, h Harness) {
	ctx := context.WithoutCancel(b.Context())
	s, err := newSuite(ctx, h, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(s.stop)

	for _, bench := range []struct {
		name string
		need need
		run  func(b *testing.B, e *env)
	}{
		{"driver", nil, benchDriver},
		{"client", nil, benchClient},
		{"client-many", nil, benchClientMany},
		{"contended", nil, benchContended},
		{"handover", waiter, benchHandover},
		{"renew", nil, benchRenew},
	} {
		b.Run(bench.name, func(b *testing.B) {
			if reason := bench.need.missing(s); reason != "" {
				b.Skip(reason)
			}

			e := newEnv(ctx, s, s.paceOf(0))
			defer e.close()
			b.ReportAllocs()
			if err := e.try(func() { bench.run(b, e) }); err != nil {
				b.Fatal(err)
			}
		})
	}
}

func benchDriver(b *testing.B, e *env) {
	d := e.open()
	c, token := e.claim(e.long), uint64(1<<63)
	for b.Loop() {
		// Each attempt needs a new token, which is not part of the driver's work.
		token++
		c.Token = strconv.FormatUint(token, 10)
		if _, err := d.Acquire(e.ctx, c); err != nil {
			b.Fatal(err)
		}
		if err := d.Release(e.ctx, c); err != nil {
			b.Fatal(err)
		}
	}
}

func lockUnlock(b *testing.B, c *hasp.Client, key string) {
	lease, err := c.Lock(context.Background(), key)
	if err == nil {
		err = lease.Unlock(context.Background())
	}
	if err != nil {
		b.Error(err)
	}
}

func benchClient(b *testing.B, e *env) {
	c, key := e.newClient(), e.key()
	for b.Loop() {
		lockUnlock(b, c, key)
	}
}

// benchClients measures Lock and Unlock by many goroutines, which share the clients. They all lock
// key. If key is empty, each goroutine has a key of its own.
func benchClients(b *testing.B, e *env, clients []*hasp.Client, parallelism int, key string) {
	var next atomic.Int32
	b.SetParallelism(parallelism)
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		c, k := clients[int(next.Add(1))%len(clients)], cmp.Or(key, e.key())
		for pb.Next() {
			lockUnlock(b, c, k)
		}
	})
}

func benchClientMany(b *testing.B, e *env) {
	benchClients(b, e, []*hasp.Client{e.newClient()}, 64, "")
}

func benchContended(b *testing.B, e *env) {
	benchClients(b, e, append(e.clients(), e.newClient()), 16, e.key())
}

// benchHandover lets two drivers take turns. Each driver waits while the other holds the key.
func benchHandover(b *testing.B, e *env) {
	drivers := []*driver{e.open(), e.open()}
	key := e.key()
	var turns atomic.Int64

	b.ResetTimer()
	must(e.each(len(drivers), func(i int) {
		d := drivers[i]
		for turns.Add(1) <= int64(b.N) {
			c := e.claimOf(key, e.long)
			must(errOf(wait(e.ctx, d.Driver, c)))
			must(d.Release(e.ctx, c))
		}
	}))
}

func benchRenew(b *testing.B, e *env) {
	d := e.open()
	cs := d.holdMany(1000, e.long)
	b.ResetTimer()

	for n := b.N; n > 0; n -= len(cs) {
		batch := cs[:min(n, len(cs))]
		var answered atomic.Int32
		var failed atomic.Pointer[error]
		d.Renew(e.ctx, batch, func(_ int, _ backend.Grant, err error) {
			answered.Add(1)
			if err != nil {
				failed.Store(&err)
			}
		})

		if err := failed.Load(); err != nil {
			b.Fatal(*err)
		}
		if got := int(answered.Load()); got != len(batch) {
			b.Fatalf("%d of %d claims were answered", got, len(batch))
		}
	}

	b.StopTimer()
	d.give(cs...)
}
