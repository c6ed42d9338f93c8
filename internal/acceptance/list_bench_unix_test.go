//go:build unix

package acceptance

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// BenchmarkList runs hasp ls on a Redis with 10,000 locks and 1,000,000 keys of another
// program, while 16 callers lock free keys of their own. hasp ls is stopped every quarter of a
// second for as long. So the times of their Lock with and without it come from the same run.
// Before that, it runs hasp ls without these callers: s-alone. With -short there are fewer keys.
func BenchmarkList(b *testing.B) {
	foreign, locks := 1_000_000, 10_000
	if testing.Short() {
		foreign, locks = 20_000, 200
	}
	srv := redistest.Start(b, &redistest.Options{Own: true, Real: true})
	fillForeign(b, srv, foreign)
	command := filepath.Join(b.TempDir(), "hasp")
	if out, err := exec.CommandContext(b.Context(), "go", "build", "-o", command, "../../cmd/hasp").CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	for _, s := range sharing {
		b.Run(s.name, func(b *testing.B) { benchmarkList(b, srv, command, s.name, locks) })
	}
}

// fillForeign writes n keys of another program, with values of 100 bytes.
func fillForeign(b *testing.B, srv *redistest.Server, n int) {
	b.Helper()
	for from := 0; from < n; from += n / 20 {
		err := srv.Client().Eval(b.Context(), `for i = ARGV[1], ARGV[2] do redis.call('SET', 'user:' .. i, ARGV[3]) end return 1`, nil,
			from+1, from+n/20, strings.Repeat("x", 100)).Err()
		if err != nil {
			b.Fatal(err)
		}
	}
}

func benchmarkList(b *testing.B, srv *redistest.Server, command, strategy string, locks int) {
	ctx, url := b.Context(), strategy+"+"+srv.URL()
	open := func() *hasp.Client {
		c, err := hasp.Open(ctx, url, nil)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { c.Close() })
		return c
	}
	holder, worker := open(), open()

	// The locks of an earlier run have the same keys, and are held still.
	prefix := fmt.Sprintf("lock of %s %d:", b.Name(), b.N)
	const at = 32
	held := make([]*hasp.Lease, locks)
	inParallel(at, func(first int) {
		for i := first; i < locks; i += at {
			l, err := holder.Lock(ctx, fmt.Sprint(prefix, i), hasp.WithoutRenewal(), hasp.WithTTL(time.Hour))
			if err != nil {
				b.Error(err)
				return
			}
			held[i] = l
		}
	})
	if b.Failed() {
		return
	}

	cpu, began := serverCPU(b, srv), time.Now()
	if out, err := exec.CommandContext(ctx, command, "ls", "--json", "--url", url).Output(); err != nil || bytes.Count(out, []byte("\n")) < locks {
		b.Fatalf("%v, %d bytes", err, len(out))
	}
	alone := time.Since(began)
	cpu = serverCPU(b, srv) - cpu

	var quiet, busy []time.Duration
	var took time.Duration
	b.ResetTimer()
	for range b.N {
		w := startBeside(worker)
		ls := exec.CommandContext(ctx, command, "ls", "--json", "--url", url)
		var out bytes.Buffer
		ls.Stdout, ls.Stderr = &out, os.Stderr
		if err := ls.Start(); err != nil {
			b.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- ls.Wait() }()
		for running := true; running; {
			began := time.Now()
			select {
			case err := <-ended:
				if running = false; err != nil {
					b.Error(err)
				}
			case <-time.After(window):
			}
			took += time.Since(began)
			if running {
				ls.Process.Signal(unix.SIGSTOP) // it may have ended
				w.listing.Store(false)
				time.Sleep(window)
				w.listing.Store(true)
				ls.Process.Signal(unix.SIGCONT)
			}
		}
		w.listing.Store(false) // a list that ends within its first window leaves no other quiet time
		time.Sleep(window)
		if n := strings.Count(out.String(), `"key":"`+prefix); n < locks {
			b.Errorf("%d locks listed, want %d", n, locks)
		}
		q, l := w.stop()
		quiet, busy = append(quiet, q...), append(busy, l...)
	}
	b.StopTimer()
	inParallel(at, func(first int) {
		for i := first; i < locks; i += at {
			held[i].Unlock(ctx)
		}
	})

	p99 := func(all []time.Duration) float64 {
		if len(all) == 0 {
			return math.NaN()
		}
		slices.Sort(all)
		return float64(all[len(all)*99/100].Microseconds())
	}
	b.ReportMetric(alone.Seconds(), "s-alone")
	b.ReportMetric(cpu, "server-cpu-s")
	b.ReportMetric(took.Seconds()/float64(b.N), "s/list")
	b.ReportMetric(p99(quiet), "quiet-p99-us")
	b.ReportMetric(p99(busy), "p99-us")
	b.ReportMetric(100*(p99(busy)/p99(quiet)-1), "%-more")
	b.ReportMetric(float64(len(busy)), "locks")
}

// serverCPU returns the processor time of a server, in seconds.
func serverCPU(b *testing.B, srv *redistest.Server) (sum float64) {
	info := srv.Client().InfoMap(b.Context(), "cpu")
	for _, part := range []string{"used_cpu_user", "used_cpu_sys"} {
		n, err := strconv.ParseFloat(info.Item("CPU", part), 64)
		if err != nil {
			b.Fatal(err)
		}
		sum += n
	}
	return sum
}

// window is how long hasp ls runs, and then is stopped.
const window = 250 * time.Millisecond

// inParallel runs f for 0 to n-1 at once.
func inParallel(n int, f func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}

// beside is 16 callers that lock free keys, a thousand times a second each at most.
type beside struct {
	listing atomic.Bool
	cancel  context.CancelFunc
	wg      sync.WaitGroup

	mu          sync.Mutex      // guards all below
	quiet, busy []time.Duration // of each Lock, without a list and with one
}

func startBeside(c *hasp.Client) *beside {
	ctx, cancel := context.WithCancel(context.Background())
	w := &beside{cancel: cancel}
	w.listing.Store(true)
	for i := range 16 {
		w.wg.Go(func() {
			for ctx.Err() == nil {
				listing, began := w.listing.Load(), time.Now()
				l, err := c.Lock(context.Background(), fmt.Sprint("free ", i))
				if err != nil {
					return
				}
				took := time.Since(began)
				l.Unlock(context.Background())

				w.mu.Lock()
				switch {
				case w.listing.Load() != listing: // a part of each
				case listing:
					w.busy = append(w.busy, took)
				default:
					w.quiet = append(w.quiet, took)
				}
				w.mu.Unlock()
				time.Sleep(time.Millisecond)
			}
		})
	}
	return w
}

func (w *beside) stop() (quiet, busy []time.Duration) {
	w.cancel()
	w.wg.Wait()
	return w.quiet, w.busy
}
