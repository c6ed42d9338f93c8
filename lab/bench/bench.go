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
	only    []string      // texts that the text of a setting must contain
	servers redistest.Lab // ends the servers and the workers
	// first the server that contestants on one node use, then five masters
	redises []*redistest.Server
	// for each delay of a round trip, the addresses of the servers or of proxies with this delay
	at      map[time.Duration]stores
	meter   meter
	workers []*crew.Process
	// for each contestant, a locker that stays open until the process ends
	open map[string]locker
	*results
}

// errWrong is a failure that a slow machine does not explain.
var errWrong = errors.New("wrong")

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

// run carries out all rounds. One round is enough for the scenarios with long turns.
func (b *bench) run(ctx context.Context, names []string) error {
	for round := range b.plan.rounds {
		for _, scenario := range names {
			if round > 0 && slices.Index(scenarios, scenario) > slices.Index(scenarios, apart) {
				continue
			}
			if err := b.round(ctx, round, scenario); err != nil {
				return err
			}
		}
	}

	return nil
}

// round carries out the turns of a scenario. In each setting, the contestants follow one after
// another. Each round begins with a different contestant.
func (b *bench) round(ctx context.Context, round int, scenario string) error {
	contestants := b.contestants
	first := round * len(contestants) / b.plan.rounds
	for _, s := range b.plan.settings[scenario] {
		in := section{scenario, s.String()}
		if slices.ContainsFunc(b.only,
			func(word string) bool { return !strings.Contains(in.setting, word) }) {
			continue
		}
		fmt.Fprintf(os.Stderr, "%4.0fs  round %d of %d  %s: %s\n",
			time.Since(b.Began).Seconds(), round+1, b.plan.rounds, scenario, in.setting)
		for _, c := range slices.Concat(contestants[first:], contestants[:first]) {
			if !c.takes(scenario, s) {
				continue
			}
			if err := b.turn(ctx, in, s, c); err != nil {
				return err
			}
		}
	}

	return nil
}

// turn measures one contestant in one setting. It returns an error if the run must end.
func (b *bench) turn(ctx context.Context, in section, s setting, c contestant) error {
	bound, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	f, err := s.measure(bound, b, c)
	name := fmt.Sprintf("%s, %s: %s", in.scenario, in.setting, c.name)
	switch {
	case err == nil:
		b.add(in.cell(c.name), f)
	case errors.Is(err, errWrong):
		return fmt.Errorf("%s: %w", name, err)
	case ctx.Err() != nil:
		return ctx.Err()
	case c.peer() || errors.Is(err, errMany) || excused(err, 0, term):
		b.note("%s has no figures: %v", name, err)
	default:
		return fmt.Errorf("%s: %w", name, err)
	}

	return nil
}
