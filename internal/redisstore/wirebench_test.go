package redisstore_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
	_ "github.com/hasplock/hasp/spinlock"
)

// BenchmarkWire measures how many goroutines lock and release free keys, each its own
// keys, in several ways. The ways take turns within one run:
//
//	bare   the two commands on a go-redis client
//	auto   the same on its AutoPipeline
//	async  the same on its AsyncAutoPipeline, full duplex, whose callers may leave
//	driver Acquire and Release of a spinlock by URL
//	hasp   Lock and Unlock of one
//
// It reports the median time of a pair over the rounds, how many times as many pairs
// there were as with bare, and the allocations of a pair.
func BenchmarkWire(b *testing.B) {
	srv := redistest.Start(b, &redistest.Options{Own: true})
	rdb := srv.Client()
	auto, err := srv.Client().AutoPipeline()
	if err != nil {
		b.Fatal(err)
	}
	defer auto.Close()
	async, err := srv.Client().AsyncAutoPipelineWithOptions(&redis.AutoPipelineOptions{FullDuplex: true})
	if err != nil {
		b.Fatal(err)
	}
	defer async.Close()
	d, err := hasp.Config{Strategy: "spinlock", Nodes: []string{srv.URL()}}.Driver(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	defer d.Close()
	c, err := hasp.Open(b.Context(), "spinlock+"+srv.URL(), nil)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	ways := []struct {
		name string
		pair func(ctx context.Context, key string) error
	}{
		{"bare", barePair(rdb)},
		{"auto", barePair(auto)},
		{"async", asyncPair(async)},
		{"driver", func(ctx context.Context, key string) error {
			cl := backend.Claim{Key: key, Token: benchToken, TTL: 30 * time.Second, Timeout: 3 * time.Second}
			if _, err := d.Acquire(ctx, cl); err != nil {
				return err
			}
			return d.Release(ctx, cl)
		}},
		{"hasp", func(ctx context.Context, key string) error {
			lease, err := c.Lock(ctx, key)
			if err != nil {
				return err
			}
			return lease.Unlock(ctx)
		}},
	}
	for _, callers := range []int{1, 4, 16, 64, 256, 1024} {
		b.Run(fmt.Sprint(callers), func(b *testing.B) {
			times := make([][]float64, len(ways))
			allocs := make([]float64, len(ways))
			for b.Loop() {
				for w, way := range ways {
					took, objects := race(b, callers, way.pair)
					times[w] = append(times[w], took)
					allocs[w] = objects
				}
			}
			b.ReportMetric(0, "ns/op")
			for w, way := range ways {
				b.ReportMetric(median(times[w]), way.name+"-ns")
				b.ReportMetric(allocs[w], way.name+"-allocs")
				if w > 0 {
					b.ReportMetric(median(times[0])/median(times[w]), way.name+"/bare")
				}
			}
		})
	}
}

// race makes callers lock and release keys for a moment. It returns the time and the
// allocations of a pair.
func race(b *testing.B, callers int, pair func(context.Context, string) error) (ns, objects float64) {
	const moment = 200 * time.Millisecond
	counts := make([]int, callers)
	var before, after runtime.MemStats
	var wg sync.WaitGroup
	runtime.ReadMemStats(&before)
	began := time.Now()
	for i := range callers {
		wg.Go(func() {
			key := fmt.Sprint("bench", i)
			ctx, cancel := context.WithCancel(b.Context()) // as a request has
			defer cancel()
			for time.Since(began) < moment {
				if err := pair(ctx, key); err != nil {
					b.Error(err)
					return
				}
				counts[i]++
			}
		})
	}
	wg.Wait()
	took := time.Since(began)
	runtime.ReadMemStats(&after)
	pairs := 0
	for _, n := range counts {
		pairs += n
	}
	return float64(took.Nanoseconds()) / float64(pairs), float64(after.Mallocs-before.Mallocs) / float64(pairs)
}

func median(all []float64) float64 {
	all = slices.Sorted(slices.Values(all))
	return all[len(all)/2]
}

const benchToken = "0123456789abcdefghijkl"

// releaseBare deletes the key if it has the token.
var releaseBare = redis.NewScript(releaseSource)

const releaseSource = `if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0`

// barePair is a lock without a library: SET NX PX, and a script that compares and
// deletes.
func barePair(rdb redis.UniversalClient) func(context.Context, string) error {
	return func(ctx context.Context, key string) error {
		if err := rdb.SetArgs(ctx, key, benchToken, redis.SetArgs{Mode: "NX", TTL: 30 * time.Second}).Err(); err != nil {
			return err
		}
		return releaseBare.Run(ctx, rdb, []string{key}, benchToken).Err()
	}
}

// asyncPair is barePair for callers that leave when their context ends.
func asyncPair(ap *redis.AutoPipeliner) func(context.Context, string) error {
	return func(ctx context.Context, key string) error {
		set := redis.NewStatusCmd(ctx, "set", key, benchToken, "px", 30_000, "nx")
		if err := ap.Submit(ctx, set).WaitContext(ctx); err != nil {
			return err
		}
		release := redis.NewCmd(ctx, "evalsha", releaseBare.Hash(), 1, key, benchToken)
		err := ap.Submit(ctx, release).WaitContext(ctx)
		if redis.HasErrorPrefix(err, "NOSCRIPT") {
			release = redis.NewCmd(ctx, "eval", releaseSource, 1, key, benchToken)
			err = ap.Submit(ctx, release).WaitContext(ctx)
		}
		return err
	}
}
