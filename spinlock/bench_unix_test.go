//go:build unix

package spinlock_test

import (
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// BenchmarkRenewals holds 100,000 leases of 30 s for a term, and reports what that costs
// this process:
//
//	go test ./spinlock -run '^$' -bench Renewals -benchtime 1x
func BenchmarkRenewals(b *testing.B) {
	const n, term = 100_000, 30 * time.Second
	srv := redistest.Start(b, &redistest.Options{Own: true})
	c, err := hasp.Open(b.Context(), "spinlock+"+srv.URL()+"?ttl=30s", nil)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	admin := srv.Client()

	leases := make([]*hasp.Lease, n)
	var wg sync.WaitGroup
	const takers = 128
	for t := range takers {
		wg.Go(func() {
			for i := t; i < n; i += takers {
				l, err := c.Lock(b.Context(), strconv.Itoa(i))
				if err != nil {
					b.Error(err)
					return
				}
				leases[i] = l
			}
		})
	}
	wg.Wait()
	if b.Failed() {
		return
	}

	runtime.GC()
	for b.Loop() {
		used, before := processCPU(b), admin.Info(b.Context(), "commandstats")
		time.Sleep(term)
		used = processCPU(b) - used
		renewals := scripts(b, admin.Info(b.Context(), "commandstats").Val()) - scripts(b, before.Val())
		b.ReportMetric(float64(used.Microseconds())/renewals, "µs/renewal")
		b.ReportMetric(100*float64(used)/float64(term), "%core")
		b.ReportMetric(renewals/term.Seconds(), "renewals/s")
	}
	b.ReportMetric(0, "ns/op")

	lost := 0
	for _, l := range leases {
		if l.Err() != nil {
			lost++
		}
	}
	b.ReportMetric(float64(lost), "lost")
}

// processCPU returns the CPU time that this process has used.
func processCPU(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// scripts returns how many scripts the server has run, by its INFO commandstats.
func scripts(b *testing.B, info string) float64 {
	_, after, ok := strings.Cut(info, "cmdstat_evalsha:calls=")
	if !ok {
		return 0
	}
	text, _, _ := strings.Cut(after, ",")
	n, err := strconv.ParseFloat(text, 64)
	if err != nil {
		b.Fatal(err)
	}
	return n
}
