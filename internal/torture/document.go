package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"
)

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

var part = regexp.MustCompile(`(?s)<!-- torture: ([a-z]+) -->\n.*?<!-- /torture -->`)

// parts are the tables of faults, by name. Each selects the faults it shows.
var parts = map[string]func(r *result, k kind) bool{
	"clients":  func(r *result, k kind) bool { return r.Place == onServer && k.Class != server },
	"server":   func(r *result, k kind) bool { return r.Place == onServer && k.Class == server && r.Strategy != redlock },
	"servers":  func(r *result, k kind) bool { return r.Place == onServer && k.Class == server && r.Strategy == redlock },
	"sentinel": func(r *result, _ kind) bool { return r.Place == onSentinel },
	"cluster":  func(r *result, _ kind) bool { return r.Place == onCluster },
	"service":  func(r *result, _ kind) bool { return r.Place == onService },
}

func fillPage(page []byte, runs []*result) (filled []byte, err error) {
	filled = part.ReplaceAllFunc(page, func(old []byte) []byte {
		name := string(part.FindSubmatch(old)[1])
		var b bytes.Buffer
		switch {
		case name == "totals":
			table(&b, totals(runs))
		case parts[name] != nil:
			table(&b, byFault(runs, parts[name]))
		default:
			err = fmt.Errorf("unknown part %q", name)
			return old
		}
		return fmt.Appendf(nil, "<!-- torture: %s -->\n%s<!-- /torture -->", name, b.Bytes())
	})
	return filled, err
}

// sum adds up one kind of fault over all runs of a strategy.
type sum struct {
	injected, violations int
	recovery             []time.Duration
}

// byFault is a table of faults by strategy.
func byFault(runs []*result, has func(*result, kind) bool) [][]string {
	type cell struct{ fault, strategy string }
	cells := map[cell]*sum{}
	var faults []kind
	var columns []string
	for _, r := range runs {
		for _, k := range r.Kinds {
			if k.Injected == 0 || !has(r, k) {
				continue
			}
			at := cell{k.Name, r.Strategy}
			if !slices.ContainsFunc(faults, func(f kind) bool { return f.Name == k.Name }) {
				faults = append(faults, k)
			}
			if !slices.Contains(columns, r.Strategy) {
				columns = append(columns, r.Strategy)
			}
			if cells[at] == nil {
				cells[at] = &sum{}
			}
			c := cells[at]
			c.injected += k.Injected
			c.violations += k.Violations
			c.recovery = append(c.recovery, k.Recovery...)
		}
	}
	slices.SortFunc(columns, func(a, b string) int { return slices.Index(strategies, a) - slices.Index(strategies, b) })
	slices.SortStableFunc(faults, func(a, b kind) int { return one(a.Loses) - one(b.Loses) })
	rows := [][]string{append([]string{"fault", "one holder at a time"}, columns...)}
	for _, f := range faults {
		row := []string{f.Name, f.promise()}
		for _, column := range columns {
			c := cells[cell{f.Name, column}]
			if c == nil {
				row = append(row, "–")
				continue
			}
			slices.Sort(c.recovery)
			text := fmt.Sprintf("%d×", c.injected)
			if len(c.recovery) > 0 {
				text += fmt.Sprintf(": %s / %s", millis(rank(c.recovery, 50)), millis(rank(c.recovery, 100)))
			}
			if c.violations > 0 {
				text += fmt.Sprintf(", **broken %d×**", c.violations)
			}
			row = append(row, text)
		}
		rows = append(rows, row)
	}
	return rows
}

// promise says whether exclusion is kept.
func (k kind) promise() string {
	switch {
	case k.Loses:
		return "**by the fence only**; holders learn of it"
	case k.Thins:
		return "kept; a holder may learn that its lease is lost"
	}
	return "kept"
}

// millis returns milliseconds, with two digits at least.
func millis(d time.Duration) string {
	if d < 10*time.Millisecond {
		return fmt.Sprintf("%.1f", float64(d)/1e6)
	}
	return fmt.Sprintf("%.0f", float64(d)/1e6)
}

// totals returns a table of all runs, by strategy and place.
func totals(runs []*result) [][]string {
	rows := [][]string{{"strategy", "on", "minutes", "faults", "holds", "two at once", "left behind", "other broken promises", "with loss: faults", "two at once, separated by the fence", "holders that learned of it"}}
	type row struct{ strategy, what string }
	var order []row
	sums := map[row][2]result{} // without loss, with
	broken := map[row]map[string]int{}
	for _, r := range runs {
		at := row{r.Strategy, r.What}
		if broken[at] == nil {
			order = append(order, at)
			broken[at] = map[string]int{}
		}
		both := sums[at]
		s := &both[one(r.Losing)]
		s.Injected += r.Injected
		s.Lasted += r.Lasted
		s.Found.Holds += r.Found.Holds
		s.Found.Overlaps += r.Found.Overlaps
		s.Found.Unaware += r.Found.Unaware
		sums[at] = both
		for _, v := range r.Violations {
			broken[at][v.Promise]++
		}
	}
	slices.SortStableFunc(order, func(a, b row) int {
		return slices.Index(strategies, a.strategy) - slices.Index(strategies, b.strategy)
	})
	for _, at := range order {
		kept, lost, b := sums[at][0], sums[at][1], broken[at]
		all := 0
		for _, n := range b {
			all += n
		}
		two, left := b["one at a time"]+b["order"], b["leftovers"]
		last := texts(lost.Injected, lost.Found.Overlaps, fmt.Sprintf("%d of %d", lost.Found.Overlaps-lost.Found.Unaware, lost.Found.Overlaps))
		if lost.Injected == 0 {
			last = strings.Split(strings.Repeat("– ", 3), " ")[:3]
		}
		rows = append(rows, slices.Concat([]string{at.strategy, at.what},
			texts(fmt.Sprintf("%.0f", (kept.Lasted+lost.Lasted).Minutes()), kept.Injected, kept.Found.Holds+lost.Found.Holds, two, left, all-two-left), last))
	}
	return rows
}
