package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
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
	for _, name := range p.strategies {
		if o.place != onServer && !slices.Contains(strategies[:3], name) {
			return fmt.Errorf("%s cannot be run with -on %s: use %s", name, o.place, onServer)
		}
	}
	return nil
}
