package pubsublock_test

import (
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// BenchmarkHandOver measures how long after a release begins another process,
// as far as the server can tell, has the key that it waits for, beside a script
// that publishes to its receiver, in turns within one run. It reports medians
// and 99th percentiles, and the ratio of the medians.
func BenchmarkHandOver(b *testing.B) {
	srv := redistest.Start(b, &redistest.Options{Own: true})
	var ends [2]*hasp.Client
	for i := range ends {
		c, err := hasp.Open(b.Context(), "pubsublock+"+srv.URL(), nil)
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		ends[i] = c
	}
	rdb := srv.Client()
	sub := rdb.Subscribe(b.Context(), "bench")
	defer sub.Close()
	heard := sub.Channel()
	script := redis.NewScript(`return redis.call('PUBLISH', KEYS[1], '0')`)
	var publish, handOver []time.Duration
	lease, err := ends[0].Lock(b.Context(), "k")
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		began := time.Now()
		if err := script.Run(b.Context(), rdb, []string{"bench"}).Err(); err != nil {
			b.Fatal(err)
		}
		<-heard
		publish = append(publish, time.Since(began))

		ends[0], ends[1] = ends[1], ends[0]
		got := make(chan *hasp.Lease)
		var at time.Time
		go func() {
			l, err := ends[0].Lock(b.Context(), "k")
			if err != nil {
				b.Error(err)
			}
			at = time.Now()
			got <- l
		}()
		time.Sleep(5 * time.Millisecond) // it waits
		began = time.Now()
		if err := lease.Unlock(b.Context()); err != nil {
			b.Fatal(err)
		}
		if lease = <-got; lease == nil {
			b.FailNow()
		}
		handOver = append(handOver, at.Sub(began))
	}
	b.ReportMetric(0, "ns/op")
	slices.Sort(publish)
	slices.Sort(handOver)
	for name, all := range map[string][]time.Duration{"publish": publish, "handover": handOver} {
		b.ReportMetric(float64(all[len(all)/2].Nanoseconds()), name+"-p50-ns")
		b.ReportMetric(float64(all[len(all)*99/100].Nanoseconds()), name+"-p99-ns")
	}
	b.ReportMetric(float64(handOver[len(handOver)/2])/float64(publish[len(publish)/2]), "handover/publish")
}
