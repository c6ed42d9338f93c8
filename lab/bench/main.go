// Command bench measures hasp and other lock libraries on one Redis, in one run:
//
//	go run . [--quick] [--only NAME,NAME] [--out DIR]
//	go run . --render results/results.json
//
// It writes results.md and results.json. The contestants take turns in each
// round, so that noise affects all of them alike. The second form puts the
// figures of a run into the documentation.
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

	"github.com/hasplock/hasp/internal/crew"
)

func main() {
	logging.Disable() // go-redis logs each node that is down
	switch role, _ := crew.Role(); role {
	case workerRole:
		work(crew.Parent())
		return
	case etcdRole:
		if err := serveEtcd(crew.Parent()); err != nil {
			fail("etcd: ", err)
		}
		return
	}

	var o options
	flag.BoolVar(&o.quick, "quick", false, "measure everything once, within a minute")
	flag.StringVar(&o.out, "out", "results", "write to this `directory`")
	only := flag.String("only", "", "comma-separated `names`: scenarios ("+strings.Join(scenarios, ", ")+"), parts of names of contestants, and texts with a space that settings must contain, such as \"hold 1ms\"")
	from := flag.String("render", "", "measure nothing; put the figures of `FILE`, a results.json, into README.md and docs")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "bench: unknown argument %q\n", flag.Arg(0))
		os.Exit(2)
	}
	o.only = strings.FieldsFunc(*only, func(r rune) bool { return r == ',' })

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var err error
	if *from != "" {
		err = render(*from, "../..")
	} else {
		err = measure(ctx, o)
	}
	if err != nil {
		fail("", err)
	}
}

func fail(prefix string, err error) {
	fmt.Fprintf(os.Stderr, "bench: %s%v\n", prefix, err)
	os.Exit(1)
}

// options are the flags of a run that measures.
type options struct {
	quick bool
	out   string
	only  []string
}

// measure measures what the options select and writes the results.
func measure(ctx context.Context, o options) error {
	names, others, settings := split(o.only)
	all := chosen(contestants(), others)
	if len(all) == 0 {
		return errors.New("--only: no contestant has such a name")
	}
	p := planOf(o.quick)
	ctx, cancel := context.WithTimeoutCause(ctx, p.limit, errTime)
	defer cancel()

	b, err := newBench(ctx, p, all)
	defer b.close()
	switch {
	case err != nil && context.Cause(ctx) == errTime:
		fmt.Fprintln(os.Stderr, "bench: measured nothing, because the servers took too long to start:", err)
		return nil
	case err != nil:
		return err
	}
	b.results.Quick = o.quick
	b.only = settings
	if err := b.run(ctx, names); err != nil {
		return err
	}
	return b.results.write(o.out)
}
