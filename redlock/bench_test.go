package redlock

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// BenchmarkCrowd lets 64 Clients, each with a driver and connections of its own, contend
// for a key that they hold for a millisecond. It reports holds each second, commands for
// each hold, the longest wait and Jain's index of the shares. After a third of the holds
// the first node, which is the lead, may be stopped or killed.
//
//	go test ./redlock -run '^$' -bench Crowd -benchtime 2000x
func BenchmarkCrowd(b *testing.B) {
	for _, n := range []int{3, 5} {
		b.Run(fmt.Sprint(n, " nodes"), func(b *testing.B) { crowdOf(b, 64, n, nil, nil) })
		b.Run(fmt.Sprint(n, " nodes, the lead hangs"), func(b *testing.B) {
			crowdOf(b, 64, n, (*redistest.Server).Pause, (*redistest.Server).Resume)
		})
		b.Run(fmt.Sprint(n, " nodes, the lead dies"), func(b *testing.B) {
			crowdOf(b, 64, n, (*redistest.Server).Kill, (*redistest.Server).Restart)
		})
	}
}

// crowdOf is one part of BenchmarkCrowd. Fault and mend may be nil.
func crowdOf(b *testing.B, clients, nodes int, fault, mend func(*redistest.Server)) {
	var servers []*redistest.Server
	var admin []*goredis.Client
	var addrs []string
	for range nodes {
		srv := redistest.Start(b, &redistest.Options{Own: true, Real: true})
		servers = append(servers, srv)
		admin = append(admin, srv.Client())
		addrs = append(addrs, srv.Addr)
	}

	all := make([]*hasp.Client, clients)
	for i := range all {
		rdbs := make([]goredis.UniversalClient, nodes)
		for j, addr := range addrs {
			rdb := goredis.NewClient(&goredis.Options{Addr: addr})
			b.Cleanup(func() { rdb.Close() })
			rdbs[j] = rdb
		}
		all[i] = hasp.New(New(rdbs, nil), &hasp.Options{Timeout: 20 * time.Second})
		b.Cleanup(func() { all[i].Close() })
		holdFor(b, all[i], "own "+strconv.Itoa(i), 0) // connections are made
	}

	before := commands(b, admin)
	var mu sync.Mutex // guards the variables below
	var longest time.Duration
	shares := make([]int, clients)
	left := b.N

	b.ResetTimer()
	began := time.Now()
	var wg sync.WaitGroup
	for i, c := range all {
		wg.Go(func() {
			for {
				mu.Lock()
				left--
				ended, now := left < 0, b.N > 2 && left == b.N*2/3
				mu.Unlock()
				if ended {
					return
				}
				if now && fault != nil {
					fault(servers[0])
				}
				waited := holdFor(b, c, "k", time.Millisecond)
				mu.Lock()
				longest = max(longest, waited)
				shares[i]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()

	took := time.Since(began)
	b.StopTimer()
	if fault != nil && b.N > 2 {
		mend(servers[0])
	}
	sum, squares := 0.0, 0.0
	for _, s := range shares {
		sum += float64(s)
		squares += float64(s * s)
	}
	b.ReportMetric(float64(b.N)/took.Seconds(), "holds/s")
	if fault == nil { // all servers answer
		b.ReportMetric(float64(commands(b, admin)-before)/float64(b.N), "commands/hold")
	}
	b.ReportMetric(longest.Seconds()*1000, "longest-ms")
	b.ReportMetric(sum*sum/squares/float64(clients), "Jain")
	b.Logf("%d holds in %v, %d to %d each", b.N, took, slices.Min(shares), slices.Max(shares))
}

// holdFor locks a key, holds it for a while and unlocks it. It returns how long Lock took.
func holdFor(b *testing.B, c *hasp.Client, key string, held time.Duration) time.Duration {
	began := time.Now()
	lease, err := c.Lock(context.Background(), key)
	if err != nil {
		b.Error(err)
		return 0
	}
	waited := time.Since(began)
	time.Sleep(held)
	if err := lease.Unlock(context.Background()); err != nil {
		b.Error(err)
	}
	return waited
}

// commands returns how many commands the servers have carried out, with those inside
// scripts.
func commands(b *testing.B, admin []*goredis.Client) (total int64) {
	for _, rdb := range admin {
		stats, err := rdb.InfoMap(context.Background(), "stats").Result()
		if err != nil {
			b.Fatal(err)
		}
		n, err := strconv.ParseInt(stats["Stats"]["total_commands_processed"], 10, 64)
		if err != nil {
			b.Fatal(err)
		}
		total += n
	}
	return total
}

// BenchmarkUncontended locks and unlocks free keys on five nodes:
//
//	go test ./redlock -run '^$' -bench Uncontended -benchmem
func BenchmarkUncontended(b *testing.B) {
	addrs := make([]string, 5)
	for i := range addrs {
		addrs[i] = redistest.Start(b, &redistest.Options{Own: true, Real: true}).Addr
	}
	c, err := hasp.Open(b.Context(), "redlock+redis://"+strings.Join(addrs, ","), nil)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	holdFor(b, c, "first", 0) // connections are made

	b.ReportAllocs()
	for b.Loop() {
		l, err := c.Lock(b.Context(), "k")
		if err != nil {
			b.Fatal(err)
		}
		if err := l.Unlock(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
