// Command handover measures how fast a lock goes from one process to the next:
//
//	go run ./internal/handover [--quick] [--redis URL] [--strategies A,B] [--hold D]
//
// Callers in several processes take turns at one key. The turns of each
// strategy alternate with those of a message that goes round the same processes
// by a script that publishes it to its receiver: the best that a lock can hope
// for. The result is Markdown. Compare figures of one run with one another, and
// not with those of another machine or moment.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/hasplock/hasp"
	_ "github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/results"
	_ "github.com/hasplock/hasp/pubsublock"
	_ "github.com/hasplock/hasp/spinlock"
)

// processes is how many take turns.
const processes = 4

// options are what is measured, and for how long.
type options struct {
	redis      string
	strategies []string
	hold       time.Duration // how long a holder has the key where latency is measured
	length     time.Duration // of a round
	rounds     int
	waiters    []int
	racers     int // waiters whose shares are counted
	holds      int // over which they are
	dead       int // killed waiters before a living one
	deaths     int // how often
}

func full() options {
	return options{
		strategies: []string{"spinlock", "pubsublock", "fairlock"},
		hold:       2 * time.Millisecond,
		length:     2 * time.Second, rounds: 3, waiters: []int{2, 8, 64, 512},
		racers: 64, holds: 10_240,
		dead: 10, deaths: 5,
	}
}

func small() options {
	o := full()
	o.length, o.rounds, o.waiters = 300*time.Millisecond, 1, []int{2, 64}
	o.holds, o.dead, o.deaths = 640, 3, 1
	return o
}

func main() {
	if os.Getenv(role) != "" {
		work(os.Stdin, os.Stdout)
	}
	o := full()
	quick := flag.Bool("quick", false, "measure less, in a few seconds")
	redis := flag.String("redis", "", "URL of a Redis; without it one is started")
	strategies := flag.String("strategies", strings.Join(o.strategies, ","), "what to measure")
	hold := flag.Duration("hold", o.hold, "how long a holder has the key where latency is measured")
	flag.Parse()
	if *quick {
		o = small()
	}
	o.redis, o.hold, o.strategies = *redis, *hold, strings.Split(*strategies, ",")
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := measure(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "handover:", err)
		os.Exit(1)
	}
}

// measure does it all and prints it.
func measure(ctx context.Context, o options, out io.Writer) (err error) {
	if o.redis == "" {
		url, stop, err := startRedis(ctx)
		if err != nil {
			return err
		}
		defer stop()
		o.redis = url
	}
	m, err := prepare(ctx, o)
	if err != nil {
		return err
	}
	defer m.close()
	fmt.Fprintf(out, "%s, %d CPUs; %d processes, a key is kept for %v, rounds of %v.\n", runtime.Version(), runtime.NumCPU(), processes, o.hold, o.length)
	var g results.Goals
	for _, part := range []func(context.Context, io.Writer, *results.Goals) error{m.latencies, m.races, m.deadBefore} {
		if err := part(ctx, out, &g); err != nil {
			return err
		}
	}
	g.Print(out)
	return nil
}

func prepare(ctx context.Context, o options) (m *measurement, err error) {
	m = &measurement{options: o, ordered: map[string]bool{}}
	for _, s := range o.strategies {
		d, err := hasp.Config{Strategy: s, Nodes: []string{o.redis}}.Driver(ctx)
		if err != nil {
			return nil, err
		}
		m.ordered[s] = d.Traits().Ordered
		d.Close()
	}
	if m.rdb, err = connect(o.redis); err != nil {
		return nil, err
	}
	if m.crew, err = hire(ctx, processes); err != nil {
		m.rdb.Close()
		return nil, err
	}
	return m, nil
}

func (m *measurement) close() {
	m.crew.dismiss()
	m.rdb.Close()
}

// seen is what several rounds of one way have shown.
type seen struct {
	across, all []time.Duration
	took        calls
	holds       int
}

func (s *seen) add(r round) {
	across, all := r.handovers()
	s.across, s.all = append(s.across, across...), append(s.all, all...)
	s.took.scripts, s.took.others = s.took.scripts+r.took.scripts, s.took.others+r.took.others
	s.holds += r.counted()
	slices.Sort(s.across)
	slices.Sort(s.all)
}

// latencies measures hand-over by strategy and number of waiters.
func (m *measurement) latencies(ctx context.Context, out io.Writer, g *results.Goals) error {
	t := results.NewTable(out, "From a release to the next holder", "strategy", "waiters", "between processes: n", "p50 µs", "of bare", "p99 µs", "of bare",
		"all: n", "p50 µs", "scripts per acquisition", "other commands, with those in scripts")
	ways := append([]string{bare}, m.strategies...)
	for _, waiters := range m.waiters {
		all := map[string]*seen{}
		for range m.rounds {
			for _, way := range ways {
				r, err := m.round(ctx, way, waiters)
				if err != nil {
					return err
				}
				if all[way] == nil {
					all[way] = new(seen)
				}
				all[way].add(r)
			}
		}
		for _, way := range ways {
			s, b := all[way], all[bare]
			p50, p99 := results.Percentile(s.across, 50), results.Percentile(s.across, 99)
			ratio := p50 / results.Percentile(b.across, 50)
			scripts := float64(s.took.scripts) / float64(s.holds)
			t.Row(way, waiters, len(s.across), p50, ratio, p99, p99/results.Percentile(b.across, 99),
				len(s.all), results.Percentile(s.all, 50), scripts, float64(s.took.others)/float64(s.holds))
			at := fmt.Sprint(waiters, " waiters")
			switch way {
			case "pubsublock":
				g.AtMost(2.5, ratio, at, "pubsublock: median hand-over between processes, of bare")
				g.AtMost(3, scripts/float64(min(waiters, processes)), at, "pubsublock: scripts per acquisition and process")
			case "fairlock":
				g.AtMost(1.5, ratio, at, "fairlock: median hand-over between processes, of bare")
				g.AtMost(2.05, scripts, at, "fairlock: scripts per acquisition, 2 and the refresh")
			}
		}
	}
	return nil
}

// races counts shares.
func (m *measurement) races(ctx context.Context, out io.Writer, g *results.Goals) error {
	t := results.NewTable(out, fmt.Sprintf("Shares of %d waiters over %d acquisitions of a key that nobody keeps", m.racers, m.holds),
		"strategy", "least", "most", "acquisitions/s", "from process to process/s", "scripts per acquisition")
	for _, s := range m.strategies {
		r, err := m.race(ctx, s, m.racers, m.holds)
		if err != nil {
			return err
		}
		holds := r.holds[:m.holds]
		least, most, changes := m.holds, 0, 0
		n := shares(holds)
		for _, k := range n {
			least, most = min(least, k), max(most, k)
		}
		if len(n) < m.racers {
			least = 0
		}
		for i := range holds[1:] {
			if holds[i].Process != holds[i+1].Process {
				changes++
			}
		}
		seconds := time.Duration(holds[len(holds)-1].Got - holds[0].Got).Seconds()
		t.Row(s, least, most, int(float64(len(holds))/seconds), int(float64(changes)/seconds), float64(r.took.scripts)/float64(r.counted()))
		if fair := m.holds / m.racers; s == "fairlock" {
			g.AtMost(0, float64(max(fair-least, most-fair)), fmt.Sprint(least, " to ", most), fmt.Sprintf("fairlock: shares differ from %d by", fair))
		}
	}
	return nil
}

// deadBefore has waiters killed that stand before a living one. Without a queue
// nobody stands before anybody.
func (m *measurement) deadBefore(ctx context.Context, out io.Writer, g *results.Goals) error {
	t := results.NewTable(out, fmt.Sprintf("From a release to the waiter behind %d whose processes were killed", m.dead), "strategy", "tries", "median ms", "longest ms")
	for _, s := range m.strategies {
		if !m.ordered[s] {
			continue
		}
		var all []time.Duration
		for range m.deaths {
			d, err := m.killed(ctx, s)
			if err != nil {
				return err
			}
			all = append(all, d)
		}
		slices.Sort(all)
		longest := results.Percentile(all, 100) / 1000
		t.Row(s, len(all), results.Percentile(all, 50)/1000, longest)
		g.AtMost(50, longest, fmt.Sprint("the longest of ", m.deaths), s+": ms behind killed waiters")
	}
	return nil
}
