package results

import (
	"math"
	"strings"
	"testing"
	"time"
)

func TestPercentile(t *testing.T) {
	us := time.Microsecond
	all := []time.Duration{1 * us, 2 * us, 3 * us, 4 * us}
	for p, want := range map[int]float64{50: 2, 75: 3, 99: 4, 100: 4} {
		if got := Percentile(all, p); got != want {
			t.Errorf("p%d: %v, want %v", p, got, want)
		}
	}
	if got := Percentile(nil, 50); !math.IsNaN(got) {
		t.Errorf("of none: %v", got)
	}
}

func TestGoals(t *testing.T) {
	var g Goals
	g.AtMost(1.5, 1.2, "2 waiters", "ratio")
	g.AtMost(1.5, 1.4, "64 waiters", "ratio")
	g.AtMost(1.5, 1.3, "512 waiters", "ratio")
	g.AtMost(3, 3.5, "2 waiters", "scripts")
	g.AtMost(0, 2, "one down", "orphan keys")
	g.AtMost(2.5, math.NaN(), "2 waiters", "nothing")
	var b strings.Builder
	g.Print(&b)
	for _, want := range []string{
		"| ratio | 1.50 | 1.40 | 64 waiters | yes |",
		"| scripts | 3 | 3.50 | 2 waiters | **no** |",
		"| orphan keys | 0 | 2 | one down | **no** |",
		"| nothing | 2.50 | – | 2 waiters | **no** |",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in:\n%s", want, b.String())
		}
	}
}
