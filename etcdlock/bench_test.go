package etcdlock_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/hasplock/hasp"
	_ "github.com/hasplock/hasp/etcdlock"
)

// The benchmarks run hasp and concurrency.Mutex of the etcd client in turns, on the same
// three members, and report the ratio of their rates. "x" above 1 means that hasp is faster.

const batch = 256 // pairs of one side in a turn

// rates collects the rates of the turns of one side.
type rates []float64

func (r *rates) add(n int, took time.Duration) { *r = append(*r, float64(n)/took.Seconds()) }

func (r rates) median() float64 {
	s := slices.Sorted(slices.Values(r))
	return s[len(s)/2]
}

// report reports the medians of both sides and of the ratios of each two turns.
func report(b *testing.B, ours, theirs rates, unit string) {
	var x rates
	for i := range ours {
		x = append(x, ours[i]/theirs[i])
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ours.median(), "hasp-"+unit)
	b.ReportMetric(theirs.median(), "mutex-"+unit)
	b.ReportMetric(x.median(), "x")
}

// turn runs n calls of f by g goroutines.
func turn(tb testing.TB, n, g int, f func(i int) error) time.Duration {
	tb.Helper()
	var left atomic.Int64
	left.Store(int64(n))
	var wg sync.WaitGroup
	began := time.Now()
	for i := range g {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				if err := f(i); err != nil {
					tb.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return time.Since(began)
}

func openLocks(tb testing.TB, hosts string) *hasp.Client {
	tb.Helper()
	c, err := hasp.Open(context.Background(), "etcdlock+etcd://"+hosts, nil)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	return c
}

func plainClient(tb testing.TB, hosts string) *clientv3.Client {
	tb.Helper()
	c, err := newClient(hosts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	return c
}

func session(tb testing.TB, c *clientv3.Client) *concurrency.Session {
	tb.Helper()
	s, err := concurrency.NewSession(c, concurrency.WithTTL(30))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { s.Close() })
	return s
}

// pair locks a key, holds it for a time, and unlocks it.
func pair(ctx context.Context, c *hasp.Client, key string, hold time.Duration, opts ...hasp.Option) error {
	l, err := c.Lock(ctx, key, opts...)
	if err != nil {
		return err
	}
	time.Sleep(hold)
	return l.Unlock(ctx)
}

func mutexPair(ctx context.Context, s *concurrency.Session, key string, hold time.Duration) error {
	m := concurrency.NewMutex(s, key)
	if err := m.Lock(ctx); err != nil {
		return err
	}
	time.Sleep(hold)
	return m.Unlock(ctx)
}

// versus runs n calls of both sides by g goroutines, in turns.
func versus(b *testing.B, unit string, n, g int, ours, theirs func(i int) error) {
	var a, m rates
	for b.Loop() {
		a.add(n, turn(b, n, g, ours))
		m.add(n, turn(b, n, g, theirs))
	}
	report(b, a, m, unit)
}

// BenchmarkPairs locks and unlocks keys that nobody else wants, from 1, 16 and 64
// goroutines.
func BenchmarkPairs(b *testing.B) {
	servers := startServers(b, 3)
	ctx := context.Background()
	locks, client := openLocks(b, hosts(servers)), plainClient(b, hosts(servers))
	ours := func(i int) error { return pair(ctx, locks, fmt.Sprint("pairs-", i), 0, hasp.WithFence()) }

	for _, g := range []int{1, 16, 64} {
		b.Run(fmt.Sprintf("kept session/%d", g), func(b *testing.B) {
			sessions := make([]*concurrency.Session, g)
			for i := range sessions {
				sessions[i] = session(b, client)
			}
			versus(b, "pairs/s", batch, g, ours, func(i int) error { return mutexPair(ctx, sessions[i], fmt.Sprint("mutex-", i), 0) })
		})
	}
	for _, g := range []int{1, 16} {
		b.Run(fmt.Sprintf("session per hold/%d", g), func(b *testing.B) {
			versus(b, "pairs/s", batch, g, ours, func(i int) error {
				s, err := concurrency.NewSession(client, concurrency.WithTTL(30))
				if err != nil {
					return err
				}
				defer s.Close()
				return mutexPair(ctx, s, fmt.Sprint("mutex-", i), 0)
			})
		})
	}
}

// BenchmarkContended passes one key from holder to holder, over four clients.
func BenchmarkContended(b *testing.B) {
	servers := startServers(b, 3)
	ctx := context.Background()
	var locks []*hasp.Client
	var clients []*clientv3.Client
	for range 4 {
		locks = append(locks, openLocks(b, hosts(servers)))
		clients = append(clients, plainClient(b, hosts(servers)))
	}

	for _, t := range []struct {
		waiters, n int
		hold       time.Duration
	}{{64, 128, 0}, {2, 32, 5 * time.Millisecond}} {
		b.Run(fmt.Sprintf("%d waiters, hold %v", t.waiters, t.hold), func(b *testing.B) {
			sessions := make([]*concurrency.Session, t.waiters)
			for i := range sessions {
				sessions[i] = session(b, clients[i%4])
			}
			versus(b, "holders/s", t.n, t.waiters,
				func(i int) error { return pair(ctx, locks[i%4], "contended", t.hold) },
				func(i int) error { return mutexPair(ctx, sessions[i], "contended", t.hold) })
		})
	}
}

// size returns the number in an environment variable, or small, which is for CI.
func size(b *testing.B, name string, small int) int {
	text := os.Getenv(name)
	if text == "" {
		return small
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		b.Fatal(err)
	}
	return n
}

// BenchmarkKept keeps HASP_BENCH_LEASES leases of 10 s for three terms, and reports how many
// were lost.
func BenchmarkKept(b *testing.B) {
	servers := startServers(b, 3)
	ctx := context.Background()
	n, ttl, terms := size(b, "HASP_BENCH_LEASES", 200), 10*time.Second, 3
	if n == 200 {
		ttl, terms = 2*time.Second, 1
	}
	c, err := hasp.Open(ctx, "etcdlock+etcd://"+hosts(servers), &hasp.Options{TTL: ttl})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()

	for b.Loop() {
		leases := make([]*hasp.Lease, n)
		took := turn(b, n, 64, counted(func(i int) (err error) {
			leases[i], err = c.Lock(ctx, fmt.Sprint("kept-", i))
			return err
		}))
		b.ReportMetric(float64(n)/took.Seconds(), "locks/s")
		before := cpu(b)
		time.Sleep(time.Duration(terms) * ttl)
		used := cpu(b) - before

		lost := 0
		for _, l := range leases {
			if l.Err() != nil {
				lost++
			}
		}
		if lost > 0 && n == 200 {
			b.Logf("%d of %d leases were lost", lost, n)
		}
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(float64(lost), "lost")
		b.ReportMetric(used.Seconds()/float64(terms)/ttl.Seconds()*100, "client-cpu-%")
		turn(b, n, 64, counted(func(i int) error {
			if leases[i].Err() != nil {
				return nil
			}
			return leases[i].Unlock(ctx)
		}))
	}
}

// counted returns a function for turn that calls f with 0, 1, 2 and so on.
func counted(f func(i int) error) func(int) error {
	var next atomic.Int64
	return func(int) error { return f(int(next.Add(1)) - 1) }
}

// cpu returns the processor time of this process.
func cpu(b *testing.B) time.Duration {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		b.Fatal(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// BenchmarkUncompacted locks and unlocks keys of one etcd HASP_BENCH_HOLDS times without a
// compaction. Before and after that, it measures the rate beside a second etcd that does
// nothing meanwhile, in turns, and reports how the ratio of the two has changed.
func BenchmarkUncompacted(b *testing.B) {
	used, idle := startServers(b, 1), startServers(b, 1)
	ctx := context.Background()
	n := size(b, "HASP_BENCH_HOLDS", 2000)
	a, control := openLocks(b, hosts(used)), openLocks(b, hosts(idle))
	measure := func() float64 {
		var x rates
		for range 11 {
			var r rates
			for _, c := range []*hasp.Client{a, control} {
				r.add(100, turn(b, 100, 1, func(int) error { return pair(ctx, c, "uncompacted", 0) }))
			}
			x = append(x, r[0]/r[1])
		}
		return x.median()
	}
	measure()
	for b.Loop() {
		before := measure()
		took := turn(b, n, 16, counted(func(i int) error { return pair(ctx, a, fmt.Sprint("uncompacted-", i%16), 0) }))
		after := measure()
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(float64(n)/took.Seconds(), "pairs/s")
		b.ReportMetric(after/before, "x")
	}
}
