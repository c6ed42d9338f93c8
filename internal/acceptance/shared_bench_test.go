package acceptance

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// BenchmarkShared has 64 callers in four Clients that want one key, each for 1 ms at a
// time. One in twenty is a writer. "shared": the others use WithShared; "exclusive": no
// caller does. It fails if a writer holds the key together with another caller.
func BenchmarkShared(b *testing.B) {
	one := redistest.Start(b, &redistest.Options{Own: true, Real: true}).URL()
	three := redistest.StartNodes(b, 3, &redistest.Options{Own: true, Real: true}).URL()
	for _, s := range []struct{ name, url string }{
		{"memlock", "memlock://"}, {"spinlock", "spinlock+" + one}, {"pubsublock", "pubsublock+" + one},
		{"fairlock", "fairlock+" + one}, {"redlock", "redlock+" + three},
	} {
		for _, mode := range []string{"shared", "exclusive"} {
			b.Run(s.name+"/"+mode, func(b *testing.B) { benchmarkShared(b, s.url, mode == "shared") })
		}
	}
}

func benchmarkShared(b *testing.B, url string, shared bool) {
	const clients, callers, every, hold = 4, 64, 20, time.Millisecond
	var mu sync.Mutex
	var readers, writers, holds int
	var longestRead, longestWrite time.Duration
	key := fmt.Sprint(b.Name(), b.N)
	var wg sync.WaitGroup
	for range clients {
		c, err := hasp.Open(b.Context(), url, nil)
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		for range callers / clients {
			wg.Go(func() {
				for {
					mu.Lock()
					n := holds
					holds++
					mu.Unlock()
					if n >= b.N {
						return
					}

					writes := n%every == 0
					count, longest, opts := &readers, &longestRead, []hasp.Option(nil)
					if writes {
						count, longest = &writers, &longestWrite
					} else if shared {
						opts = append(opts, hasp.WithShared())
					}
					asked := time.Now()
					l, err := c.Lock(b.Context(), key, opts...)
					if err != nil {
						b.Error(err)
						return
					}
					mu.Lock()
					*count++
					*longest = max(*longest, time.Since(asked))
					if writers > 1 || writers > 0 && readers > 0 {
						b.Errorf("%d writers and %d readers hold the key", writers, readers)
					}
					mu.Unlock()
					time.Sleep(hold)
					mu.Lock()
					*count--
					mu.Unlock()
					l.Unlock(context.Background())
				}
			})
		}
	}
	wg.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "holds/s")
	b.ReportMetric(longestRead.Seconds()*1000, "longest-read-ms")
	b.ReportMetric(longestWrite.Seconds()*1000, "longest-write-ms")
}
