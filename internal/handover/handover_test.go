package main

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/redistest"
)

func TestMain(m *testing.M) {
	if os.Getenv(role) != "" {
		work(os.Stdin, os.Stdout)
	}
	os.Exit(m.Run())
}

// TestQuick sees that every caller had the key and no two at once, which the
// measurement itself checks, and that everything is told. Figures are not for
// tests.
func TestQuick(t *testing.T) {
	o := small()
	o.redis = redistest.Start(t, nil).URL()
	var b strings.Builder
	if err := measure(t.Context(), o, &b); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + b.String())
	for _, s := range append(slices.Clone(o.strategies), bare) {
		want := len(o.waiters)
		if s != bare {
			want++ // the shares
		}
		if s == "fairlock" {
			want++ // the dead
		}
		if n := strings.Count(b.String(), "\n| "+s+" |"); n != want {
			t.Errorf("%s has %d rows, want %d", s, n, want)
		}
	}
}

// In an ordered strategy all who wait at the beginning have had the key before
// anybody has it again.
func TestRaceBeginsInOrder(t *testing.T) {
	o := small()
	o.redis = redistest.Start(t, nil).URL()
	m, err := prepare(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer m.close()
	for _, s := range o.strategies {
		if !m.ordered[s] {
			continue
		}
		r, err := m.race(t.Context(), s, 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		if n := len(shares(r.holds[:16])); n != 16 {
			t.Errorf("%s: %d of 16 waiters had the first 16 turns", s, n)
		}
	}
}

func TestChecksFindWhatIsWrong(t *testing.T) {
	sound := []hold{{0, 0, 1, 2, 5}, {1, 0, 2, 6, 8}, {0, 1, 3, 8, 9}}
	if err := check(sound, "it", 3); err != nil {
		t.Error(err)
	}
	if err := check(sound, "it", 4); err == nil {
		t.Error("one of 4 never had the key, and that is no error")
	}
	if err := check([]hold{{0, 0, 1, 2, 5}, {1, 0, 2, 4, 8}}, "it", 2); err == nil {
		t.Error("two had the key at once, and that is no error")
	}
}

func TestHandovers(t *testing.T) {
	r := round{from: 10, to: 100, holds: []hold{
		{Process: 0, Asked: 0, Got: 1, Freed: 5},
		{Process: 1, Asked: 0, Got: 9, Freed: 20},                // before it counts
		{Process: 2, Asked: 3, Got: 27, Freed: 30},               // across: 7
		{Process: 2, Waiter: 1, Asked: 4, Got: 33, Freed: 40},    // within: 3
		{Process: 0, Asked: 41, Got: 50, Freed: 60},              // nobody waited
		{Process: 1, Asked: 50, Got: 62, Freed: 99},              // across: 2
		{Process: 2, Waiter: 1, Asked: 50, Got: 101, Freed: 110}, // after
	}}
	across, all := r.handovers()
	if want := []time.Duration{2, 7}; !slices.Equal(across, want) {
		t.Errorf("between processes %v, want %v", across, want)
	}
	if want := []time.Duration{2, 3, 7}; !slices.Equal(all, want) {
		t.Errorf("all %v, want %v", all, want)
	}
	if n := r.counted(); n != 4 {
		t.Errorf("%d holds counted, want 4", n)
	}
}
