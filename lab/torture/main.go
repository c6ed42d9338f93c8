// Command torture injects faults into everything that locks depend on, and checks whether the
// promises of hasp hold. Run it in the directory lab:
//
//	go run ./torture [-strategy A,B] [-seed N] [-time 60s] [-on STORE] [-faults REGEXP] [-plant BUG] [-history FILE]
//	go run ./torture -check FILE
//
// Processes of clients lock a key, use a resource that refuses an old fence, and unlock the key.
// Meanwhile processes are killed and stopped, connections are cut or stalled, pools
// run out, and servers are stopped, restarted and filled up. Then torture checks the history:
//
//   - No two callers hold a key at the same time. A caller holds a key from the return of Lock to the
//     call of Unlock or the end of the lease.
//   - No lease is lost before its end, and fences grow.
//   - After a fault, the keys are granted again. At the end no waiter is left.
//   - Nothing is left: no keys, queue entries or subscriptions on the servers, and
//     no goroutines or descriptors in the clients.
//   - No client uses more and more memory, goroutines or descriptors.
//
// A second run has faults that take locks away, such as FLUSHALL. In this run only the fence
// protects the resource.
//
// The seed decides which faults happen, in which order and for how long, and
// what the clients do. It does not decide the exact timing. The exit status is 1
// if a promise was broken, a run stood still, or a planted bug was not found. It is 2 if
// torture itself failed, and 130 if a signal ended it.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9/logging"
	"golang.org/x/sync/errgroup"

	_ "github.com/hasplock/hasp/etcdlock"
	_ "github.com/hasplock/hasp/fairlock"
	_ "github.com/hasplock/hasp/filelock"
	"github.com/hasplock/hasp/internal/crew"
	_ "github.com/hasplock/hasp/pglock"
	_ "github.com/hasplock/hasp/pubsublock"
	_ "github.com/hasplock/hasp/redlock"
	_ "github.com/hasplock/hasp/spinlock"
)

// term is the term of all leases. It is short, so that a run has many holds.
const term = 300 * time.Millisecond

// strategies are the strategies whose locks several processes can share. The first three use one
// Redis.
var strategies = []string{"spinlock", "pubsublock", "fairlock", redlock, filelock, "pglock",
	"etcdlock"}

func main() {
	if role, _ := crew.Role(); role != "" {
		work(crew.Parent())
	}

	o := options{patience: patience, only: regexp.MustCompile("")}
	list := flag.String("strategy", "",
		"comma-separated `names` of strategies; if empty, all that can use the store")
	parallel := flag.Int("parallel", 1, "how many runs to make at a time")
	flag.Uint64Var(&o.seed, "seed", rand.Uint64N(1_000_000)+1,
		"decides which faults happen; by default a new one")
	flag.DurationVar(&o.time, "time", time.Minute,
		"length for each strategy; faults that take locks away last a third of it in addition")
	flag.StringVar(&o.place, "on", onServer,
		"`store` of strategies on one Redis: redis, sentinel or cluster")
	flag.IntVar(&o.nodes, "nodes", leastNodes,
		"how many servers redlock has; 1, 2 and 4 set allow_unsafe_nodes")
	flag.Func("faults", "regular expression of the `names` of faults",
		func(text string) (err error) {
			o.only, err = regexp.Compile(text)
			return err
		})

	flag.StringVar(&o.plant, "plant", "", "plant a `bug`: release or wake-up")
	flag.Func("history", "write all reports of the clients to a `file`, as lines of JSON for -check", func(path string) (err error) {
		o.history, err = os.Create(path)
		return err
	})

	again := flag.String("check", "", "check a `file` of -history again, and do nothing else")
	page := flag.String("results", "", "write a table of the runs to a `file`, and name the commit")
	flag.Parse()
	if flag.NArg() > 0 {
		exit(2, fmt.Errorf("unknown argument %q", flag.Arg(0)))
	}
	if *again != "" {
		file, err := os.Open(*again)
		sound := false
		if err == nil {
			sound, err = replay(file, os.Stdout)
		}
		exit(one(!sound), err)
	}

	all := strategies
	if o.place != onServer {
		all = all[:3]
	}
	if *list != "" {
		all = strings.Split(*list, ",")
	}
	logging.Disable() // go-redis logs servers that are down

	interrupted, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	runs, err := o.carryOut(interrupted, all, *parallel)
	faults := 0
	broken := 0
	for _, r := range runs {
		faults += r.count
		broken += len(r.wrong)
	}

	if err == nil && *page != "" {
		err = o.writeResults(*page, all, runs)
	}
	switch {
	case interrupted.Err() != nil:
		exit(130, nil) // the status by which a shell reports the end by SIGINT
	case err == nil && faults == 0:
		err = errors.New("no fault was injected: the strategy has none of that name, or the time was too short")
	case err == nil && broken == 0 && o.plant != "":
		fmt.Println("the planted bug was not found")
		exit(1, nil)
	}

	exit(one(broken > 0), err)
}

// exit ends the program. The status after an error is 2.
func exit(status int, err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "torture:", err)
		status = 2
	}
	os.Exit(status)
}

// carryOut does two runs of each strategy: one without faults that take locks away, and one with
// such faults. It returns the runs under their names. At most the given number of runs go on at the
// same time. Each verdict is printed when its run has ended.
func (o options) carryOut(
	ctx context.Context, names []string, parallel int,
) (map[string]*run, error) {
	all, ctx := errgroup.WithContext(ctx) // after an error the other runs end early
	all.SetLimit(max(parallel, 1))
	fmt.Printf("%s, %d CPUs, seed %d\n", runtime.Version(), runtime.NumCPU(), o.seed)

	var mu sync.Mutex // guards runs
	runs := map[string]*run{}
	for _, name := range names {
		for _, losing := range []bool{false, true} {
			o := o
			o.strategy = name
			o.term = cmp.Or(terms[name], term)
			o.losing = losing
			all.Go(func() error {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				var out strings.Builder
				r, err := o.do(ctx, &out)
				if err != nil {
					return fmt.Errorf("%s, seed %d: %w", o.name(), o.seed, err)
				}
				mu.Lock()
				defer mu.Unlock()
				fmt.Print(out.String())
				if r != nil {
					runs[o.name()] = r
				}
				return nil
			})
		}
	}

	return runs, all.Wait()
}
