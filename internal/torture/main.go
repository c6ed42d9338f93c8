// Command torture breaks what locks depend on, and looks whether the promises
// of hasp hold:
//
//	go run ./internal/torture [-strategy A,B] [-seed N] [-time 60s] [-on STORE] [-faults REGEXP] [-plant BUG]
//
// Client processes lock, use a resource that refuses an old fence, and unlock,
// while processes are killed and stopped, connections cut and stalled, replies
// lost, requests delivered late, servers stopped, restarted and filled up. What
// happened is then checked: no two hold a key at once within the validity of
// their leases, which goes from Lock's return to the call of Unlock or the end
// of the lease, whichever is first; nobody loses a lease before its end; fences
// grow; somebody gets every key after every fault, and at last everybody; and
// nothing is left, neither keys nor places in queues nor subscriptions on the
// servers, nor goroutines nor descriptors in the clients.
//
// Then it does the same with faults that take locks away, such as FLUSHALL,
// where only the fence protects.
//
// The seed decides which faults happen, in which order and for how long, and
// what the clients do; when which thread runs it does not. The exit status is 1
// if a promise was broken or a run stood still, and 2 if torture itself failed.
package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"strings"
	"time"

	"github.com/redis/go-redis/v9/logging"

	_ "github.com/hasplock/hasp/fairlock"
	_ "github.com/hasplock/hasp/filelock"
	_ "github.com/hasplock/hasp/pubsublock"
	_ "github.com/hasplock/hasp/redlock"
	_ "github.com/hasplock/hasp/spinlock"
)

// term is that of all leases, short so that much happens in little time.
const term = 300 * time.Millisecond

func main() {
	if os.Getenv(role) != "" {
		work(os.Stdin, os.Stdout)
	}
	strategies := flag.String("strategy", "spinlock,pubsublock,fairlock,redlock,filelock", "what is tortured, one after another")
	seed := flag.Uint64("seed", 0, "what decides about faults; 0 draws one")
	length := flag.Duration("time", time.Minute, "for each strategy; a third of it for faults that take locks away")
	place := flag.String("on", onServer, "where strategies on one Redis keep their locks: redis, sentinel or cluster")
	only := flag.String("faults", "", "regular expression of the `names` of faults")
	bug := flag.String("plant", "", "plant a bug: release, renewal or wake-up")
	history := flag.String("history", "", "`file` for all that clients tell, as lines of JSON")
	flag.Parse()
	logging.Disable() // go-redis', of servers that are down
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	o := options{place: *place, seed: *seed, time: *length, plant: *bug, term: term, patience: time.Minute}
	if o.seed == 0 {
		o.seed = rand.Uint64N(1_000_000) + 1
	}
	kept, err := torture(ctx, o, *strategies, *only, *history)
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "torture:", err)
		os.Exit(2)
	case !kept:
		os.Exit(1)
	}
}

// torture does all runs.
func torture(ctx context.Context, o options, strategies, only, history string) (kept bool, err error) {
	if only != "" {
		if o.only, err = regexp.Compile(only); err != nil {
			return false, err
		}
	}
	if history != "" {
		f, err := os.Create(history)
		if err != nil {
			return false, err
		}
		defer f.Close()
		o.log = f
	}
	fmt.Printf("%s, %d CPUs\n", runtime.Version(), runtime.NumCPU())
	kept = true
	for _, o.strategy = range strings.Split(strategies, ",") {
		for _, o.losing = range []bool{false, true} {
			if ctx.Err() != nil {
				return kept, ctx.Err()
			}
			part := o
			if o.losing {
				part.time /= 3
			}
			wrong, err := do(ctx, part, os.Stdout)
			if err != nil {
				return false, fmt.Errorf("%s, seed %d: %w", o.strategy, o.seed, err)
			}
			kept = kept && len(wrong) == 0
		}
	}
	return kept, nil
}
