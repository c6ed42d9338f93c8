package main

import (
	"fmt"
	"slices"

	"github.com/hasplock/hasp/internal/hostclock"
)

// spared is the seat whose process is never killed. checkGrowth checks it.
const spared = 0

// sample is the resource use of a process at one moment.
type sample struct {
	seat, gen int
	at        int64
	use
}

// enough is the least number of samples, one a second, that checkGrowth needs.
const enough = 40

// heapSlack is how many bytes the heap may grow. A connection takes 10 KiB, and
// go-redis refers to as many as were idle at once, even after they were closed.
const heapSlack = 4 << 20

// figures are the resources that must not grow by more than slack.
var figures = []struct {
	name  string
	slack float64
	of    func(use) float64
}{
	{"bytes on the heap", heapSlack, func(u use) float64 { return float64(u.Heap) }},
	{"goroutines", 20, func(u use) float64 { return float64(u.Goroutines) }},
	{"descriptors", 10, func(u use) float64 { return float64(u.Files) }},
}

// checkGrowth reports a violation if the process that lived through the run used
// more and more: in the last quarter of the run a quarter more than in the
// second.
func (r *run) checkGrowth() {
	var all []use
	for _, s := range r.rec.uses {
		if s.seat == spared {
			all = append(all, s.use)
		}
	}
	if len(all) < enough {
		return
	}
	quarter := len(all) / 4
	for _, f := range figures {
		median := func(part []use) float64 {
			var of []float64
			for _, u := range part {
				of = append(of, f.of(u))
			}
			slices.Sort(of)
			return of[len(of)/2]
		}
		before, after := median(all[quarter:2*quarter]), median(all[3*quarter:])
		if after > 1.25*before+f.slack {
			r.fail("steady", hostclock.Now(), fmt.Sprintf("client %d.0 had %.0f %s in the second quarter of the run and %.0f in the last", spared, before, f.name, after))
		}
	}
}
