package main

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
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

// The marks in the pages are the parts that render knows.
func TestPagesCanBeRendered(t *testing.T) {
	for _, page := range []string{"README.md", "docs/performance.md"} {
		text, err := os.ReadFile(filepath.Join("..", page))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := newResults(contestants(), "7").fill(text); err != nil {
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
