package rig

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

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
	err := oneOf("on", o.place, o.places())
	if o.plant != "" {
		err = cmp.Or(err, oneOf("plant", o.plant, bugs))
	}
	err = cmp.Or(err, p.choose(names, o.place))
	switch {
	case err != nil:
		return err
	case o.time <= 0:
		return errors.New("-time must be positive")
	case o.far < 0:
		return errors.New("-far must be positive")
	case o.far > 0 && !o.apart():
		return errors.New("-far needs hosts: give -on hosts")
	}
	for _, o.strategy = range p.strategies {
		half := o.usualTerm() / 2
		switch err := o.fits(); {
		case err != nil:
			return err
		case o.far >= half:
			return fmt.Errorf("-far must be below %v, half of the term", half)
		}
	}
	if o.only != nil && !slices.ContainsFunc(p.strategies, o.hasFault) {
		return fmt.Errorf("-faults: %q matches no fault of %s with -on %s", o.only, strings.Join(p.strategies, ", "), o.place)
	}
	return nil
}

// places are the values of -on.
func (o *options) places() []string {
	if len(o.More) > 0 {
		return []string{onOther, onHosts}
	}
	return []string{onServer, onSentinel, onCluster, onService, onHosts, onHostsSentinel, onHostsCluster, onHostsService, onHostsName}
}

// usualTerm is the term of a strategy at a place.
func (o *options) usualTerm() time.Duration {
	switch more := o.more(); {
	case more != nil && o.apart():
		return cmp.Or(more.HostTerm, more.Term)
	case more != nil:
		return more.Term
	case o.apart():
		return hostTerms * term
	}
	return term
}

// fits returns an error unless the strategy can be run at the place.
func (o *options) fits() error {
	more := o.more()
	switch {
	case more != nil && more.Open == nil && o.place != onHosts:
		return fmt.Errorf("%s runs on hosts only: give -on %s", more.Name, onHosts)
	case more != nil, o.place == onServer:
		return nil
	case o.strategy == filelock:
		return fmt.Errorf("filelock cannot be run with -on %s: no network is between its processes and its files", o.place)
	case o.strategy == redlock && o.place != onHosts:
		return fmt.Errorf("redlock cannot be run with -on %s: use %s or %s", o.place, onServer, onHosts)
	}
	return nil
}

// hasFault reports whether -faults matches a fault of a strategy. Before the servers of the
// strategies of More run, their faults are unknown.
func (o options) hasFault(strategy string) bool {
	if len(o.More) > 0 {
		return true
	}
	o.strategy = strategy
	s := o.sketch()
	return slices.ContainsFunc(slices.Concat(s.faults(false), s.faults(true)), func(f *fault) bool { return o.only.MatchString(f.name) })
}

// sketch returns a store that has every fault of the strategy at the place, but no servers that
// run.
func (o *options) sketch() *store {
	s := &store{strategy: o.strategy, jumps: !o.apart(), skews: true, small: true}
	if o.apart() {
		s.apart = &apart{}
	}
	switch {
	case o.strategy == filelock:
		s.dir = "locks"
	case o.strategy == redlock:
		s.servers = make([]*redistest.Server, o.nodes)
	case o.place == onSentinel, o.place == onHostsSentinel:
		s.sentinel = &redistest.Sentinel{}
	case o.place == onCluster, o.place == onHostsCluster:
		s.cluster = &redistest.Cluster{}
	case o.place == onService, o.place == onHostsService:
		s.service = &service{}
	case o.place == onHostsName:
		s.service = &service{dns: &nameserver{}}
	default:
		s.servers = make([]*redistest.Server, 1)
	}
	return s
}
