//go:build unix

package acceptance

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// BenchmarkUI runs hasp ui for ten seconds an iteration, on a Redis with 10,000 locks and
// 1,000,000 keys of another program, for one browser and for 20 of them. With -short there are fewer keys.
func BenchmarkUI(b *testing.B) {
	const at = 32
	foreign, locks := 1_000_000, 10_000
	if testing.Short() {
		foreign, locks = 20_000, 200
	}
	srv := redistest.Start(b, &redistest.Options{Own: true, Real: true})
	fillForeign(b, srv, foreign)
	url := "spinlock+" + srv.URL()
	holder, err := hasp.Open(b.Context(), url, nil)
	if err != nil {
		b.Fatal(err)
	}
	defer holder.Close()
	inParallel(at, func(first int) {
		for i := first; i < locks; i += at {
			if _, err := holder.Lock(b.Context(), fmt.Sprint("lock ", i), hasp.WithoutRenewal(), hasp.WithTTL(time.Hour)); err != nil {
				b.Error(err)
				return
			}
		}
	})
	command := filepath.Join(b.TempDir(), "hasp")
	if out, err := exec.CommandContext(b.Context(), "go", "build", "-o", command, "../../cmd/hasp").CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	for _, browsers := range []int{1, 20} {
		b.Run(fmt.Sprint("browsers=", browsers), func(b *testing.B) { benchmarkUI(b, srv, command, url, browsers) })
	}
}

func benchmarkUI(b *testing.B, srv *redistest.Server, command, url string, browsers int) {
	ui := exec.CommandContext(b.Context(), command, "ui", "--listen", "127.0.0.1:0", "--url", url)
	ui.Stderr = os.Stderr
	out, err := ui.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := ui.Start(); err != nil {
		b.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	lines.Scan()
	page := regexp.MustCompile(`http://\S+/`).FindString(lines.Text())

	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	var lists, read atomic.Int64 // messages, and bytes of all browsers
	cpu, began := serverCPU(b, srv), time.Now()
	inParallel(browsers, func(int) {
		r, err := http.NewRequestWithContext(ctx, "GET", page+"events", nil)
		if err != nil {
			b.Error(err)
			return
		}
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			b.Error(err)
			return
		}
		go func() {
			defer answer.Body.Close()
			in := bufio.NewReaderSize(answer.Body, 1<<20)
			for {
				line, err := in.ReadString('\n')
				if err != nil {
					return
				}
				read.Add(int64(len(line)))
				if strings.HasPrefix(line, "data:") {
					lists.Add(1)
				}
			}
		}()
	})
	time.Sleep(time.Duration(b.N) * 10 * time.Second)
	took := time.Since(began).Seconds()
	cpu = serverCPU(b, srv) - cpu
	cancel()
	if err := ui.Process.Signal(os.Interrupt); err != nil {
		b.Fatal(err)
	}
	if err := ui.Wait(); err != nil {
		b.Fatal(err)
	}

	used := ui.ProcessState.SysUsage().(*syscall.Rusage)
	b.ReportMetric(100*cpu/took, "server-cpu-%")
	b.ReportMetric(100*(ui.ProcessState.UserTime()+ui.ProcessState.SystemTime()).Seconds()/took, "ui-cpu-%")
	b.ReportMetric(float64(used.Maxrss)/1024, "ui-MiB") // Linux counts in KiB
	b.ReportMetric(float64(lists.Load())/float64(browsers)-1, "lists")
	b.ReportMetric(float64(read.Load())/1024/float64(browsers), "KiB/browser")
}
