package acceptance

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// BenchmarkSlots measures 64 callers in 4 Clients that share 8 or 32 slots. Each holds its
// slot for 5 ms. Commands are those of the server, with those in scripts.
func BenchmarkSlots(b *testing.B) {
	srv := redistest.Start(b, &redistest.Options{Own: true, Real: true})
	for _, s := range sharing {
		for _, slots := range []int{8, 32} {
			b.Run(fmt.Sprintf("%s/%d", s.name, slots), func(b *testing.B) {
				benchmarkSlots(b, srv, s.name, slots)
			})
		}
	}
}

func benchmarkSlots(b *testing.B, srv *redistest.Server, strategy string, slots int) {
	const clients, callers, hold = 4, 64, 5 * time.Millisecond
	commands := func() int64 {
		n, err := strconv.ParseInt(srv.Client().InfoMap(b.Context(), "stats").Item("Stats", "total_commands_processed"), 10, 64)
		if err != nil {
			b.Fatal(err)
		}
		return n
	}

	var mu sync.Mutex
	left, held, most, longest := b.N, 0, 0, time.Duration(0)
	var wg sync.WaitGroup
	key := fmt.Sprint(b.Name(), b.N)
	before := commands()
	for range clients {
		c, err := hasp.Open(b.Context(), strategy+"+"+srv.URL(), nil)
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		for range callers / clients {
			wg.Go(func() {
				for {
					asked := time.Now()
					l, err := c.Lock(b.Context(), key, hasp.WithSlots(slots))
					if err != nil {
						b.Error(err)
						return
					}
					mu.Lock()
					held++
					left--
					more := left > 0
					most, longest = max(most, held), max(longest, time.Since(asked))
					mu.Unlock()
					time.Sleep(hold)
					mu.Lock()
					held--
					mu.Unlock()
					l.Unlock(context.Background())
					if !more {
						return
					}
				}
			})
		}
	}
	wg.Wait()

	b.ReportMetric(float64(commands()-before)/float64(b.N), "commands/lease")
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "leases/s")
	b.ReportMetric(float64(longest.Milliseconds()), "longest-ms")
	b.ReportMetric(float64(most), "at-once")
}
