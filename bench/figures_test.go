package main

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// us is a moment, in microseconds.
func us(n int64) int64 { return n * 1000 }

func turnsAt(us3 ...[3]int64) (t turns) {
	for _, x := range us3 {
		t.Asked, t.Got, t.Freed = append(t.Asked, us(x[0])), append(t.Got, us(x[1])), append(t.Freed, us(x[2]))
	}
	return t
}

func TestWindowCountsWhatHappensInIt(t *testing.T) {
	w := window{from: us(100), to: us(1100)}
	a := turnsAt([3]int64{0, 50, 150}, [3]int64{200, 300, 400})
	b := turnsAt([3]int64{120, 170, 290}, [3]int64{1000, 1200, 1300})
	c := turns{Asked: []int64{us(90)}} // still waits at the end
	f := w.figures([]report{{Turns: []turns{a}}, {Turns: []turns{b, c}}})
	for name, want := range map[string]float64{
		"acquisitions_per_s": 2000, "changes_per_s": 2000, "holders_per_s": 2000, "between_p50_us": 10,
		"jain_callers": 2.0 / 3, "jain_processes": 1, "starved": 1, "held_percent": 27, "longest_wait_ms": 1.01, "overlaps": 0,
	} {
		if got := f[name]; math.Abs(got-want) > 1e-9 {
			t.Errorf("%s: got %v, want %v", name, got, want)
		}
	}
}

func TestTwoHoldersAtOnceAreFound(t *testing.T) {
	w := window{from: 0, to: us(1000)}
	reports := []report{{Turns: []turns{turnsAt([3]int64{1, 2, 10})}}, {Turns: []turns{turnsAt([3]int64{1, 9, 12})}}}
	b := &bench{results: newResults(nil, "")}
	if f := w.figures(reports); f["overlaps"] != 1 {
		t.Errorf("got %v", f["overlaps"])
	}
	if _, err := b.judge(contestant{group: ours}, section{}, w.figures(reports), reports); !errors.Is(err, errWrong) {
		t.Errorf("the run goes on after an overlap of hasp: %v", err)
	}
	if _, err := b.judge(contestant{group: theirs}, section{}, w.figures(reports), reports); err != nil || len(b.results.Notes) != 1 {
		t.Errorf("an overlap of a peer: %v, notes %q", err, b.results.Notes)
	}
}

func TestMedian(t *testing.T) {
	r := newResults(nil, "")
	for _, v := range []float64{3, 1, math.NaN(), 2, math.Inf(1), 4} {
		r.add("a", figures{"m": v})
	}
	if got := r.median("a", "m"); got != 2.5 {
		t.Errorf("got %v", got)
	}
	if got := r.median("a", "other"); !math.IsNaN(got) {
		t.Errorf("without figures: got %v", got)
	}
}

func TestPercentileIsByNearestRank(t *testing.T) {
	times := []time.Duration{4000, 2000, 3000, 1000}
	for p, want := range map[int]float64{1: 1, 50: 2, 75: 3, 76: 4, 100: 4} {
		if got := percentile(times, p); got != want {
			t.Errorf("%d: got %v, want %v", p, got, want)
		}
	}
}

func TestNumbers(t *testing.T) {
	for f, want := range map[float64]string{0: "0", 0.123: "0.12", 12.34: "12.3", 1234567.8: "1,234,568", 999: "999", -1000: "-1,000", -999: "-999", math.Inf(1): "∞", 8: "8"} {
		if got := number(f); got != want {
			t.Errorf("%v: got %s, want %s", f, got, want)
		}
	}
}

func TestListNamesWhereHaspIsBehind(t *testing.T) {
	p := plan{distinct: []distinct{{goroutines: 7}, {goroutines: 64}}}
	r := newResults([]contestant{{name: "h", group: ours, nodes: 1}, {name: "p", group: theirs, nodes: 1}, {name: "q", group: theirs}}, "")
	for name, f := range map[string]figures{
		"h": {"pairs_per_s": 50, "allocs_per_pair": 10}, "p": {"pairs_per_s": 100, "allocs_per_pair": 20}, "q": {"pairs_per_s": 70, "allocs_per_pair": 30},
	} {
		r.add(callers(7).cell(name), f)
		r.add(callers(64).cell(name), f)
	}
	if got, want := r.behindList(p), "- pairs/s, 7, 64 goroutines (p, 2×)\n- nothing else of these\n"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestFaultsOfPeersAndSlownessDoNotEndTheRun(t *testing.T) {
	broken := errors.New("broken")
	for _, x := range []struct {
		group string
		err   error
		fails bool
	}{
		{ours, broken, true},
		{bare, broken, true},
		{theirs, broken, false},
		{ours, context.DeadlineExceeded, false},
	} {
		c := contestant{name: "c", group: x.group, open: func(context.Context, stores, time.Duration) (locker, error) { return nil, x.err }}
		b := &bench{plan: plan{rounds: 1, distinct: []distinct{{goroutines: 1, times: 1}}}, all: []contestant{c}, results: newResults(nil, ""), began: time.Now()}
		err := b.round(t.Context(), 0, uncontended, time.Now().Add(time.Hour))
		if (err != nil) != x.fails {
			t.Errorf("%s, %v: got %v", x.group, x.err, err)
		}
	}
}

func TestAtTheLimitTurnsAreLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, errTime)
		defer cancel()
		forever := make(chan struct{})
		defer close(forever)
		began := time.Now()
		_, err := turn{do: func(context.Context) (figures, error) { <-forever; return nil, nil }}.within(ctx)
		if err != errTime || time.Since(began) != time.Minute+grace {
			t.Errorf("got %v after %v", err, time.Since(began))
		}
	})
}

func TestResultsCanBeReadAgain(t *testing.T) {
	p := planOf(true)
	r := newResults(contestants(), "7")
	r.Quick, r.Skipped, r.Notes = true, []string{"much"}, []string{"a note"}
	for _, v := range []float64{3, 1, math.Inf(1)} {
		r.add(section{uncontended, p.distinct[0].String()}.cell("hasp-spinlock"), figures{"pairs_per_s": v})
	}
	dir := t.TempDir()
	if err := r.write(dir); err != nil {
		t.Fatal(err)
	}
	again, err := readResults(filepath.Join(dir, "results.json"))
	if err != nil {
		t.Fatal(err)
	}
	if is, was := string(again.page()), string(r.page()); is != was || !strings.Contains(is, "- a note\n") {
		t.Errorf("got %s, want %s", is, was)
	}
}

func TestPagesAreFilledBetweenMarks(t *testing.T) {
	r := newResults(contestants(), "7")
	r.add(callers(64).cell("etcd"), figures{"pairs_per_s": 1})
	page := "a\n<!-- bench: run -->\nold\n<!-- /bench -->\nb\n"
	got, err := r.fill([]byte(page))
	if err != nil {
		t.Fatal(err)
	}
	again, err := r.fill(got)
	if err != nil || string(again) != string(got) {
		t.Errorf("got %q, %v, want %q", again, err, got)
	}
	if s := string(got); strings.Contains(s, "old") || !strings.HasPrefix(s, "a\n") || !strings.HasSuffix(s, "\nb\n") || !strings.Contains(s, "Redis 7") {
		t.Errorf("got %q", s)
	}
	if _, err := r.fill([]byte(strings.ReplaceAll(page, "run", "other"))); err == nil {
		t.Error("an unknown part is no error")
	}
}

// A run has figures of growth, or of the other scenarios. The parts of the others stay.
func TestARunFillsOnlyWhatItMeasured(t *testing.T) {
	p := planOf(false)
	page := []byte("<!-- bench: free -->\nold1\n<!-- /bench -->\n<!-- bench: growth-nodes -->\nold2\n<!-- /bench -->\n")
	for _, x := range []struct {
		in    section
		stays []string
	}{
		{callers(64), []string{"old2"}},
		{section{growth, p.growth.nodes[2].String()}, []string{"old1"}},
		{section{}, []string{"old1", "old2"}},
	} {
		r := newResults(contestants(), "7")
		if x.in.scenario != "" {
			r.add(x.in.cell("hasp-redlock"), figures{"p50_us": 123, "pairs_per_s": 456})
		}
		got, err := r.fill(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, old := range []string{"old1", "old2"} {
			if is, want := strings.Contains(string(got), old), slices.Contains(x.stays, old); is != want {
				t.Errorf("%v: %s stays: %v, want %v:\n%s", x.in, old, is, want, got)
			}
		}
	}
}

func TestFiguresAreReadFromThePage(t *testing.T) {
	page := []byte(`<!-- bench: free -->
|  | 1 | server CPU µs |
| --- | --: | --: |
| x | 5 (1×) | 1 |
| y | 1,234.5 (2×) | – |
<!-- /bench -->
<!-- bench: other -->
|  | 1 |
| --- | --: |
| y | 7 |
<!-- /bench -->
`)
	for _, x := range []struct {
		part, row, column string
		want              float64
	}{
		{"free", "x", "1", 5}, {"free", "y", "1", 1234.5}, {"free", "x", "server CPU µs", 1}, {"other", "y", "1", 7},
		{"free", "y", "server CPU µs", math.NaN()}, {"free", "z", "1", math.NaN()}, {"free", "x", "2", math.NaN()}, {"none", "x", "1", math.NaN()},
	} {
		got := onPage(page, x.part, x.row, x.column)
		if got != x.want && !(math.IsNaN(got) && math.IsNaN(x.want)) {
			t.Errorf("%s, %s, %s: got %v, want %v", x.part, x.row, x.column, got, x.want)
		}
	}
}

func TestRounded(t *testing.T) {
	for f, want := range map[float64]float64{0: 0, 0.123: 0.123, 999.5: 999.5, 1234: 1230, 257_732: 258_000, 999_600: 1_000_000} {
		if got := rounded(f); got != want {
			t.Errorf("%v: got %v, want %v", f, got, want)
		}
	}
	if got := rounded(math.NaN()); !math.IsNaN(got) {
		t.Errorf("got %v", got)
	}
}

// The table of what systems bear finds the rows and columns that it names.
func TestScaleFindsItsFigures(t *testing.T) {
	page, err := os.ReadFile("../docs/performance.md")
	if err != nil {
		t.Fatal(err)
	}
	want := func(part, row, column string) {
		if math.IsNaN(onPage(page, part, row, column)) {
			t.Errorf("%s has no %s of %s", part, column, row)
		}
	}
	for _, s := range systems {
		want(s.pairs, s.contestant, "server CPU µs")
		want(s.pairs, s.contestant, "client CPU µs")
		want(s.part, s.contestant+", "+s.lease, "client bytes/lease")
		want("contended64", s.contestant, "acquisitions/s")
		if s.part == "growth-keys" {
			want(s.part, s.contestant+", "+s.lease, "server CPU µs/renewal")
			want(s.part, s.contestant+", "+s.lease, "server bytes/lease")
		}
	}
	for _, name := range []string{"hasp-spinlock", "hasp-fairlock"} {
		want("growth-waiters", name+", 10,000 in 1 process", "client bytes/waiter")
		want("growth-waiters", name+", 10,000 in 1 process", "server bytes/waiter")
	}
}

// The marks in the pages are the parts that render knows.
func TestPagesCanBeRendered(t *testing.T) {
	for _, page := range []string{"README.md", "docs/performance.md"} {
		text, err := os.ReadFile(filepath.Join("..", page))
		if err != nil {
			t.Fatal(err)
		}
		r := newResults(contestants(), "7")
		r.add(callers(64).cell("etcd"), figures{"pairs_per_s": 1})
		r.add(section{growth, "5 nodes"}.cell("hasp-redlock"), figures{"p50_us": 1})
		if _, err := r.fill(text); err != nil {
			t.Errorf("%s: %v", page, err)
		}
	}
}

func TestPictureHasLinesAndBars(t *testing.T) {
	p := planOf(false)
	r := newResults(contestants(), "7")
	for i, d := range p.distinct {
		r.add(callers(d.goroutines).cell("redsync"), figures{"pairs_per_s": float64(10 * (i + 1))})
	}
	r.add(queue(64).cell("hasp-fairlock"), figures{"acquisitions_per_s": 5000, "holders_per_s": 4000})
	text := string(r.picture(p))
	for _, want := range []string{"<svg", ">redsync<", ">hasp-fairlock<", ">1,024<", "<rect x=", "</svg>"} {
		if !strings.Contains(text, want) {
			t.Errorf("the picture has no %s", want)
		}
	}
	if strings.Contains(text, "NaN") || strings.Contains(text, "Inf") {
		t.Error("the picture has coordinates that are not numbers")
	}
}

func TestPictureOfGrowthHasLines(t *testing.T) {
	p := planOf(false)
	r := newResults(contestants(), "7")
	for _, n := range p.growth.nodes {
		r.add(section{growth, n.String()}.cell("hasp-redlock"), figures{"client_us_per_pair": 100 * float64(n), "server_us_per_pair": 50})
	}
	text := string(r.growthPicture(p))
	for _, want := range []string{"<svg", ">hasp-redlock<", ">1,000,000<", ">10,000<", ">64<", ">15<", "</svg>"} {
		if !strings.Contains(text, want) {
			t.Errorf("the picture has no %s", want)
		}
	}
	if strings.Contains(text, "NaN") || strings.Contains(text, "Inf") || strings.Count(text, `stroke-width="3"`) != 2 {
		t.Errorf("the picture is wrong: %s", text)
	}
}
