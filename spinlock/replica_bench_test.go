package spinlock_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// BenchmarkReplica lets 1,000 callers lock keys of their own that a replica must confirm.
// The replica gets each write 5 ms late. Some leases are held all the time:
//
//	go test ./spinlock -run '^$' -bench Replica -benchtime 1x
func BenchmarkReplica(b *testing.B) {
	const callers, kept, length = 1000, 1000, 5 * time.Second
	master := redistest.Start(b, &redistest.Options{Own: true, Real: true})
	replica := redistest.Start(b, &redistest.Options{Own: true, Real: true})
	link := master.Proxy()
	replica.Follow(link.Addr())
	link.Delay(5 * time.Millisecond)

	c, err := hasp.Open(b.Context(), "spinlock+"+master.URL()+"?replicas=1&ttl=3s", nil)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	leases := make([]*hasp.Lease, kept)
	for i := range leases {
		if leases[i], err = c.Lock(b.Context(), fmt.Sprint("kept ", i)); err != nil {
			b.Fatal(err)
		}
	}

	var pairs, lost atomic.Int64
	began := time.Now()
	for b.Loop() {
		ctx, cancel := context.WithTimeout(b.Context(), length)
		var wg sync.WaitGroup
		for i := range callers {
			wg.Go(func() {
				for ctx.Err() == nil {
					l, err := c.Lock(b.Context(), fmt.Sprint("own ", i))
					if err != nil {
						b.Error(err)
						return
					}
					if l.Unlock(b.Context()) != nil {
						lost.Add(1)
					}
					pairs.Add(1)
				}
			})
		}
		wg.Wait()
		cancel()
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(pairs.Load())/time.Since(began).Seconds(), "pairs/s")
	for _, l := range leases {
		if l.Unlock(b.Context()) != nil {
			lost.Add(1)
		}
	}
	b.ReportMetric(float64(lost.Load()), "lost")
}
