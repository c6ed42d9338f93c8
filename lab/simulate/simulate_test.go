package main

import (
	"testing"

	"github.com/hasplock/hasp/lab/simulate/world"
)

// Some seeds of each kind of store. go run ./simulate runs more.
func TestSeeds(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.Name, func(t *testing.T) {
			t.Parallel()
			seeds := uint64(8)
			switch kind.Name {
			case "polled", "waiter":
				seeds = 300
			case "etcdlock":
				seeds = 60
			case "leader":
				seeds = 6
			case "redlock3", "redlock5":
				seeds = 4
			}
			world.Test(t, kind, seeds)
		})
	}
}
