// Command torture injects faults into real servers, links and processes, and checks whether the
// promises of hasp hold. Run it in the directory lab:
//
//	go run ./torture [-strategy A,B] [-seed N] [-time 60s] [-on STORE] [-history FILE]
//
// Processes of clients lock a key, use a resource that refuses an old fence, and unlock the key.
// Meanwhile processes are killed and stopped, connections are cut or stalled, pools
// run out, and servers are stopped, restarted and filled up. Then torture checks the history:
//
//   - No two callers hold a key at the same time. A caller holds a key from the return of Lock to
//     the call of Unlock or the end of the lease.
//   - No lease is lost before its end, and fences grow.
//   - After a fault, the keys are granted again. At the end no waiter is left.
//   - Nothing is left: no keys, queue entries or subscriptions on the servers, and
//     no goroutines or descriptors in the clients.
//   - No client uses more and more memory, goroutines or descriptors.
//
// Some faults take locks away, such as a restart without data. A hold that such a fault may have
// ended is protected by its fence only.
//
// The seed decides which faults happen, in which order and for how long, and
// what the clients do. It does not decide the exact timing. The exit status is 1
// if a promise was broken or a run stood still. It is 2 if torture itself failed or was
// interrupted.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9/logging"
	"golang.org/x/sync/errgroup"

	_ "github.com/hasplock/hasp/caslock/k8slease"
	_ "github.com/hasplock/hasp/caslock/natskv"
	_ "github.com/hasplock/hasp/caslock/s3kv"
	_ "github.com/hasplock/hasp/caslock/sqlkv/mysql"
	_ "github.com/hasplock/hasp/caslock/sqlkv/sqlite"
	_ "github.com/hasplock/hasp/etcdlock"
	_ "github.com/hasplock/hasp/fairlock"
	_ "github.com/hasplock/hasp/filelock"
	"github.com/hasplock/hasp/internal/crew"
	_ "github.com/hasplock/hasp/pglock"
	_ "github.com/hasplock/hasp/pubsublock"
	_ "github.com/hasplock/hasp/redlock"
	_ "github.com/hasplock/hasp/spinlock"
)

// strategies are the strategies whose locks several processes can share. Those in onOne use one
// Redis. The strategy kube is run only if HASP_TEST_KUBE names a kube-apiserver.
var (
	onOne      = []string{"spinlock", "pubsublock", "fairlock"}
	strategies = append(onOne, redlock, "filelock", "pglock", "etcdlock", "nats", "s3", "mysql",
		"sqlite", "kube")
)

func main() {
	if role, _ := crew.Role(); role != "" {
		work(crew.Parent())
	}

	o := options{patience: patience}
	list := flag.String("strategy", "",
		"comma-separated `names` of strategies; if empty, all that can use the store")
	parallel := flag.Int("parallel", 1, "how many runs to make at a time")
	flag.Uint64Var(&o.seed, "seed", rand.Uint64N(1_000_000)+1,
		"decides which faults happen; by default a new one")
	flag.DurationVar(&o.time, "time", time.Minute, "length for each strategy")
	flag.StringVar(&o.place, "on", onServer,
		"`store` of strategies on one Redis: redis, sentinel or cluster")
	flag.IntVar(&o.nodes, "nodes", 3, "how many servers redlock has")
	flag.Func("history",
		"write all reports of the clients to a `file`, as lines of JSON",
		func(path string) (err error) {
			o.history, err = os.Create(path)
			return err
		})
	page := flag.String("results", "", "write a table of the runs to a `file`, and name the commit")
	flag.Parse()

	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "torture: unknown argument %q\n", flag.Arg(0))
		os.Exit(2)
	}

	all := slices.Clone(strategies)
	if os.Getenv("HASP_TEST_KUBE") == "" {
		all = slices.DeleteFunc(all, func(name string) bool { return name == "kube" })
	}
	if o.place != onServer {
		all = onOne
	}
	if *list != "" {
		all = strings.Split(*list, ",")
	}
	sound, err := o.runAll(all, *parallel, *page)
	if err != nil {
		fmt.Fprintln(os.Stderr, "torture:", err)
		os.Exit(2)
	}
	if !sound {
		os.Exit(1)
	}
}

// runAll does a run of each strategy, and reports whether all promises were kept. At most the given
// number of runs go on at the same time. Each verdict is printed when its run has ended.
func (o options) runAll(names []string, parallel int, page string) (sound bool, err error) {
	logging.Disable() // go-redis logs servers that are down
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	all, ctx := errgroup.WithContext(ctx) // after an error the other runs end early
	all.SetLimit(max(parallel, 1))
	fmt.Printf("%s, %d CPUs, seed %d\n", runtime.Version(), runtime.NumCPU(), o.seed)

	var mu sync.Mutex // guards the output
	runs := make([]*run, len(names))
	for i, name := range names {
		o := o
		o.strategy = name
		all.Go(func() error {
			var out strings.Builder
			r, err := o.do(ctx, &out)
			if err != nil {
				return fmt.Errorf("%s, seed %d: %w", name, o.seed, err)
			}
			mu.Lock()
			defer mu.Unlock()
			fmt.Print(out.String())
			runs[i] = r
			return nil
		})
	}

	if err := all.Wait(); err != nil {
		return false, err
	}
	if page != "" {
		err = o.writeResults(page, runs)
	}
	sound = true
	faults := 0
	for _, r := range runs {
		faults += r.count
		sound = sound && len(r.wrong) == 0
	}
	if faults == 0 {
		err = errors.New("no fault was injected: the time was too short")
	}

	return sound, err
}
