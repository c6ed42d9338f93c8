// Command torture breaks what locks depend on, and looks whether the promises
// of hasp hold:
//
//	go run ./internal/torture [-strategy A,B] [-seed N] [-time 60s] [-on STORE] [-faults REGEXP] [-plant BUG]
//
// Client processes lock, use a resource that refuses an old fence, and unlock,
// while processes are killed and stopped, connections cut and stalled, replies
// lost, requests delivered late, servers stopped, restarted and filled up, clocks
// set. What happened is then checked: no two hold a key at once within the validity of
// their leases, which goes from Lock's return to the call of Unlock or the end
// of the lease, whichever is first; nobody loses a lease before its end; fences
// grow; somebody gets every key after every fault, and at last everybody;
// nothing is left, neither keys nor places in queues nor subscriptions on the
// servers, nor goroutines nor descriptors in the clients; and no client takes
// more and more of the machine.
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
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9/logging"

	_ "github.com/hasplock/hasp/fairlock"
	_ "github.com/hasplock/hasp/filelock"
	"github.com/hasplock/hasp/internal/crew"
	_ "github.com/hasplock/hasp/pubsublock"
	_ "github.com/hasplock/hasp/redlock"
	_ "github.com/hasplock/hasp/spinlock"
)

// term is that of all leases, short so that much happens in little time.
const term = 300 * time.Millisecond

// strategies are all, first those on one Redis.
var strategies = []string{"spinlock", "pubsublock", fairlock, redlock, filelock}

func main() {
	if crew.Role() != "" {
		work(crew.Parent())
	}
	var p plan
	o := options{term: term, patience: patience}
	names := flag.String("strategy", "", "what is tortured, by commas; if empty, every one that can be in the store")
	flag.IntVar(&p.parallel, "parallel", 1, "how many runs there are at once")
	flag.Uint64Var(&o.seed, "seed", 0, "what decides about faults; 0 draws one")
	flag.DurationVar(&o.time, "time", time.Minute, "for each strategy; a third of it more for faults that take locks away")
	flag.StringVar(&o.place, "on", onServer, "where strategies on one Redis keep their locks: redis, sentinel, cluster or service")
	flag.IntVar(&o.nodes, "nodes", leastNodes, "how many servers redlock has; of 1, 2 or 4, allow_unsafe_nodes")
	flag.BoolVar(&p.clocks, "clocks", true, "have wall clocks of clients jump, for which they are built once more")
	only := flag.String("faults", "", "regular expression of the `names` of faults")
	flag.StringVar(&o.plant, "plant", "", "plant a bug: release, renewal or wake-up")
	flag.StringVar(&p.history, "history", "", "`file` for all that clients tell, as lines of JSON")
	flag.StringVar(&p.results, "results", "", "`file` that results are added to, as lines of JSON")
	flag.StringVar(&o.profiles, "profiles", "", "`directory` for profiles of the client that is never killed: whenever its heap has grown, and at the end")
	tables := flag.Bool("document", false, "run nothing; write the tables of "+page+" by the files of results that are named")
	flag.Parse()
	logging.Disable() // go-redis', of servers that are down
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if o.seed == 0 {
		o.seed = rand.Uint64N(1_000_000) + 1
	}
	p.strategies = strings.FieldsFunc(*names, func(r rune) bool { return r == ',' })
	if len(p.strategies) == 0 {
		p.strategies = strategies
		if o.place != onServer {
			p.strategies = strategies[:3]
		}
	}
	kept, err := true, error(nil)
	for _, name := range p.strategies {
		if !slices.Contains(strategies, name) {
			err = fmt.Errorf("no strategy that is tortured is called %q: there are %s", name, strings.Join(strategies, ", "))
		}
	}
	if flag.NArg() > 0 && !*tables {
		err = fmt.Errorf("what is %q?", flag.Arg(0))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "torture:", err)
		os.Exit(2)
	}
	if *tables {
		err = document(flag.Args())
	} else {
		kept, err = p.carryOut(ctx, o, *only)
	}
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "torture:", err)
		os.Exit(2)
	case !kept:
		os.Exit(1)
	}
}
