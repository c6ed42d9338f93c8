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
	only    []string                 // texts that the text of a setting must contain
	servers redistest.Lab            // ends the servers
	redises []*redistest.Server      // first the server that contestants on one node use, then five masters
	at      map[time.Duration]stores // for each delay of a round trip, the addresses of the servers or of proxies with this delay
	meter   meter
	workers []*crew.Process
	open    map[string]locker // for each contestant, a locker that stays open until the process ends
	results *results
}

// errWrong is a failure that a slow machine does not explain.
var errWrong = errors.New("wrong")

func (b *bench) close() {
	for _, w := range b.workers {
		w.End()
	}
	b.servers.Close()
}

// locker returns a contestant's locker, which stays open.
func (b *bench) locker(ctx context.Context, c contestant) (l locker, err error) {
	if l = b.open[c.name]; l == nil {
		if l, err = c.open(ctx, b.at[0], term); err != nil {
			return nil, err
		}
		b.open[c.name] = l
	}
	return l, nil
}

// measurement is a turn, in which one contestant is measured in one setting.
type measurement struct {
	setting
	contestant
}

// turns returns the turns of one round of a scenario. In each setting, the contestants follow one
// after another. Each round begins with a different contestant.
func (b *bench) turns(round int, scenario string) (all []measurement) {
	contestants := b.results.contestants
	first := round * len(contestants) / b.plan.rounds
	ring := contestant{name: ringName, group: bare, nodes: 1, waits: true, fair: true}
	order := slices.Concat([]contestant{ring}, contestants[first:], contestants[:first])
	for _, s := range b.plan.settings[scenario] {
		lacks := func(word string) bool { return !strings.Contains(s.String(), word) }
		for _, c := range order {
			if s.includes(c) && !slices.ContainsFunc(b.only, lacks) {
				all = append(all, measurement{s, c})
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
			if err := b.round(ctx, round, scenario, b.results.Began.Add(budget)); err != nil {
				return err
			}
		}
	}
	return nil
}

// round carries out the turns of a scenario that can begin before the time until.
func (b *bench) round(ctx context.Context, round int, scenario string, until time.Time) error {
	last := ""
	for _, t := range b.turns(round, scenario) {
		in := section{scenario, t.String()}
		if time.Now().After(until) {
			b.results.Skipped = append(b.results.Skipped, fmt.Sprintf("round %d of %s from %s, %s on", round+1, scenario, in.setting, t.name))
			return nil
		}
		if in.setting != last {
			last = in.setting
			fmt.Fprintf(os.Stderr, "%4.0fs  round %d of %d  %s: %s\n", time.Since(b.results.Began).Seconds(), round+1, b.plan.rounds, scenario, last)
		}

		bound, cancel := context.WithTimeout(ctx, patience)
		f, err := t.measure(bound, b, t.contestant)
		cancel()
		name := fmt.Sprintf("%s, %s: %s", scenario, last, t.name)
		switch {
		case err == nil:
			b.results.add(in.cell(t.name), f)
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
