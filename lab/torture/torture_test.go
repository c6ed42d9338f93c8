package main

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/await"

	"github.com/redis/go-redis/v9/logging"

	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestMain(m *testing.M) {
	if role, _ := crew.Role(); role != "" {
		work(crew.Parent())
	}
	logging.Disable()
	os.Exit(m.Run())
}

// torture finds each bug that it plants.
func TestPlantedBugsAreFound(t *testing.T) {
	if testing.Short() {
		t.Skip("make planted looks for all planted bugs, which takes minutes")
	}
	redistest.NeedSets(t)
	most := []string{"spinlock", "pubsublock", "fairlock", redlock, filelock}
	for _, c := range []struct {
		strategies  []string
		bug, faults string
		time        time.Duration
		patience    time.Duration
		promises    []string
	}{
		{most, "release", "holder stopped", 2 * time.Second, patience, []string{"one at a time", "kept until its end"}},
		{most, "wake-up", "waiter killed", 2 * time.Second, 3 * time.Second, []string{"stood still"}},
		{most, "slots", "waiter killed", 2 * time.Second, patience, []string{"slots"}},
		// With this bug, a term counts from the reply and not from the call. Only slow replies show
		// it.
		{[]string{"spinlock"}, "reply", "slow to answer", 10 * time.Second, patience, []string{"one at a time"}},
	} {
		for _, strategy := range c.strategies {
			t.Run(c.bug+" "+strategy, func(t *testing.T) {
				if len(c.strategies) > 1 {
					t.Parallel()
				}
				o := options{strategy: strategy, place: onServer, nodes: leastNodes, time: c.time, term: term, patience: c.patience,
					plant: c.bug, only: regexp.MustCompile(c.faults)}
				findPlanted(t, o, c.promises)
			})
		}
	}
}

// findPlanted makes runs with a planted bug, until one reports a broken promise of promises. It
// fails the test if none does.
func findPlanted(t *testing.T, o options, promises []string) {
	var b strings.Builder
	for o.seed = 1; o.seed <= 20; o.seed++ {
		b.Reset()
		n := await.Value(do(t.Context(), o, &b))
		if slices.ContainsFunc(n.wrong, func(v violation) bool { return slices.Contains(promises, v.promise) }) {
			t.Log("found with seed", o.seed)
			return
		}
	}
	t.Errorf("%s: not found in 20 runs, the last of which was\n%s", o.plant, b.String())
}

func TestHistoryIsCheckedAgain(t *testing.T) {
	var file strings.Builder
	r := newRecord(options{strategy: "spinlock", history: &file})
	for i := range int64(2) {
		p := &proc{gen: int(i)}
		for _, e := range []report{{What: asks, T: 1}, {What: got, T: 100*i + 2}, {What: ended, End: 100*i + 50}, {What: freed, T: 100*i + 60}} {
			r.take(p, e)
		}
	}
	whole := file.String()
	overlap := strings.Replace(whole, `"End":50`, `"End":110`, 1)
	for text, want := range map[string]string{whole: "true <nil>", overlap: "false <nil>", whole[:len(whole)-9]: "false unexpected EOF", "": "false <nil>"} {
		kept, err := replay(strings.NewReader(text), io.Discard)
		if got := fmt.Sprint(kept, " ", err); got != want {
			t.Errorf("%s, want %s, of\n%s", got, want, text)
		}
	}
}

// history returns a run with turns of one key.
func history(all ...lockCall) *nemesis {
	r := newRecord(options{})
	for _, t := range all {
		t.proc, t.fenced = &proc{}, t.fence != 0
		t.expires = max(t.expires, t.end)
		r.turns = append(r.turns, &t)
	}
	return &nemesis{run: &run{rec: r}}
}

// broken returns the promises that are broken.
func (n *nemesis) broken() (all []string) {
	for _, v := range n.wrong {
		all = append(all, v.promise)
	}
	return all
}

func TestCheckFindsWhatIsWrong(t *testing.T) {
	sound := []lockCall{
		{asked: 1, got: 2, end: 10, fence: 1},
		{asked: 1, got: 11, end: 20},
		{asked: 3, got: 50, end: 40, fence: 2}, // ended before Lock returned
		{asked: 9, got: 41, end: 60, fence: 3, lost: 61},
		{asked: 50, got: 61, end: 70, fence: 4, killed: true},
	}
	more := func(t ...lockCall) []lockCall { return append(slices.Clone(sound), t...) }
	for name, c := range map[string]struct {
		turns    []lockCall
		promises []string
	}{
		"nothing":          {sound, nil},
		"shared":           {more(lockCall{asked: 71, got: 72, end: 80, fence: 6, shared: true}, lockCall{asked: 71, got: 73, end: 90, fence: 5, shared: true}, lockCall{asked: 74, got: 91, end: 92, fence: 7}), nil},
		"shared beside it": {more(lockCall{asked: 71, got: 72, end: 80, shared: true}, lockCall{asked: 71, got: 79, end: 90}), []string{"one at a time"}},
		"beside shared":    {more(lockCall{asked: 71, got: 72, end: 80}, lockCall{asked: 71, got: 79, end: 90, shared: true}), []string{"one at a time"}},
		"behind a short one": {more(lockCall{asked: 71, got: 72, end: 80, shared: true}, lockCall{asked: 71, got: 73, end: 75, shared: true}, lockCall{asked: 71, got: 79, end: 90}),
			[]string{"one at a time"}},
		"one fence for two":  {more(lockCall{asked: 71, got: 72, end: 80, fence: 5, shared: true}, lockCall{asked: 71, got: 72, end: 80, fence: 5, shared: true}), []string{"fence"}},
		"a reader's fence":   {more(lockCall{asked: 71, got: 72, end: 80, fence: 6, shared: true}, lockCall{asked: 73, got: 74, end: 80, fence: 5, shared: true}), []string{"fence"}},
		"two at once":        {more(lockCall{asked: 3, got: 15, end: 18}), []string{"one at a time"}},
		"fence goes back":    {more(lockCall{asked: 71, got: 72, end: 80, fence: 3}), []string{"fence"}},
		"fence stays":        {more(lockCall{asked: 71, got: 72, end: 80, fence: 4}), []string{"fence"}},
		"void out of order":  {more(lockCall{asked: 71, got: 90, end: 80, fence: 1}), []string{"fence"}},
		"lost early":         {more(lockCall{asked: 71, got: 72, end: 80, lost: 81, expires: 90}), []string{"kept until its end"}},
		"two slots":          {more(lockCall{key: slotted, asked: 71, got: 72, end: 80, fence: 5}, lockCall{key: slotted + 1, asked: 71, got: 73, end: 90, fence: 5}, lockCall{key: slotted, asked: 74, got: 81, end: 90, fence: 6}), nil},
		"three of two slots": {more(lockCall{key: slotted, asked: 71, got: 72, end: 80}, lockCall{key: slotted + 1, asked: 71, got: 73, end: 90}, lockCall{key: slotted + 2, asked: 74, got: 79, end: 90}), []string{"slots"}},
		"one slot twice":     {more(lockCall{key: slotted, asked: 71, got: 72, end: 80}, lockCall{key: slotted, asked: 71, got: 79, end: 90}), []string{"one at a time"}},
		"fence of a slot":    {more(lockCall{key: slotted + 1, asked: 71, got: 72, end: 80, fence: 9}, lockCall{key: slotted + 1, asked: 81, got: 82, end: 90, fence: 8}), []string{"fence"}},
		"refused":            {more(lockCall{asked: 71, got: 72, end: 80, fence: 5, mistaken: 79}), []string{"fence"}},
	} {
		n := history(c.turns...)
		f := n.check()
		got := n.broken()
		if !slices.Equal(got, c.promises) {
			t.Errorf("%s: found %q, want %q", name, got, c.promises)
		}
		if f.Holds != len(c.turns) || f.Void == 0 {
			t.Errorf("%s: figures %+v", name, f)
		}
	}
}

// After locks were taken away, two callers may hold a key, but fences must still grow.
func TestCheckAfterALoss(t *testing.T) {
	for name, c := range map[string]struct {
		turns    []lockCall
		overlaps int
		promises []string
	}{
		"two at once": {[]lockCall{
			{asked: 1, got: 2, end: 30, fence: 7, lost: 31, expires: 90},
			{asked: 20, got: 25, end: 40, fence: 8},
		}, 1, nil},
		"a grant that arrives late": {[]lockCall{
			{asked: 1, got: 20, end: 30, fence: 8},
			{asked: 10, got: 40, end: 50, fence: 7, lost: 51, expires: 90},
		}, 0, nil},
		"a grant that arrives while another caller holds": {[]lockCall{
			{asked: 22, got: 25, end: 30, fence: 8},
			{asked: 10, got: 28, end: 40, fence: 7, lost: 51, expires: 90},
		}, 1, nil},
		"a fence that goes back": {[]lockCall{
			{asked: 1, got: 2, end: 30, fence: 7, lost: 31, expires: 90},
			{asked: 20, got: 25, end: 40, fence: 6},
		}, 1, []string{"fence"}},
	} {
		n := history(c.turns...)
		n.losing, n.losses = true, [][2]int64{{18, 19}}
		f := n.check()
		if got := n.broken(); !slices.Equal(got, c.promises) || f.Overlaps != c.overlaps {
			t.Errorf("%s: found %q, %+v", name, got, f)
		}
	}
}

func TestResourceRefusesAnOldFence(t *testing.T) {
	r := newRecord(options{})
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
