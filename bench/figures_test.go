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
	c := turns{Asked: []int64{us(90)}} // waits in vain
	f := w.look([]report{{Turns: []turns{a}}, {Turns: []turns{b, c}}})
	for name, want := range map[string]float64{
		"acquisitions_per_s": 2000, "changes_per_s": 2000, "holders_per_s": 2000,
		"handover_p50_us": 10, "handover_p99_us": 20, "between_p50_us": 10,
		"share_least": 0, "share_most": 1, "share_none": 1, "longest_wait_ms": 1.01, "overlaps": 0,
	} {
		if got := f[name]; math.Abs(got-want) > 1e-9 {
			t.Errorf("%s: got %v, want %v", name, got, want)
		}
	}
}

func TestTwoAtOnceAreSeen(t *testing.T) {
	w := window{from: 0, to: us(1000)}
	reports := []report{{Turns: []turns{turnsAt([3]int64{1, 2, 10})}}, {Turns: []turns{turnsAt([3]int64{1, 9, 12})}}}
	f := w.look(reports)
	if f["overlaps"] != 1 {
		t.Errorf("got %v", f["overlaps"])
	}
	b := &bench{}
	if _, err := b.judge(contestant{group: ours}, f, reports); !errors.Is(err, errWrong) {
		t.Errorf("hasp may do that: %v", err)
	}
	if _, err := b.judge(contestant{group: theirs}, f, reports); err != nil {
		t.Errorf("a peer ends the run: %v", err)
	}
}

func TestMedianAndSpread(t *testing.T) {
	r := newResults(nil, "", "")
	k := cell{"s", "1", "a"}
	for _, v := range []float64{3, 1, math.NaN(), 2, math.Inf(1)} {
		r.add(k, figures{"m": v})
	}
	if f, ok := r.figure(k, "m"); !ok || f.Median != 2.5 || f.Min != 1 || !math.IsInf(f.Max, 1) || f.Samples != 4 {
		t.Errorf("got %+v", f)
	}
	if _, ok := r.figure(k, "other"); ok {
		t.Error("a figure of nothing")
	}
}

func TestPercentileIsByNearestRank(t *testing.T) {
	times := []time.Duration{1000, 2000, 3000, 4000}
	for p, want := range map[int]float64{1: 1, 50: 2, 75: 3, 76: 4, 100: 4} {
		if got := percentile(times, p); got != want {
			t.Errorf("%d: got %v, want %v", p, got, want)
		}
	}
}

func TestNumbers(t *testing.T) {
	for f, want := range map[float64]string{0: "0", 0.123: "0.12", 12.34: "12.3", 1234567.8: "1,234,568", 999: "999", math.Inf(1): "∞", 8: "8"} {
		if got := number(f); got != want {
			t.Errorf("%v: got %s, want %s", f, got, want)
		}
	}
}

func TestSummaryNamesWhereHaspIsBehind(t *testing.T) {
	p := plan{distinct: []distinct{{goroutines: 7}}}
	r := newResults([]contestant{{name: "h", group: ours, nodes: 1}, {name: "p", group: theirs, nodes: 1}, {name: "q", group: theirs}}, "", "")
	for name, f := range map[string]figures{
		"h": {"pairs_per_s": 50, "p99_us": 10}, "p": {"pairs_per_s": 100, "p99_us": 20}, "q": {"pairs_per_s": 70, "p99_us": 30},
	} {
		r.add(cell{uncontended, "7 goroutines", name}, f)
	}
	var out strings.Builder
	r.writeSummary(&out, p)
	lost, _, _ := strings.Cut(out.String(), "## all")
	if !strings.Contains(lost, "| pairs/s | h | 50 | p | 100 | **0.50×** |") || strings.Contains(lost, "p99") {
		t.Errorf("got %s", lost)
	}
	if !strings.Contains(out.String(), "| p99 µs | h | 10 | p | 20 | 2× |") {
		t.Errorf("got %s", out.String())
	}
}

func TestWhatPeersAndSlownessDoEndsNoRun(t *testing.T) {
	broken := errors.New("broken")
	for _, x := range []struct {
		group string
		err   error
		fails bool
	}{
		{ours, broken, true},
		{limit, broken, true},
		{theirs, broken, false},
		{ours, context.DeadlineExceeded, false},
	} {
		c := contestant{name: "c", group: x.group, open: func(context.Context, stores, time.Duration) (locker, error) { return nil, x.err }}
		b := &bench{plan: plan{rounds: 1, distinct: []distinct{{goroutines: 1, times: 1}}}, all: []contestant{c}, results: newResults(nil, "", ""), began: time.Now()}
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
	p := quick()
	k := cell{uncontended, p.distinct[0].String(), "hasp-spinlock"}
	r := newResults(contestants(), "7", "go run .")
	r.notes[cell{leases, p.crowds[0].String(), "etcd"}] = "none"
	r.Skipped = []string{"much"}
	for _, v := range []float64{3, 1, math.Inf(1)} {
		r.add(k, figures{"pairs_per_s": v})
	}
	path := filepath.Join(t.TempDir(), "results.json")
	if err := r.writeJSON(path, p); err != nil {
		t.Fatal(err)
	}
	again, p, err := readJSON(path)
	if err != nil {
		t.Fatal(err)
	}
	var was, is strings.Builder
	r.writeMarkdown(&was, quick())
	again.writeMarkdown(&is, p)
	if is.String() != was.String() {
		t.Errorf("got %s, want %s", is.String(), was.String())
	}
}

func TestPagesAreFilledBetweenMarks(t *testing.T) {
	r := newResults(contestants(), "7", "go run .")
	page := "a\n<!-- bench: run -->\nold\n<!-- /bench -->\nb\n"
	got, err := r.fill([]byte(page), quick())
	if err != nil {
		t.Fatal(err)
	}
	again, err := r.fill(got, quick())
	if err != nil || string(again) != string(got) {
		t.Errorf("got %q, %v, want %q", again, err, got)
	}
	if s := string(got); strings.Contains(s, "old") || !strings.HasPrefix(s, "a\n") || !strings.HasSuffix(s, "\nb\n") || !strings.Contains(s, "Redis 7") {
		t.Errorf("got %q", s)
	}
	if _, err := r.fill([]byte(strings.ReplaceAll(page, "run", "other")), quick()); err == nil {
		t.Error("a part that nobody knows")
	}
}

func TestThePictureHasWhatItIsAbout(t *testing.T) {
	p := full()
	r := newResults(contestants(), "7", "go run .")
	for i, d := range p.distinct {
		r.add(cell{uncontended, d.String(), "redsync"}, figures{"pairs_per_s": float64(10 * (i + 1))})
	}
	r.add(cell{contended, queue(64).setting, "hasp-fairlock"}, figures{"acquisitions_per_s": 5000, "holders_per_s": 4000})
	path := filepath.Join(t.TempDir(), "fast.svg")
	if err := r.headline(p, path); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"<svg", ">redsync<", ">hasp-fairlock<", ">1,024<", "</svg>"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the picture has no %s", want)
		}
	}
}
