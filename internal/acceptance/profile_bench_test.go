package acceptance

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// These benchmarks are for a profile of the client, such as
//
//	go test -run '^$' -bench FreeKeys -benchtime 5s -cpuprofile cpu.out ./internal/acceptance
//	go tool pprof -top cpu.out

// BenchmarkFreeKeys locks and unlocks free keys from 256 goroutines.
func BenchmarkFreeKeys(b *testing.B) {
	srv := redistest.Start(b, &redistest.Options{Own: true, Real: true})
	callers(b, "spinlock+"+srv.URL(), 1, 256, func(caller int) string { return fmt.Sprint("key", caller) })
}

// BenchmarkQueue locks and unlocks one key from 16 goroutines of each of four Clients, in
// the order of their arrival.
func BenchmarkQueue(b *testing.B) {
	srv := redistest.Start(b, &redistest.Options{Own: true, Real: true})
	callers(b, "fairlock+"+srv.URL(), 4, 16, func(int) string { return "key" })
}

// callers makes b.N pairs of Lock and Unlock, from some goroutines of each of some Clients.
func callers(b *testing.B, url string, clients, goroutines int, key func(caller int) string) {
	var left atomic.Int64
	left.Store(int64(b.N))
	var wg sync.WaitGroup
	for i := range clients {
		c, err := hasp.Open(b.Context(), url, nil)
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		for j := range goroutines {
			wg.Go(func() {
				for left.Add(-1) >= 0 {
					l, err := c.Lock(b.Context(), key(i*goroutines+j))
					if err != nil {
						b.Error(err)
						return
					}
					if err := l.Unlock(context.Background()); err != nil {
						b.Error(err)
					}
				}
			})
		}
	}
	wg.Wait()
}
