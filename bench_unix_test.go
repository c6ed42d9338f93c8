//go:build unix

package hasp_test

import (
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/memlock"
)

// BenchmarkHeldLeases holds 100,000 leases for a second per iteration and
// reports what that takes. With a term of 30 s they are renewed every 10 s:
//
//	go test -run '^$' -bench HeldLeases -benchtime 30x .
func BenchmarkHeldLeases(b *testing.B) {
	const n = 100_000
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	goroutines := runtime.NumGoroutine()
	c := hasp.New(memlock.New(), nil)
	leases := make([]*hasp.Lease, n)
	for i := range leases {
		l, err := c.Lock(b.Context(), strconv.Itoa(i))
		if err != nil {
			b.Fatal(err)
		}
		leases[i] = l
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	start, used := time.Now(), cpu(b)
	most := 0
	for b.Loop() {
		for range 10 {
			time.Sleep(100 * time.Millisecond)
			most = max(most, runtime.NumGoroutine()-goroutines)
		}
	}
	b.ReportMetric(100*float64(cpu(b)-used)/float64(time.Since(start)), "%core")
	b.ReportMetric(float64(most), "goroutines")
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/n, "B/lease")
	lost := 0
	for _, l := range leases {
		if l.Unlock(b.Context()) != nil {
			lost++
		}
	}
	b.ReportMetric(float64(lost), "lost")
	c.Close()
}

// cpu returns what the process has used so far.
func cpu(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
