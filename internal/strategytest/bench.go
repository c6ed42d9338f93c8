package strategytest

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
)

// BenchmarkUncontended measures how one goroutine acquires and releases a free
// key, in several ways. The ways take turns within one run, so that all see the
// same machine. It reports the medians, and their ratios to the two bare
// commands on go-redis. The ways, by the name before the dash:
//
//	bare        the two commands
//	driver      this driver over the same client
//	url         a Client by URL, whose callers can be cancelled
//	background  the same Client, whose callers cannot
//	client      a Client over the same go-redis client, which enforces
//	            deadlines; its callers cannot be cancelled
//	cancel      the same Client, whose callers can be
func (s Strategy) BenchmarkUncontended(b *testing.B) {
	srv := redistest.Start(b, &redistest.Options{Own: true})
	o := srv.ClientOptions()
	o.ContextTimeoutEnabled = true
	rdb := redis.NewClient(o)
	defer rdb.Close()
	d := s.open(rdb)
	over := hasp.New(d, nil)
	defer over.Close()
	byURL, err := hasp.Open(b.Context(), s.Name+"+"+srv.URL(), nil)
	if err != nil {
		b.Fatal(err)
	}
	defer byURL.Close()
	cancellable, cancel := context.WithCancel(b.Context())
	defer cancel()
	forever := context.Background()
	compare(b, []way{
		{"bare", forever, bare(rdb)},
		{"driver", forever, driver(d)},
		{"url", cancellable, client(byURL)},
		{"background", forever, client(byURL)},
		{"client", forever, client(over)},
		{"cancel", cancellable, client(over)},
	})
}

// way is one way to acquire a key and to release it.
type way struct {
	name string
	ctx  context.Context
	pair func(ctx context.Context, key string) error
}

// compare runs the ways in turns. It compares the others with the first.
func compare(b *testing.B, ways []way) {
	const block = 200 // pairs of one way before the next has its turn
	times := make([][]time.Duration, len(ways))
	for b.Loop() {
		for w, way := range ways {
			for i := range block {
				key := fmt.Sprint("bench", i)
				began := time.Now()
				if err := way.pair(way.ctx, key); err != nil {
					b.Fatal(way.name, ": ", err)
				}
				times[w] = append(times[w], time.Since(began))
			}
		}
	}
	b.ReportMetric(0, "ns/op")
	first := 0.0
	for w, all := range times {
		slices.Sort(all)
		median := float64(all[len(all)/2].Nanoseconds())
		b.ReportMetric(median, ways[w].name+"-ns")
		if w == 0 {
			first = median
			continue
		}
		b.ReportMetric(median/first, ways[w].name+"/"+ways[0].name)
	}
}

// bare is a lock without a library: SET NX PX, and a script that compares and
// deletes.
func bare(rdb *redis.Client) func(context.Context, string) error {
	release := redis.NewScript(`if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0`)
	return func(ctx context.Context, key string) error {
		const token = "0123456789abcdefghijkl"
		if err := rdb.SetArgs(ctx, key, token, redis.SetArgs{Mode: "NX", TTL: 30 * time.Second}).Err(); err != nil {
			return err
		}
		return release.Run(ctx, rdb, []string{key}, token).Err()
	}
}

func driver(d backend.Driver) func(context.Context, string) error {
	return func(ctx context.Context, key string) error {
		c := backend.Claim{Key: key, Token: "0123456789abcdefghijkl", Owner: "host/1/bench", TTL: 30 * time.Second, Timeout: 3 * time.Second}
		if _, err := d.Acquire(ctx, c); err != nil {
			return err
		}
		return d.Release(ctx, c)
	}
}

func client(c *hasp.Client) func(context.Context, string) error {
	return func(ctx context.Context, key string) error {
		lease, err := c.Lock(ctx, key)
		if err != nil {
			return err
		}
		return lease.Unlock(ctx)
	}
}
