// Command torture injects faults into everything that locks depend on, and checks
// whether the promises of hasp hold:
//
//	go run ./internal/torture [-strategy A,B] [-seed N] [-time 60s] [-on STORE] [-faults REGEXP] [-plant BUG]
//
// Client processes lock, use a resource that refuses an old fence, and unlock.
// Meanwhile processes are killed and stopped, connections cut and stalled, replies
// lost, requests delivered late, servers stopped, restarted and filled up, and
// clocks set. Then torture checks the history:
//
//   - No two callers hold a key at once. A caller holds it from the return of Lock
//     to the call of Unlock or the end of the lease, whichever is first.
//   - No lease is lost before its end, and fences grow.
//   - Every key is granted after every fault, and at the end to every waiter.
//   - Nothing is left: no keys, queue entries or subscriptions on the servers, and
//     no goroutines or descriptors in the clients.
//   - No client uses more and more of the machine.
//
// Then it does the same with faults that take locks away, such as FLUSHALL. Then
// only the fence protects.
//
// The seed decides which faults happen, in which order and for how long, and
// what the clients do. It does not decide the exact timing. The exit status is 1
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

// term is the term of all leases. It is short, so that much happens in little
// time.
const term = 300 * time.Millisecond

// strategies are all strategies, those on one Redis first.
var strategies = []string{"spinlock", "pubsublock", fairlock, redlock, filelock}

func main() {
	if crew.Role() != "" {
		work(crew.Parent())
	}

	var p plan
	o := options{term: term, patience: patience}
	names := flag.String("strategy", "", "comma-separated `names` of strategies; if empty, all that can use the store")
	flag.IntVar(&p.parallel, "parallel", 1, "how many runs to make at a time")
	flag.Uint64Var(&o.seed, "seed", 0, "decides which faults happen; 0 draws a seed")
	flag.DurationVar(&o.time, "time", time.Minute, "length for each strategy; faults that take locks away last a third of it in addition")
	flag.StringVar(&o.place, "on", onServer, "`store` of the strategies on one Redis: redis, sentinel, cluster or service")
	flag.IntVar(&o.nodes, "nodes", leastNodes, "how many servers redlock has; 1, 2 and 4 set allow_unsafe_nodes")
	flag.BoolVar(&p.clocks, "clocks", true, "make the wall clocks of clients jump; this builds the clients again")
	only := flag.String("faults", "", "regular expression of the `names` of faults")
	flag.StringVar(&o.plant, "plant", "", "plant a `bug`: release, renewal or wake-up")
	flag.StringVar(&p.history, "history", "", "write all reports of the clients to a `file`, as lines of JSON")
	flag.StringVar(&p.results, "results", "", "append the results to a `file`, as lines of JSON")
	tables := flag.Bool("document", false, "run nothing; write the tables of "+page+" from the files of results in the arguments")
	flag.Parse()

	logging.Disable() // go-redis logs servers that are down
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
	unknown := slices.IndexFunc(p.strategies, func(name string) bool { return !slices.Contains(strategies, name) })
	switch {
	case unknown >= 0:
		err = fmt.Errorf("-strategy: %q is none of %s", p.strategies[unknown], strings.Join(strategies, ", "))
	case *tables:
		err = document(flag.Args())
	case flag.NArg() > 0:
		err = fmt.Errorf("unknown argument %q", flag.Arg(0))
	default:
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
