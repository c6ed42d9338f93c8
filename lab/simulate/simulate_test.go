package main

import "testing"

// Some seeds of each kind of store. go run ./simulate runs more.
func TestSeeds(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.Name, func(t *testing.T) {
			t.Parallel()
			seeds := uint64(8)
			switch kind.Name {
			case "polled", "waiter":
				seeds = 300
			case "redlock3", "redlock5":
				seeds = 4
			}
			if testing.Short() {
				seeds /= 4
			}
			granted := 0
			for seed := uint64(1); seed <= seeds && !t.Failed(); seed++ {
				granted += run(t, kind, seed, sound, nil)
			}
			if granted < int(seeds) {
				t.Errorf("%d holds in %d seeds: the simulation stands still", granted, seeds)
			}
		})
	}
}
