package main

import (
	"maps"
	"os"
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
				o := options{strategy: strategy, place: onServer, nodes: 3,
					time: 2 * time.Second, patience: c.patience, plant: c.bug, only: c.faults}
				var b strings.Builder
				for o.seed = 1; o.seed <= 20; o.seed++ {
					b.Reset()
					r := await.Value(o.do(t.Context(), &b))
					if slices.ContainsFunc(r.wrong, func(v violation) bool {
						return slices.Contains(c.promises, v.promise)
					}) {
						t.Log("found with seed", o.seed)
						return
					}
				}
				t.Errorf("not found in 20 runs, the last of which was\n%s", b.String())
			})
		}
	}
}

// A process that is killed ends its turns. Its lease ends at the kill, or with its term before.
func TestKillEndsTurns(t *testing.T) {
	r := newRecord("", nil)
	take := func(client string, t turn) { r.take(entry{Client: client, report: report{Turn: &t}}) }
	take("ended", turn{Asked: 1, Got: 2})
	take("ended", turn{Asked: 1, Got: 2, End: 50})
	take("refused", turn{Asked: 1})
	take("refused", turn{Asked: 1, Got: 3, Refused: true})
	for client, expires := range map[string]int64{"waits": 0, "expired": 140, "holds": 200} {
		take(client, turn{Asked: 1})
		take(client, turn{Asked: 1, Got: expires / 2, Expires: expires})
		r.die(client, 150)
	}

	ends := map[string]int64{}
	for id, turn := range r.turns {
		ends[id.client] = turn.End
	}
	want := map[string]int64{"ended": 50, "expired": 140, "holds": 150}
	if !maps.Equal(ends, want) || len(r.open) > 0 {
		t.Errorf("turns end at %v, want %v, and open are %v", ends, want, r.open)
	}
}

// A check finds what is wrong. After locks were taken away, two callers may hold a key, but fences
// must still grow.
func TestCheckFindsWhatIsWrong(t *testing.T) {
	type turns = []turn
	sound := turns{
		{Asked: 1, Got: 2, End: 10, Fence: 1},
		{Asked: 1, Got: 11, End: 20},
		{Asked: 3, Got: 50, End: 40, Fence: 2}, // ended before Lock returned
		{Asked: 9, Got: 41, End: 60, Fence: 3, Lost: 61},
		{Asked: 50, Got: 61, End: 70, Fence: 4, Used: [2]int64{62, 74}},
	}
	const order, early, alone = "fence", "kept until its end", "one at a time"
	lost := turn{Asked: 81, Got: 82, End: 110, Fence: 7, Lost: 111, Expires: 190}
	after := turn{Asked: 102, Got: 105, End: 110, Fence: 8}
	for name, c := range map[string]struct {
		more     turns
		broken   string // the promises
		overlaps int
		refused  int
	}{
		"nothing":     {},
		"two at once": {more: turns{{Asked: 3, Got: 15, End: 18}}, broken: alone},
		"behind a short one": {more: turns{{Asked: 3, Got: 12, End: 13},
			{Asked: 3, Got: 15, End: 18}}, broken: alone + alone},
		"fence goes back": {more: turns{{Asked: 71, Got: 72, End: 80, Fence: 3}},
			broken: order},
		"fence of a waiter": {more: turns{{Asked: 30, Got: 72, End: 80, Fence: 3}},
			broken: order},
		"fence stays": {more: turns{{Asked: 71, Got: 72, End: 80, Fence: 4}},
			broken: order},
		"void out of order": {more: turns{{Asked: 71, Got: 90, End: 80, Fence: 1}},
			broken: order},
		"lost early": {more: turns{{Asked: 71, Got: 72, End: 80, Lost: 81, Expires: 90}},
			broken: early},
		"late write": {more: turns{{Asked: 71, Got: 72, End: 80, Fence: 5,
			Used: [2]int64{73, 79}}}, refused: 1},
		"refused": {more: turns{{Asked: 21, Got: 22, End: 40, Fence: 2, Used: [2]int64{63, 63}},
			{Asked: 71, Got: 72, End: 80, Fence: 3, Used: [2]int64{79, 79}}},
			broken: order + order, refused: 2},

		// The store loses locks at 98.
		"two at once after a loss": {more: turns{lost, after}, overlaps: 1},
		"a use after a loss": {more: turns{{Asked: 81, Got: 82, End: 110, Fence: 7,
			Used: [2]int64{107, 107}},
			{Asked: 100, Got: 105, End: 108, Fence: 8, Used: [2]int64{106, 106}}},
			overlaps: 1, refused: 1},
		"a grant that arrives late": {more: turns{{Asked: 81, Got: 100, End: 110, Fence: 8},
			{Asked: 90, Got: 120, End: 130, Fence: 7, Lost: 131, Expires: 170}}},
		"a grant that arrives while another caller holds": {more: turns{after,
			{Asked: 90, Got: 108, End: 120, Fence: 7, Lost: 131, Expires: 170}}, overlaps: 1},
		"a fence that goes back after a loss": {more: turns{lost,
			{Asked: 100, Got: 105, End: 120, Fence: 6}}, broken: order, overlaps: 1},
		"two at once long after a loss": {more: turns{{Asked: 101, Got: 102, End: 120, Fence: 8},
			{Asked: 103, Got: 105, End: 110, Fence: 9}}, broken: alone},

		// A minority loses locks at 150.
		"lost early with a minority": {more: turns{{Asked: 140, Got: 141, End: 155, Lost: 156,
			Expires: 190}}},
		"two at once with a minority": {more: turns{{Asked: 140, Got: 141, End: 160},
			{Asked: 145, Got: 155, End: 170}}, broken: alone},
	} {
		r := newRecord("", nil)
		r.take(entry{Span: &span{98, 99, locks}})
		r.take(entry{Span: &span{150, 151, minority}})
		for i, t := range slices.Concat(sound, c.more) {
			t.ID = int64(i)
			t.Fenced = t.Fence != 0
			t.Expires = max(t.Expires, t.End)
			r.take(entry{report: report{Turn: &t}})
		}
		f := r.check()
		broken := ""
		for _, v := range f.wrong {
			broken += v.promise
		}
		if broken != c.broken || f.overlaps != c.overlaps ||
			f.refused != c.refused || f.void == 0 {
			t.Errorf("%s: found %+v, want %+v", name, f, c)
		}
	}
}

// A process whose use grows for the whole run is found, and so are goroutines and descriptors that
// stay.
func TestLeftoversAreFound(t *testing.T) {
	for i, slack := range growth {
		samples := make([]use, enough)
		if text := leftovers(samples, use{1, 1, 1}, use{2, 1, 1}); text != "" {
			t.Errorf("leftovers of nothing: %s", text)
		}
		for n := range samples {
			samples[n][i] = n * slack
		}
		var after use
		after[i] = 1
		if leftovers(samples, use{}, use{}) == "" || i > 0 && leftovers(nil, use{}, after) == "" {
			t.Errorf("leftovers of number %d were not found", i)
		}
	}
}
