package rig

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9/logging"

	_ "github.com/hasplock/hasp/fairlock"
	_ "github.com/hasplock/hasp/filelock"
	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/torture/hosts"
	_ "github.com/hasplock/hasp/pubsublock"
	_ "github.com/hasplock/hasp/redlock"
	_ "github.com/hasplock/hasp/spinlock"
)

func TestMain(m *testing.M) {
	if crew.Role() != "" {
		work(crew.Parent(), others)
	}
	if hostsMissing() == nil {
		if err := hosts.Apart(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		resolveBy(ownNames)
	}
	logging.Disable()
	os.Exit(m.Run())
}

// hostsMissing returns why the tests make no hosts.
func hostsMissing() error {
	if os.Getenv("HASP_TEST_HOSTS") == "" {
		return errors.New(`tests make network namespaces only if HASP_TEST_HOSTS is set, as "make hosts" does`)
	}
	return hosts.Missing()
}

// needHosts skips a test of a store with hosts of its own where they cannot be made.
func needHosts(t *testing.T, place string) {
	t.Helper()
	if err := hostsMissing(); err != nil && isApart(place) {
		t.Skip(err)
	}
}

// Every strategy keeps its promises for some seconds of faults. A slow machine
// only injects fewer of them.
func TestPromises(t *testing.T) {
	redistest.NeedSets(t)
	promise := func(name string, o options) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			needHosts(t, o.place)
			o.seed, o.term, o.patience = 1, 2*term, patience
			var b strings.Builder
			res, err := do(t.Context(), o, &b)
			if err != nil {
				t.Fatal(err)
			}
			if res != nil && len(res.Violations) > 0 {
				t.Errorf("%d promises broken:\n%s", len(res.Violations), b.String())
			}
		})
	}
	for _, strategy := range strategies {
		promise(strategy, options{strategy: strategy, place: onServer, nodes: leastNodes, time: 3 * time.Second})
		promise(strategy+" losing data", options{strategy: strategy, place: onServer, nodes: leastNodes, losing: true, time: time.Second / 2})
	}
	for _, strategy := range strategies[:3] {
		promise(strategy+" on a service", options{strategy: strategy, place: onService, time: 2 * time.Second})
	}
	for _, strategy := range strategies[:4] {
		promise(strategy+" on hosts", options{strategy: strategy, place: onHosts, nodes: leastNodes, time: 5 * time.Second})
		promise(strategy+" on hosts losing data", options{strategy: strategy, place: onHosts, nodes: leastNodes, losing: true, time: time.Second})
	}
	promise("pubsublock on hosts behind a name", options{strategy: "pubsublock", place: onHostsName, time: 5 * time.Second})
	promise("fairlock on hosts of a service", options{strategy: fairlock, place: onHostsService, time: 5 * time.Second})
	for _, n := range []int{1, 4} {
		promise(fmt.Sprint("redlock on ", n), options{strategy: redlock, place: onServer, nodes: n, time: 2 * time.Second})
	}
}

// A harness that finds no bug in a driver that has one is no harness.
func TestPlantedBugsAreFound(t *testing.T) {
	redistest.NeedSets(t)
	for bug, c := range map[string]struct {
		faults   string
		patience time.Duration
		promises []string
	}{
		"release": {"holder stopped", patience, []string{"one at a time", "kept until its end"}},
		"renewal": {"waiter killed", patience, []string{"one at a time", "kept until its end"}},
		"wake-up": {"waiter killed", 3 * time.Second, []string{"stood still"}},
		"slots":   {"waiter killed", patience, []string{"slots"}},
	} {
		for _, at := range []struct{ strategy, place string }{{"spinlock", onServer}, {"pubsublock", onServer}, {fairlock, onServer},
			{redlock, onServer}, {filelock, onServer}, {"pubsublock", onHosts}, {redlock, onHosts}} {
			strategy, place := at.strategy, at.place
			t.Run(bug+" "+strategy+" on "+place, func(t *testing.T) {
				t.Parallel()
				o := options{strategy: strategy, place: place, nodes: leastNodes, time: 2 * time.Second, patience: c.patience}
				findPlanted(t, bug, o, c.faults, term, c.promises...)
			})
		}
	}
}

// Some bugs do hardly any harm if nothing is far away and the end of a connection is always
// noticed. docs/guarantees.md says what the same runs find on loopback.
func TestPlantedBugsOfLatencyAreFound(t *testing.T) {
	redistest.NeedSets(t)
	for bug, c := range map[string]struct {
		options
		faults  string
		promise string
	}{
		"reply":        {options{strategy: "spinlock", place: onHosts, far: 200 * time.Millisecond, time: 10 * time.Second, patience: patience}, "holder stopped", "one at a time"},
		queued:         {options{strategy: "spinlock", place: onHosts, time: time.Second, patience: patience}, "waiter killed", "kept until its end"},
		"subscription": {options{strategy: "pubsublock", place: onHostsService, time: 10 * time.Second, patience: 5 * time.Second}, "the address leads to its replica", "stood still"},
		resolvedOnce:   {options{strategy: "pubsublock", place: onHostsName, time: time.Second, patience: patience}, "waiter killed", "stood still"},
	} {
		t.Run(bug, func(t *testing.T) {
			t.Parallel()
			findPlanted(t, bug, c.options, c.faults, hostTerms*term, c.promise)
		})
	}
}

// findPlanted fails the test if no run with a bug reports that one of the promises is broken.
func findPlanted(t *testing.T, bug string, o options, faults string, length time.Duration, promises ...string) {
	needHosts(t, o.place)
	o.plant, o.only, o.term = bug, regexp.MustCompile(faults), length
	var b strings.Builder
	for o.seed = 1; o.seed <= 20; o.seed++ {
		b.Reset()
		res, err := do(t.Context(), o, &b)
		if err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(res.Violations, func(v violation) bool { return slices.Contains(promises, v.Promise) }) {
			t.Log("found with seed", o.seed)
			return
		}
	}
	t.Errorf("%s: not found in 20 runs, the last of which was\n%s", bug, b.String())
}

// history returns a run with turns of one key.
func history(all ...turn) *nemesis {
	r := newRecord(nil)
	for _, t := range all {
		t.proc, t.fenced = &proc{}, t.fence != 0
		t.expires = max(t.expires, t.end)
		r.turns = append(r.turns, &t)
	}
	return &nemesis{run: &run{rec: r, names: []string{"k"}}}
}

func TestCheckFindsWhatIsWrong(t *testing.T) {
	sound := []turn{
		{asked: 1, got: 2, end: 10, fence: 1},
		{asked: 1, got: 11, end: 20},
		{asked: 3, got: 50, end: 40, fence: 2}, // ended before Lock returned
		{asked: 9, got: 41, end: 60, fence: 3, lost: 61},
		{asked: 50, got: 61, end: 70, fence: 4, killed: true},
	}
	more := func(t ...turn) []turn { return append(slices.Clone(sound), t...) }
	for name, c := range map[string]struct {
		turns    []turn
		promises []string
	}{
		"nothing":          {sound, nil},
		"shared":           {more(turn{asked: 71, got: 72, end: 80, fence: 6, shared: true}, turn{asked: 71, got: 73, end: 90, fence: 5, shared: true}, turn{asked: 74, got: 91, end: 92, fence: 7}), nil},
		"shared beside it": {more(turn{asked: 71, got: 72, end: 80, shared: true}, turn{asked: 71, got: 79, end: 90}), []string{"one at a time", "order"}},
		"beside shared":    {more(turn{asked: 71, got: 72, end: 80}, turn{asked: 71, got: 79, end: 90, shared: true}), []string{"one at a time", "order"}},
		"behind a short one": {more(turn{asked: 71, got: 72, end: 80, shared: true}, turn{asked: 71, got: 73, end: 75, shared: true}, turn{asked: 71, got: 79, end: 90}),
			[]string{"one at a time", "order"}},
		"one fence for two":  {more(turn{asked: 71, got: 72, end: 80, fence: 5, shared: true}, turn{asked: 71, got: 72, end: 80, fence: 5, shared: true}), []string{"order"}},
		"a reader's fence":   {more(turn{asked: 71, got: 72, end: 80, fence: 6, shared: true}, turn{asked: 73, got: 74, end: 80, fence: 5, shared: true}), []string{"fence", "order"}},
		"two at once":        {more(turn{asked: 3, got: 15, end: 18}), []string{"one at a time", "order"}},
		"fence goes back":    {more(turn{asked: 71, got: 72, end: 80, fence: 3}), []string{"fence", "order"}},
		"fence stays":        {more(turn{asked: 71, got: 72, end: 80, fence: 4}), []string{"fence", "order"}},
		"void out of order":  {more(turn{asked: 71, got: 90, end: 80, fence: 1}), []string{"order"}},
		"lost early":         {more(turn{asked: 71, got: 72, end: 80, lost: 81, expires: 90}), []string{"kept until its end"}},
		"two slots":          {more(turn{key: slotted, asked: 71, got: 72, end: 80, fence: 5}, turn{key: slotted + 1, asked: 71, got: 73, end: 90, fence: 5}, turn{key: slotted, asked: 74, got: 81, end: 90, fence: 6}), nil},
		"three of two slots": {more(turn{key: slotted, asked: 71, got: 72, end: 80}, turn{key: slotted + 1, asked: 71, got: 73, end: 90}, turn{key: slotted + 2, asked: 74, got: 79, end: 90}), []string{"slots"}},
		"one slot twice":     {more(turn{key: slotted, asked: 71, got: 72, end: 80}, turn{key: slotted, asked: 71, got: 79, end: 90}), []string{"one at a time", "order"}},
		"fence of a slot":    {more(turn{key: slotted + 1, asked: 71, got: 72, end: 80, fence: 9}, turn{key: slotted + 1, asked: 81, got: 82, end: 90, fence: 8}), []string{"fence", "order"}},
		"refused":            {more(turn{asked: 71, got: 72, end: 80, fence: 5, mistaken: 79}), []string{"fence"}},
	} {
		n := history(c.turns...)
		f := n.check()
		var got []string
		for _, v := range n.wrong {
			got = append(got, v.Promise)
		}
		if !slices.Equal(got, c.promises) {
			t.Errorf("%s: found %q, want %q", name, got, c.promises)
		}
		if f.Holds != len(c.turns) || f.Void == 0 {
			t.Errorf("%s: figures %+v", name, f)
		}
	}
}

// Where locks were taken away two may hold a key, and only the fence counts.
func TestCheckAfterALoss(t *testing.T) {
	turns := []turn{
		{asked: 1, got: 2, end: 30, fence: 7, lost: 31, expires: 90},
		{asked: 20, got: 25, end: 40, fence: 8},
	}
	n := history(turns...)
	n.losing, n.losses = true, [][2]int64{{18, 19}}
	if f := n.check(); len(n.wrong) > 0 || f.Overlaps != 1 {
		t.Errorf("found %v, %+v", n.wrong, f)
	}
	late := []turn{
		{asked: 1, got: 20, end: 30, fence: 8},
		{asked: 10, got: 40, end: 50, fence: 7, lost: 51, expires: 90},
	}
	n = history(late...)
	n.losing, n.losses = true, [][2]int64{{18, 19}}
	if n.check(); len(n.wrong) > 0 {
		t.Errorf("a grant that arrives late: found %v", n.wrong)
	}
	late = []turn{
		{asked: 22, got: 25, end: 30, fence: 8},
		{asked: 10, got: 28, end: 40, fence: 7, lost: 51, expires: 90},
	}
	n = history(late...)
	n.losing, n.losses = true, [][2]int64{{18, 19}}
	if f := n.check(); len(n.wrong) > 0 || f.Overlaps != 1 {
		t.Errorf("a grant that arrives while another caller holds: found %v, %+v", n.wrong, f)
	}
	turns[1].fence = 6
	n = history(turns...)
	n.losing, n.losses = true, [][2]int64{{18, 19}}
	if n.check(); len(n.wrong) != 1 || n.wrong[0].Promise != "fence" {
		t.Errorf("a fence that goes back: found %v", n.wrong)
	}
}

func TestResourceRefusesAnOldFence(t *testing.T) {
	r := newRecord(nil)
	p := &proc{}
	for id, c := range []struct {
		fence  uint64
		shared bool
	}{{5, false}, {6, false}, {0, false}, {7, true}, {8, true}} {
		r.take(p, report{What: asks, ID: int64(id), T: 1, Fenced: c.fence > 0, Shared: c.shared})
		r.take(p, report{What: got, ID: int64(id), T: 2, Fence: c.fence})
	}
	for i, c := range []struct {
		id      int64
		refused bool
	}{{0, false}, {1, false}, {0, true}, {1, false}, {2, false}, {4, false}, {3, false}, {1, true}} {
		if got := r.take(p, report{What: touch, ID: c.id}); got != c.refused {
			t.Errorf("use %d: refused: %v", i, got)
		}
	}
	if r.refused != 2 {
		t.Errorf("%d refused, want 2", r.refused)
	}
}

// Every fault of every strategy is in the page.
func TestThePageHasEveryFault(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "..", page))
	if err != nil {
		t.Fatal(err)
	}
	has := map[[3]string]bool{} // by table, fault and strategy
	for _, p := range regexp.MustCompile(`(?s)<!-- torture: ([a-z-]+) -->\n(.*?)<!-- /torture -->`).FindAllStringSubmatch(string(text), -1) {
		var columns []string
		for line := range strings.Lines(p[2]) {
			cells := strings.Split(line, "|")
			for i := range cells {
				cells[i] = strings.TrimSpace(cells[i])
			}
			if columns == nil {
				columns = cells
			}
			for i, c := range cells {
				has[[3]string{p[1], cells[min(1, len(cells)-1)], columns[i]}] = strings.Contains(c, "×")
			}
		}
	}
	for _, strategy := range strategies {
		for _, place := range (&options{}).places() {
			o := options{strategy: strategy, place: place, nodes: leastNodes}
			if o.fits() != nil {
				continue
			}
			s := o.sketch()
			for _, losing := range []bool{false, true} {
				for _, f := range s.faults(losing) {
					table := place
					for name, of := range parts {
						if of(&result{Strategy: strategy, Place: place}, kind{Class: f.class}) {
							table = name
						}
					}
					if !has[[3]string{table, f.name, strategy}] {
						t.Errorf("%s has no figure of %q with %s in the table %q", page, f.name, strategy, table)
					}
				}
			}
		}
	}
}

// A master hands over to its replica although their connection has died, and neither of the
// two has noticed.
func TestHandOverWithoutAConnection(t *testing.T) {
	t.Parallel()
	needHosts(t, onHostsService)
	l := &redistest.Lab{}
	defer l.Close()
	if err := l.Do(func() error {
		s := (&options{strategy: "spinlock", place: onHostsService, term: term}).openStore(l, []string{"k"})
		s.apart.Forget(0, s.apart.Own().Addr)
		s.Check(s.admin[s.master()].Set(t.Context(), "k", "v", 0).Err())
		s.servers[s.master()].HandOver()
		return nil
	}); err != nil {
		t.Error(err)
	}
}
