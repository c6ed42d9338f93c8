package main

import "testing"

// Some seeds of each kind of store. go run ./internal/simulate runs more.
func TestSeeds(t *testing.T) {
	for _, kind := range names() {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			seeds := uint64(8)
			if kind == "polled" || kind == "waiter" {
				seeds = 300
			}
			if kind == "leader" {
				seeds = 6
			}
			if kind == "redlock3" || kind == "redlock5" {
				seeds = 4
			}
			if testing.Short() || raceEnabled {
				seeds /= 4
			}
			granted := 0
			for seed := uint64(1); seed <= seeds && !t.Failed(); seed++ {
				granted += simulate(t, kind, seed)
			}
			if granted < int(seeds) {
				t.Errorf("%d holds in %d seeds: the simulation stands still", granted, seeds)
			}
		})
	}
}
