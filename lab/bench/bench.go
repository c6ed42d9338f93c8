package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/redistest"
)

// bench is one run of this program.
type bench struct {
	plan    plan
	all     []contestant
	only    []string            // texts that the text of a setting must contain
	servers redistest.Lab       // ends the servers
	redises []*redistest.Server // first the server that contestants on one node use, then five masters
	at      stores
	far     map[time.Duration]stores // for each delay of a round trip, the addresses of the proxies with this delay
	meter   *meter
	workers []*crew.Process
	open    map[string]locker // for each contestant, a locker that stays open until the process ends
	results *results
	began   time.Time
}

// errWrong is a failure that a slow machine does not explain.
var errWrong = errors.New("wrong")

// newBench starts servers and workers. The caller must call close, even after an error.
func newBench(ctx context.Context, p plan, all []contestant) (b *bench, err error) {
	b = &bench{plan: p, all: all, open: map[string]locker{}, far: map[time.Duration]stores{}, began: time.Now()}
	if err := b.start(); err != nil {
		return b, err
	}
	processes := 0
	for _, c := range slices.Concat(p.contests, p.fair) {
		processes = max(processes, c.processes)
	}
	for range processes {
		w, err := crew.Start(workerRole)
		if err != nil {
			return b, err
		}
		b.workers = append(b.workers, w)
	}
	b.results = newResults(all)
	b.results.Redis = field(ctx, b.meter.one, "redis_version")
	return b, nil
}

func (b *bench) close() {
	for _, w := range b.workers {
		w.End()
	}
	b.servers.Close()
}

// locker returns a contestant's locker, which stays open.
func (b *bench) locker(ctx context.Context, c contestant) (l locker, err error) {
	if l = b.open[c.name]; l == nil {
		if l, err = c.open(ctx, b.at, term); err != nil {
			return nil, err
		}
		b.open[c.name] = l
	}
	return l, nil
}

// measurement is a turn, in which one contestant is measured in one setting.
type measurement struct {
	section
	contestant
	do func(context.Context) (figures, error)
}

// turns returns the turns of one round of a scenario. In each setting, the contestants follow one
// after another. Each round begins with a different contestant.
func (b *bench) turns(round int, scenario string) (all []measurement) {
	first := round * len(b.all) / b.plan.rounds
	order := slices.Concat(b.all[first:], b.all[:first])
	add := func(s fmt.Stringer, c contestant, do func(context.Context) (figures, error)) {
		lacks := func(word string) bool { return !strings.Contains(s.String(), word) }
		if !slices.ContainsFunc(b.only, lacks) {
			all = append(all, measurement{section{scenario, s.String()}, c, do})
		}
	}

	switch scenario {
	case uncontended:
		for _, d := range b.plan.distinct {
			for range d.times {
				for _, c := range order {
					if !c.alike {
						add(d, c, func(ctx context.Context) (figures, error) { return b.uncontended(ctx, c, d) })
					}
				}
			}
		}
	case contended, fair:
		contests := b.plan.contests
		if scenario == fair {
			contests = b.plan.fair
		}
		ring := contestant{name: ringName, group: bare, nodes: 1, waits: true, fair: true}
		for _, s := range contests {
			for _, c := range append([]contestant{ring}, order...) {
				if s.includes(c) {
					add(s, c, func(ctx context.Context) (figures, error) { return b.contended(ctx, scenario, c, s) })
				}
			}
		}
	case again:
		for _, c := range order {
			if c.again {
				add(b.plan.again, c, func(ctx context.Context) (figures, error) { return b.again(ctx, c, b.plan.again) })
			}
		}
	case lockAll:
		for _, s := range b.plan.several {
			for _, c := range order {
				if (c.group == ours || strings.HasPrefix(c.name, "bare-floor")) && c.nodes > 0 && !c.alike {
					add(s, c, func(ctx context.Context) (figures, error) { return b.lockAll(ctx, c, s) })
				}
			}
		}
	case leases:
		for _, s := range b.plan.crowds {
			for _, c := range order {
				if s.includes(c) {
					add(s, c, func(ctx context.Context) (figures, error) { return b.leases(ctx, c, s) })
				}
			}
		}
	}
	return all
}

// run carries out as many rounds as there is time for. If there is only one round, each scenario
// has an equal share of the time, so that a slow machine measures something of each scenario.
func (b *bench) run(ctx context.Context, names []string) error {
	for round := range b.plan.rounds {
		for i, scenario := range names {
			if round > 0 && scenario != uncontended && scenario != contended {
				continue // one round is enough for the scenarios with long turns
			}
			budget := b.plan.budget
			if b.plan.rounds == 1 {
				budget = budget * time.Duration(i+1) / time.Duration(len(names))
			}
			if err := b.round(ctx, round, scenario, b.began.Add(budget)); err != nil {
				return err
			}
		}
	}
	return nil
}

// round carries out the turns of a scenario that can begin before the time until.
func (b *bench) round(ctx context.Context, round int, scenario string, until time.Time) error {
	setting := ""
	for _, t := range b.turns(round, scenario) {
		if time.Now().After(until) {
			b.results.Skipped = append(b.results.Skipped, fmt.Sprintf("round %d of %s from %s, %s on", round+1, t.scenario, t.setting, t.name))
			return nil
		}
		if t.setting != setting {
			setting = t.setting
			fmt.Fprintf(os.Stderr, "%4.0fs  round %d of %d  %s: %s\n", time.Since(b.began).Seconds(), round+1, b.plan.rounds, scenario, setting)
		}

		bound, cancel := context.WithTimeout(ctx, patience)
		f, err := t.do(bound)
		cancel()
		name := fmt.Sprintf("%s, %s: %s", scenario, setting, t.name)
		switch {
		case err == nil:
			b.results.add(t.cell(t.name), f)
		case errors.Is(err, errWrong):
			return fmt.Errorf("%s: %w", name, err)
		case ctx.Err() != nil:
			return ctx.Err()
		case t.group == theirs || errors.Is(err, errMany) || excused(err, 0, term):
			b.results.note("%s has no figures: %v", name, err)
		default:
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}
