package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/hasplock/hasp/internal/redistest"
)

// oneOf returns an error unless a flag has one of some values.
func oneOf(flag, value string, values []string) error {
	if slices.Contains(values, value) {
		return nil
	}
	return fmt.Errorf("-%s: %q is none of %s", flag, value, strings.Join(values, ", "))
}

// check chooses the strategies, and returns an error if the flags make no sense. Nothing has
// been started then.
func (p *plan) check(names string, o options) error {
	err := oneOf("on", o.place, []string{onServer, onSentinel, onCluster, onService})
	if o.plant != "" {
		err = cmp.Or(err, oneOf("plant", o.plant, bugs))
	}
	p.strategies = strings.FieldsFunc(names, func(r rune) bool { return r == ',' })
	for _, name := range p.strategies {
		err = cmp.Or(err, oneOf("strategy", name, strategies))
	}
	switch {
	case err != nil:
		return err
	case o.time <= 0:
		return errors.New("-time must be positive")
	case len(p.strategies) > 0:
	case o.place == onServer:
		p.strategies = strategies
	default:
		p.strategies = strategies[:3]
	}
	for _, o.strategy = range p.strategies {
		if err := o.fits(); err != nil {
			return err
		}
	}
	if o.only != nil && !slices.ContainsFunc(p.strategies, o.hasFault) {
		return fmt.Errorf("-faults: %q matches no fault of %s with -on %s", o.only, strings.Join(p.strategies, ", "), o.place)
	}
	return nil
}

// fits returns an error unless the strategy can be run at the place.
func (o *options) fits() error {
	if o.place != onServer && !slices.Contains(strategies[:3], o.strategy) {
		return fmt.Errorf("%s cannot be run with -on %s: use %s", o.strategy, o.place, onServer)
	}
	return nil
}

// hasFault reports whether -faults matches a fault of a strategy. Before the servers of a
// strategy of others run, their faults are unknown.
func (o options) hasFault(strategy string) bool {
	if others[strategy].start != nil {
		return true
	}
	o.strategy = strategy
	s := o.sketch()
	return slices.ContainsFunc(slices.Concat(s.faults(false), s.faults(true)), func(f *fault) bool { return o.only.MatchString(f.name) })
}

// sketch returns a store that has every fault of the strategy at the place, but no servers that
// run.
func (o *options) sketch() *store {
	s := &store{strategy: o.strategy, skews: true, small: true}
	switch {
	case o.strategy == filelock:
		s.dir = "locks"
	case o.strategy == redlock:
		s.servers = make([]*redistest.Server, o.nodes)
	case o.place == onSentinel:
		s.sentinel = &redistest.Sentinel{}
	case o.place == onCluster:
		s.cluster = &redistest.Cluster{}
	case o.place == onService:
		s.service = &service{}
	default:
		s.servers = make([]*redistest.Server, 1)
	}
	return s
}
