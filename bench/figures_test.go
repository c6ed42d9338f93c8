package main

import (
	"math"
	"strings"
	"testing"
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
	if _, err := b.judge(contestant{group: ours}, f, reports); err == nil {
		t.Error("hasp may do that")
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
