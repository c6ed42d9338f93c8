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

// check returns the strategies of a list, or all that can use the store, and an error if the
// flags make no sense. Nothing has been started then.
func (o *options) check(list string) (names []string, err error) {
	err = oneOf("on", o.place, []string{onServer, onSentinel, onCluster, onService})
	if o.plant != "" {
		err = cmp.Or(err, oneOf("plant", o.plant, bugs))
	}
	names = strings.FieldsFunc(list, func(r rune) bool { return r == ',' })
	for _, name := range names {
		err = cmp.Or(err, oneOf("strategy", name, strategies))
	}
	switch {
	case err != nil:
		return nil, err
	case o.time <= 0:
		return nil, errors.New("-time must be positive")
	case o.place == onServer && len(names) == 0:
		return strategies, nil
	case len(names) == 0:
		return strategies[:3], nil
	}
	for _, name := range names {
		if o.place != onServer && !slices.Contains(strategies[:3], name) {
			return nil, fmt.Errorf("%s cannot be run with -on %s: use %s", name, o.place, onServer)
		}
	}
	return names, nil
}
