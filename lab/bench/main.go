// Command bench measures hasp and other lock libraries on one machine, in one run:
//
//	go run . [--quick] [--only NAME,NAME] [--out DIR] [--fill]
//
// It writes results.md, and with --fill it also puts the figures into README.md
// and docs. The contestants take turns in each round, so that noise affects all of them alike.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9/logging"

	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/etcdtest"
	"github.com/hasplock/hasp/internal/pgtest"
)

func main() {
	logging.Disable() // go-redis logs each node that is down
	if role, _ := crew.Role(); role == workerRole {
		work(crew.Parent())
		return
	}

	quick := flag.Bool("quick", false, "measure everything once, within a minute")
	out := flag.String("out", "results", "write to this `directory`")
	only := flag.String("only", "", "comma-separated `names`: scenarios ("+strings.Join(scenarios, ", ")+
		"), parts of names of contestants, and texts with a space that settings must contain")
	fill := flag.Bool("fill", false, "put the figures into README.md and docs")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "bench: unknown argument %q\n", flag.Arg(0))
		os.Exit(2)
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	context.AfterFunc(ctx, stop) // a second signal ends the program at once
	words := strings.FieldsFunc(*only, func(r rune) bool { return r == ',' })
	r, err := measure(ctx, *quick, words, *out)
	if err == nil && *only == "" {
		err = r.fillPages("../..", *fill) // without --fill, it only checks that all tables have figures
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// measure measures what the words of --only select and writes the results to a directory.
func measure(ctx context.Context, quick bool, only []string, out string) (*results, error) {
	names, others, settings := split(only)
	all := chosen(contestants(), others)
	if _, err := exec.LookPath(etcdtest.Binary()); err != nil {
		fmt.Fprintln(os.Stderr, "bench: without the contestants on etcd:", err)
		all = slices.DeleteFunc(all, func(c contestant) bool { return c.nodes == 0 })
	}

	if !pgtest.Installed() {
		fmt.Fprintln(os.Stderr, "bench: without the contestants on PostgreSQL: it is not installed")
		all = slices.DeleteFunc(all, func(c contestant) bool { return c.nodes == onPostgres })
	}

	if len(all) == 1 { // only the ring
		return nil, errors.New("--only: no contestant has such a name")
	}

	b := &bench{plan: planOf(quick), only: settings, open: map[string]locker{},
		results: newResults(all)}
	defer b.servers.Close()
	b.Quick = quick
	err := b.servers.Do(func() error {
		b.start(ctx)
		return b.run(ctx, names)
	})

	if err != nil {
		return nil, err
	}
	return b.results, b.write(out)
}
