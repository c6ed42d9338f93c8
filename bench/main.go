// Command bench shows hasp beside the libraries of locks that are in use, on
// one Redis and in one run:
//
//	go run . [--quick] [--redis URL] [--out DIR] [--only NAME,NAME]
//	go run . --render results/results.json
//	go run . --soak results/soak.csv
//
// It writes results.md, results.json and pictures. Contestants take turns
// round by round, so that noise hits all alike. The second form puts the
// figures of a run into the documentation. The third draws what a run of
// torture took of the machine.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"

	"github.com/redis/go-redis/v9/logging"
)

func main() {
	logging.Disable() // go-redis', which tells of every node that is down
	switch os.Getenv(role) {
	case "worker":
		work(os.Stdin, os.Stdout)
	case "etcd":
		if err := serveEtcd(); err != nil {
			fmt.Fprintln(os.Stderr, "bench: etcd:", err)
			os.Exit(1)
		}
		return
	}
	o := options{}
	flag.BoolVar(&o.quick, "quick", false, "have everything happen once, within a minute")
	flag.StringVar(&o.redis, "redis", "", "`URL` of a Redis, whose figures all others would disturb; without it one is started")
	flag.StringVar(&o.out, "out", "results", "`directory` to write to")
	only := flag.String("only", "", "`names` of scenarios ("+strings.Join(scenarios, ", ")+") and parts of names of contestants, by commas")
	from := flag.String("render", "", "put the figures of `FILE`, a results.json, into README.md and docs, and measure nothing")
	soak := flag.String("soak", "", "draw what processes took of the machine by `FILE`, which make soak writes, and measure nothing")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "bench: what is", flag.Arg(0)+"?")
		os.Exit(2)
	}
	o.only = strings.FieldsFunc(*only, func(r rune) bool { return r == ',' })
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var err error
	switch {
	case *from != "":
		err = render(*from, "..")
	case *soak != "":
		err = plotSoak(*soak)
	default:
		err = measure(ctx, o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// options are the flags.
type options struct {
	quick      bool
	redis, out string
	only       []string
}

// measure does it all and writes it down.
func measure(ctx context.Context, o options) error {
	p := full()
	if o.quick {
		p = quick()
	}
	names, others := split(o.only)
	all := chosen(contestants(), others)
	if len(all) == 0 {
		return errors.New("--only: no contestant has such a name")
	}
	ctx, cancel := context.WithTimeoutCause(ctx, p.limit, errTime)
	defer cancel()
	b, err := newBench(ctx, p, all, o)
	defer b.close()
	switch {
	case err != nil && context.Cause(ctx) == errTime:
		fmt.Fprintln(os.Stderr, "bench: nothing is measured, since the servers took too long to begin:", err)
		return nil
	case err != nil:
		return err
	}
	if err := b.run(ctx, names); err != nil {
		return err
	}
	return b.write(o.out)
}
