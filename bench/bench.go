package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// bench is a run of this program.
type bench struct {
	plan    plan
	all     []contestant
	servers servers
	at      stores
	meter   *meter
	crew    crew
	open    map[string]locker // until the process ends
	results *results
	began   time.Time
}

var (
	errTime  = errors.New("there is no time left") // ends what is still under way when a run has to
	errWrong = errors.New("wrong")                 // what no slowness excuses
)

// newBench starts servers and workers, which close ends, also after an error.
func newBench(ctx context.Context, p plan, all []contestant, o options) (b *bench, err error) {
	b = &bench{plan: p, all: all, open: map[string]locker{}, began: time.Now()}
	if b.at, err = b.servers.start(ctx, o.redis, all); err != nil {
		return b, err
	}
	if b.meter, err = newMeter(b.at, b.servers.etcd); err != nil {
		return b, err
	}
	most := 0
	for _, c := range p.contests {
		most = max(most, c.processes)
	}
	if b.crew, err = hire(most); err != nil {
		return b, err
	}
	command := strings.Join(append([]string{"go run ."}, os.Args[1:]...), " ")
	if o.redis != "" {
		command = "go run . --redis …" // it may hold a password
	}
	b.results = newResults(all, b.meter.serverVersion(ctx), command)
	return b, nil
}

func (b *bench) close() {
	b.crew.dismiss()
	if b.meter != nil {
		b.meter.close()
	}
	b.servers.stop()
}

// locker is a contestant that stays open.
func (b *bench) locker(ctx context.Context, c contestant) (l locker, err error) {
	if l = b.open[c.name]; l == nil {
		if l, err = c.open(ctx, b.at, term); err != nil {
			return nil, err
		}
		b.open[c.name] = l
	}
	return l, nil
}

// turn is one contestant's, in one setting.
type turn struct {
	section
	contestant
	do func(context.Context) (figures, error)
}

// turns are those of one round, in which every setting has all contestants
// after one another. Each round begins with another one.
func (b *bench) turns(round int, scenario string) (all []turn) {
	first := round * len(b.all) / b.plan.rounds
	order := slices.Concat(b.all[first:], b.all[:first])
	add := func(s fmt.Stringer, c contestant, do func(context.Context) (figures, error)) {
		all = append(all, turn{section{scenario, s.String()}, c, do})
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
	case contended:
		ring := contestant{name: ringName, group: limit, nodes: 1}
		for _, s := range b.plan.contests {
			for _, c := range append([]contestant{ring}, order...) {
				if c.waits || c.name == ringName {
					add(s, c, func(ctx context.Context) (figures, error) { return b.contended(ctx, c, s) })
				}
			}
		}
	case leases:
		for _, s := range b.plan.crowds {
			for _, c := range order {
				switch {
				case !s.asks(c):
				case s.leases > c.most:
					b.results.notes[cell{leases, s.String(), c.name}] = fmt.Sprintf("not asked for more than %d", c.most)
				default:
					add(s, c, func(ctx context.Context) (figures, error) { return b.leases(ctx, c, s) })
				}
			}
		}
	case masters:
		for _, c := range order {
			if c.nodes == 5 {
				add(b.plan.degraded, c, func(ctx context.Context) (figures, error) { return b.masters(ctx, c, b.plan.degraded) })
			}
		}
	}
	return all
}

// run has all rounds, or as many as there is time for. Of a single round
// every scenario has its share, so that on a slow machine each has something.
func (b *bench) run(ctx context.Context, names []string) error {
	for round := range b.plan.rounds {
		for i, scenario := range names {
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

// round has the turns of a scenario that begin in time.
func (b *bench) round(ctx context.Context, round int, scenario string, until time.Time) error {
	last := ""
	for _, t := range b.turns(round, scenario) {
		if time.Now().After(until) || context.Cause(ctx) == errTime {
			b.skip(round, t)
			return nil
		}
		if t.setting != last {
			last = t.setting
			b.progress(round, t)
		}
		k := cell{scenario, t.setting, t.name}
		f, err := t.within(ctx)
		switch {
		case err == nil:
			b.results.add(k, f)
		case errors.Is(err, errWrong):
			return fmt.Errorf("%s, %s: %s: %w", scenario, t.setting, t.name, err)
		case context.Cause(ctx) == errTime:
			b.skip(round, t)
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, errMany):
			b.results.notes[k] = "none: " + err.Error()
		case t.group == theirs || excused(err, 0, term):
			fmt.Fprintf(os.Stderr, "%s, %s: %s has no figures of this round: %v\n", scenario, t.setting, t.name, err)
		default:
			return fmt.Errorf("%s, %s: %s: %w", scenario, t.setting, t.name, err)
		}
	}
	return nil
}

// within leaves behind what does not return soon after ctx has ended.
func (t turn) within(ctx context.Context) (f figures, err error) {
	type outcome struct {
		f   figures
		err error
	}
	done := make(chan outcome, 1)
	go func() {
		f, err := t.do(ctx)
		done <- outcome{f, err}
	}()
	late := make(chan struct{})
	defer context.AfterFunc(ctx, func() {
		time.Sleep(grace)
		close(late)
	})()
	select {
	case o := <-done:
		return o.f, o.err
	case <-late:
		return nil, context.Cause(ctx)
	}
}

func (b *bench) skip(round int, t turn) {
	b.results.Skipped = append(b.results.Skipped, fmt.Sprintf("round %d of %s from %s, %s on", round+1, t.scenario, t.setting, t.name))
}

func (b *bench) progress(round int, t turn) {
	fmt.Fprintf(os.Stderr, "%4.0fs  round %d of %d  %s: %s\n", time.Since(b.began).Seconds(), round+1, b.plan.rounds, t.scenario, t.setting)
}

// write writes all that was measured.
func (b *bench) write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(dir, "results.md"))
	if err != nil {
		return err
	}
	b.results.writeMarkdown(f, b.plan)
	err = errors.Join(f.Close(), b.results.writeJSON(filepath.Join(dir, "results.json"), b.plan), b.results.draw(dir, b.plan))
	if err == nil {
		fmt.Fprintf(os.Stderr, "%4.0fs  see %s\n", time.Since(b.began).Seconds(), filepath.Join(dir, "results.md"))
	}
	return err
}
