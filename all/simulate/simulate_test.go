package main

import (
	"testing"

	"github.com/hasplock/hasp/internal/simulate/world"
)

// Some seeds. From the directory all, go run ./simulate runs more.
func TestSeeds(t *testing.T) { world.Test(t, kinds[0], 60) }
