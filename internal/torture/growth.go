package main

import (
	"errors"
	"fmt"
	"os"
	"runtime/pprof"
	"slices"

	"github.com/hasplock/hasp/internal/hostclock"
)

// spared is the seat whose process is never killed, so that it could grow.
const spared = 0

// sample is what a process takes of the machine at a moment.
type sample struct {
	seat, gen int
	at        int64
	use
}

// enough is how many samples, one a second, say whether something grows.
const enough = 40

// heapSlack is how many bytes more on the heap are no growth. A connection takes
// 10 KiB, and go-redis refers to as many as were idle at once, even when they have
// been closed.
const heapSlack = 4 << 20

// figures are what must not grow, with what is no growth.
var figures = []struct {
	name  string
	slack float64
	of    func(use) float64
}{
	{"bytes on the heap", heapSlack, func(u use) float64 { return float64(u.Heap) }},
	{"goroutines", 20, func(u use) float64 { return float64(u.Goroutines) }},
	{"descriptors", 10, func(u use) float64 { return float64(u.Files) }},
}

// checkGrowth looks whether the process that lived all the time took more and
// more: in the last quarter of the run a quarter more than in the second.
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
			r.fail("steady", hostclock.Now(), fmt.Sprintf("client %d.0: %.0f %s, and later %.0f", spared, before, f.name, after))
		}
	}
}

// profile writes profiles of the heap and of the goroutines of a client, if it has
// been told a name for them. go tool pprof -diff_base shows what has grown between
// two of a kind.
func (w *client) profile(moment string) {
	for _, kind := range []string{"heap", "goroutine"} {
		if w.Profile == "" {
			return
		}
		f, err := os.Create(fmt.Sprintf("%s-%s-%s.pprof", w.Profile, kind, moment))
		if err == nil {
			err = errors.Join(pprof.Lookup(kind).WriteTo(f, 0), f.Close())
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "torture:", err) // the run itself goes on
		}
	}
}
