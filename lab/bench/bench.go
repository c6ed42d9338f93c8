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

// turns returns the turns of one round of a scenario. Each round begins with a different contestant.
func (b *bench) turns(round int, scenario string) []measurement {
	first := round * len(b.all) / b.plan.rounds
	order := slices.Concat(b.all[first:], b.all[:first])
	ring := contestant{name: ringName, group: bare, nodes: 1, waits: true, fair: true}
	contend := func(ctx context.Context, c contestant, s contest) (figures, error) {
		return b.contended(ctx, scenario, c, s)
	}

	switch scenario {
	case uncontended:
		var settings []distinct
		for _, d := range b.plan.distinct {
			settings = append(settings, slices.Repeat([]distinct{d}, d.times)...)
		}
		return turnsOf(b, scenario, settings, order, func(_ distinct, c contestant) bool { return !c.alike }, b.uncontended)
	case contended:
		return turnsOf(b, scenario, b.plan.contests, append([]contestant{ring}, order...), contest.includes, contend)
	case fair:
		return turnsOf(b, scenario, b.plan.fair, append([]contestant{ring}, order...), contest.includes, contend)
	case again:
		return turnsOf(b, scenario, []repetition{b.plan.again}, order, func(_ repetition, c contestant) bool { return c.again }, b.again)
	case lockAll:
		return turnsOf(b, scenario, b.plan.several, order, several.includes, b.lockAll)
	}
	return turnsOf(b, scenario, b.plan.crowds, order, crowd.includes, b.leases)
}

// turnsOf returns the turns of the settings. In each setting, the contestants follow one after
// another.
func turnsOf[S fmt.Stringer](b *bench, scenario string, settings []S, order []contestant, includes func(S, contestant) bool,
	do func(context.Context, contestant, S) (figures, error)) (all []measurement) {
	for _, s := range settings {
		lacks := func(word string) bool { return !strings.Contains(s.String(), word) }
		for _, c := range order {
			if includes(s, c) && !slices.ContainsFunc(b.only, lacks) {
				all = append(all, measurement{section{scenario, s.String()}, c, func(ctx context.Context) (figures, error) { return do(ctx, c, s) }})
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
