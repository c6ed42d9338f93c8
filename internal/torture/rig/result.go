package rig

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"time"
)

// result is the result of a run.
type result struct {
	Strategy, Place string
	What            string // a description of Place
	Losing          bool
	Seed            uint64
	Command         string // repeats the run
	Injected        int    // faults
	Lasted          time.Duration
	Term            time.Duration
	Rejoined        time.Duration // after the last fault, until every client had a key
	Kinds           []kind
	Found           found
	Errors          map[string]int // of Lock and Unlock, by kind
	Violations      []violation
}

// kind counts one kind of fault.
type kind struct {
	Name, Class  string
	Loses, Thins bool
	Injected     int
	Recovery     []time.Duration // sorted
	Violations   int             // of which this was the last fault before
}

// violation is a promise that was broken.
type violation struct {
	Promise string
	At      int64
	What    string
	After   string // the last fault before it
}

func (n *nemesis) result(lasted time.Duration, f found) *result {
	res := &result{Strategy: n.strategy, Place: n.place, What: n.store.what, Losing: n.losing, Seed: n.seed, Command: n.again(),
		Injected: n.count, Lasted: lasted, Term: n.term, Rejoined: n.rejoined, Found: f, Errors: maps.Clone(n.rec.errs)}
	for _, v := range n.wrong {
		v.After = cmp.Or(n.before(v.At), "nothing")
		res.Violations = append(res.Violations, v)
	}
	for _, f := range n.faults {
		if len(f.at) == 0 {
			continue
		}
		k := kind{Name: f.name, Class: f.class, Loses: n.losing, Thins: f.thins, Injected: len(f.at), Recovery: f.recovery}
		for _, v := range res.Violations {
			k.Violations += one(v.After == k.Name)
		}
		slices.Sort(k.Recovery)
		res.Kinds = append(res.Kinds, k)
	}
	return res
}

// again returns the command that repeats the run.
func (n *nemesis) again() string {
	s := fmt.Sprintf("%s -strategy %s -seed %d -time %v", n.Command, n.strategy, n.seed, n.whole)
	if n.place != onServer && n.place != onOther {
		s += " -on " + n.place
	}
	if n.strategy == redlock && n.nodes != leastNodes {
		s += fmt.Sprint(" -nodes ", n.nodes)
	}
	if n.far != 0 {
		s += fmt.Sprint(" -far ", n.far)
	}
	if n.program == "" && !n.apart() {
		s += " -clocks=false"
	}
	if n.plant != "" {
		s += " -plant " + n.plant
	}
	if n.only != nil {
		s += fmt.Sprintf(" -faults %q", n.only)
	}
	return s
}

// before returns the last fault that was injected before a moment.
func (n *nemesis) before(at int64) (name string) {
	var last int64
	for _, f := range n.faults {
		for _, when := range f.at {
			if when <= at && when > last {
				last, name = when, f.name
			}
		}
	}
	return name
}

// page is the page with the figures of runs. They stand between
// <!-- torture: NAME --> and <!-- /torture -->.
const page = "docs/guarantees.md"

// document writes the figures of all runs in the files into the page.
func document(files []string) error {
	if len(files) == 0 {
		return errors.New("-document: name files of results")
	}
	runs, err := readResults(files)
	if err != nil {
		return err
	}
	old, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	text, err := fillPage(old, runs)
	if err != nil {
		return err
	}
	return os.WriteFile(page, text, 0o644)
}

// readResults reads the results of runs from files of JSON lines.
func readResults(files []string) (runs []*result, err error) {
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		for d := json.NewDecoder(bytes.NewReader(text)); ; {
			var r result
			if err := d.Decode(&r); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			runs = append(runs, &r)
		}
	}
	return runs, nil
}

// part matches a table of the page.
var part = regexp.MustCompile(`(?s)<!-- torture: ([a-z-]+) -->\n.*?<!-- /torture -->`)

// parts are the tables of faults, by name. Each selects the faults it shows.
var parts = map[string]func(r *result, k kind) bool{
	"clients":  func(r *result, k kind) bool { return r.Place == onServer && k.Class != server },
	"server":   func(r *result, k kind) bool { return r.Place == onServer && k.Class == server && r.Strategy != redlock },
	"servers":  func(r *result, k kind) bool { return r.Place == onServer && k.Class == server && r.Strategy == redlock },
	"sentinel": func(r *result, _ kind) bool { return r.Place == onSentinel },
	"cluster":  func(r *result, _ kind) bool { return r.Place == onCluster },
	"service":  func(r *result, _ kind) bool { return r.Place == onService },

	"others":   func(r *result, k kind) bool { return r.Place == onOther && k.Class != server },
	"pglock":   serversOf(onOther, "pglock"),
	"etcdlock": serversOf(onOther, "etcdlock"),

	"hosts-others":   func(r *result, k kind) bool { return otherOnHosts(r) && k.Class != server },
	"hosts-pglock":   serversOf(onHosts, "pglock"),
	"hosts-etcdlock": serversOf(onHosts, "etcdlock"),

	"hosts":          func(r *result, _ kind) bool { return r.Place == onHosts && slices.Contains(strategies, r.Strategy) },
	"hosts-sentinel": func(r *result, _ kind) bool { return r.Place == onHostsSentinel },
	"hosts-cluster":  func(r *result, _ kind) bool { return r.Place == onHostsCluster },
	"hosts-service":  func(r *result, _ kind) bool { return r.Place == onHostsService },
	"hosts-name":     func(r *result, _ kind) bool { return r.Place == onHostsName },
}

// serversOf selects the faults of a strategy's servers at a place.
func serversOf(place, strategy string) func(r *result, k kind) bool {
	return func(r *result, k kind) bool { return r.Place == place && r.Strategy == strategy && k.Class == server }
}

// otherOnHosts selects the runs of pglock and etcdlock on hosts of their own.
func otherOnHosts(r *result) bool {
	return r.Place == onHosts && (r.Strategy == "pglock" || r.Strategy == "etcdlock")
}

// fillPage replaces the tables of the page of which there are runs.
func fillPage(page []byte, runs []*result) (filled []byte, err error) {
	filled = part.ReplaceAllFunc(page, func(old []byte) []byte {
		name := string(part.FindSubmatch(old)[1])
		var b bytes.Buffer
		var rows [][]string
		switch {
		case name == "totals":
			rows = totals(runs, func(r *result) bool { return r.Place != onOther && !isApart(r.Place) })
		case name == "together":
			rows = totals(runs, func(r *result) bool { return isApart(r.Place) && slices.Contains(strategies, r.Strategy) })
		case name == "others-together":
			rows = totals(runs, func(r *result) bool { return r.Place == onOther })
		case name == "hosts-others-together":
			rows = totals(runs, otherOnHosts)
		case parts[name] != nil:
			rows = byFault(runs, parts[name])
		default:
			err = fmt.Errorf("unknown part %q", name)
			return old
		}
		if len(rows) == 1 { // only a heading: the files have no run for this table
			return old
		}
		table(&b, rows)
		return fmt.Appendf(nil, "<!-- torture: %s -->\n%s<!-- /torture -->", name, b.Bytes())
	})
	return filled, err
}
