// Command quorum measures how fast a majority of Redis servers decides:
//
//	go run ./internal/quorum [-quick]
//
// Five servers that it starts itself, each behind a proxy that can be slow or
// gone, are asked for locks by redlock, by redsync, and by hand: a SET on all
// of them at once that goes by the first majority of answers, the best that a
// lock can hope for. They take turns, so that noise is the same for all. Then
// many clients want one key. The result is Markdown. Compare figures of one run
// with one another, and not with those of another machine or moment.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"time"

	"github.com/hasplock/hasp/internal/results"
	"github.com/redis/go-redis/v9/logging"
)

// options are what is measured, and for how long.
type options struct {
	conditions []condition
	delay      time.Duration // of a slow server's replies
	rounds     int
	pairs      int           // of Lock and Unlock that a contestant has in a round
	turn       time.Duration // after which it begins no more of them
	under      time.Duration // a condition, after which no more rounds begin
	counted    int           // locks whose commands are counted
	clients    int           // that want one key
	race       time.Duration
}

func full() options {
	return options{
		conditions: conditions,
		delay:      200 * time.Millisecond, rounds: 12, pairs: 50, turn: 500 * time.Millisecond, under: 45 * time.Second,
		counted: 100, clients: 64, race: 12 * time.Second,
	}
}

func small() options {
	return options{
		conditions: []condition{allWell, conditions[len(conditions)-1]},
		delay:      50 * time.Millisecond, rounds: 1, pairs: 10, turn: 100 * time.Millisecond, under: 2 * time.Second,
		counted: 10, clients: 8, race: time.Second,
	}
}

func main() {
	quick := flag.Bool("quick", false, "measure less, in a few seconds")
	flag.Parse()
	o := full()
	if *quick {
		o = small()
	}
	logging.Disable() // go-redis', of servers that are down
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := measure(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "quorum:", err)
		os.Exit(1)
	}
}

// measurement is a run of this program.
type measurement struct {
	options
	set *set
}

// measure does it all and prints it.
func measure(ctx context.Context, o options, out io.Writer) error {
	set, err := startSet(ctx)
	if err != nil {
		return err
	}
	defer set.stop()
	m := &measurement{o, set}
	fmt.Fprintf(out, "%s, %d CPUs; %d servers, a slow one answers %v late.\n", runtime.Version(), runtime.NumCPU(), nodes, o.delay)
	var g results.Goals
	for _, part := range []func(context.Context, io.Writer, *results.Goals) error{m.latencies, m.commands, m.contention} {
		if err := part(ctx, out, &g); err != nil {
			return err
		}
	}
	g.Print(out)
	return nil
}
