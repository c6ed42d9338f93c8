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

	"github.com/redis/go-redis/v9/logging"

	"github.com/hasplock/hasp/internal/await"
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
	for _, c := range []struct {
		bug, faults string
		patience    time.Duration
		promises    []string
	}{
		{"release", "holder stopped", patience, []string{"one at a time", "kept until its end"}},
		{"wake-up", "waiter killed", 3 * time.Second, []string{"stood still"}},
	} {
		for _, strategy := range strategies[:5] {
			t.Run(c.bug+" "+strategy, func(t *testing.T) {
				t.Parallel()
				o := options{strategy: strategy, place: onServer, nodes: leastNodes, time: 2 * time.Second, term: term,
					patience: c.patience, plant: c.bug, only: regexp.MustCompile(c.faults)}
				var b strings.Builder
				for o.seed = 1; o.seed <= 20; o.seed++ {
					b.Reset()
					r := await.Value(o.do(t.Context(), &b))
					if slices.ContainsFunc(r.wrong, func(v violation) bool { return slices.Contains(c.promises, v.promise) }) {
						t.Log("found with seed", o.seed)
						return
					}
				}
				t.Errorf("not found in 20 runs, the last of which was\n%s", b.String())
			})
		}
	}
}

func TestHistoryIsCheckedAgain(t *testing.T) {
	var file strings.Builder
	r := newRecord("spinlock", false, &file)
	for i := range int64(2) {
		for _, e := range []report{{What: asks, T: 1}, {What: got, T: 100*i + 2}, {What: ended, End: 100*i + 50}, {What: freed, T: 100*i + 60}} {
			r.take(fmt.Sprint("client ", i), e)
		}
	}
	whole := file.String()
	overlap := strings.Replace(whole, `"End":50`, `"End":110`, 1)
	for text, want := range map[string]string{
		whole: "true <nil>", overlap: "false <nil>", whole[:len(whole)-9]: "false unexpected EOF", "": "false <nil>",
	} {
		sound, err := replay(strings.NewReader(text), io.Discard)
		if got := fmt.Sprint(sound, " ", err); got != want {
			t.Errorf("%s, want %s, of\n%s", got, want, text)
		}
	}
}

// A check finds what is wrong. After locks were taken away, two callers may hold a key, but fences
// must still grow.
func TestCheckFindsWhatIsWrong(t *testing.T) {
	sound := []lockCall{
		{asked: 1, got: 2, end: 10, fence: 1},
		{asked: 1, got: 11, end: 20},
		{asked: 3, got: 50, end: 40, fence: 2}, // ended before Lock returned
		{asked: 9, got: 41, end: 60, fence: 3, lost: 61},
		{asked: 50, got: 61, end: 70, fence: 4, killed: true},
	}
	lost := lockCall{asked: 81, got: 82, end: 110, fence: 7, lost: 111, expires: 190}
	for name, c := range map[string]struct {
		more     []lockCall
		promises []string
		overlaps int
	}{
		"nothing":            {},
		"one fence for two":  {more: []lockCall{{asked: 71, got: 72, end: 72, fence: 5}, {asked: 71, got: 72, end: 80, fence: 5}}, promises: []string{"fence"}},
		"two at once":        {more: []lockCall{{asked: 3, got: 15, end: 18}}, promises: []string{"one at a time"}},
		"behind a short one": {more: []lockCall{{asked: 3, got: 12, end: 13}, {asked: 3, got: 15, end: 18}}, promises: []string{"one at a time", "one at a time"}},
		"fence goes back":    {more: []lockCall{{asked: 71, got: 72, end: 80, fence: 3}}, promises: []string{"fence"}},
		"fence of a waiter":  {more: []lockCall{{asked: 30, got: 72, end: 80, fence: 3}}, promises: []string{"fence", "fence"}},
		"fence stays":        {more: []lockCall{{asked: 71, got: 72, end: 80, fence: 4}}, promises: []string{"fence"}},
		"void out of order":  {more: []lockCall{{asked: 71, got: 90, end: 80, fence: 1}}, promises: []string{"fence"}},
		"lost early":         {more: []lockCall{{asked: 71, got: 72, end: 80, lost: 81, expires: 90}}, promises: []string{"kept until its end"}},
		"refused":            {more: []lockCall{{asked: 71, got: 72, end: 80, fence: 5, mistaken: 79}}, promises: []string{"fence"}},

		// The store loses locks at 98.
		"two at once after a loss": {more: []lockCall{lost, {asked: 100, got: 105, end: 120, fence: 8}}, overlaps: 1},
		"a grant that arrives late": {more: []lockCall{{asked: 81, got: 100, end: 110, fence: 8},
			{asked: 90, got: 120, end: 130, fence: 7, lost: 131, expires: 170}}},
		"a grant that arrives while another caller holds": {more: []lockCall{{asked: 102, got: 105, end: 110, fence: 8},
			{asked: 90, got: 108, end: 120, fence: 7, lost: 131, expires: 170}}, overlaps: 1},
		"a fence that goes back after a loss": {more: []lockCall{lost, {asked: 100, got: 105, end: 120, fence: 6}},
			promises: []string{"fence"}, overlaps: 1},
	} {
		r := newRecord("", strings.Contains(name, "loss") || strings.Contains(name, "arrives"), nil)
		if r.losing {
			r.losses = [][2]int64{{98, 99}}
		}
		for _, t := range slices.Concat(sound, c.more) {
			t.fenced = t.fence != 0
			t.expires = max(t.expires, t.end)
			r.turns = append(r.turns, &t)
		}
		f := r.check()
		var promises []string
		for _, v := range f.wrong {
			promises = append(promises, v.promise)
		}
		if !slices.Equal(promises, c.promises) || f.Overlaps != c.overlaps || f.Void == 0 {
			t.Errorf("%s: found %+v, want %q and %d overlaps", name, f, c.promises, c.overlaps)
		}
	}
}

func TestResourceRefusesAnOldFence(t *testing.T) {
	r := newRecord("", false, nil)
	for id, fence := range []uint64{5, 6, 0} {
		r.take("", report{What: asks, ID: int64(id), T: 1, Fenced: fence > 0})
		r.take("", report{What: got, ID: int64(id), T: 2, Fence: fence})
	}
	for i, c := range []struct {
		id, refused int
	}{{0, 0}, {1, 0}, {0, 1}, {1, 1}, {2, 1}} {
		if r.take("", report{What: touch, ID: int64(c.id)}); r.refused != c.refused {
			t.Errorf("use %d: %d refused, want %d", i, r.refused, c.refused)
		}
	}
}
