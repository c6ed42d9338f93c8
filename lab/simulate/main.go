// Command simulate runs Clients, a store and the network between them in virtual time. The store is
// a driver in memory, or virtual Redis servers. Callers lock keys while faults
// happen. The command checks that an exclusive holder is alone, fences grow, calls return in time,
// nothing is left behind, events add up, and Lead, DoAll and WithoutReentry keep their promises.
// Run it in the directory lab:
//
//	go run ./simulate -seeds 100000
//	go run ./simulate -kind redlock3 -from 17 -seeds 1
//
// A seed decides what every caller and every fault does. The scheduler decides in which order
// goroutines run that are ready at the same instant. So you may have to run a seed several times
// until it fails again.
package main

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func main() {
	testing.Init()
	if os.Getenv("GOGC") == "" {
		// collect garbage rarely, because a seed is short and allocates much
		debug.SetGCPercent(400)
	}

	var names []string
	for _, k := range kinds {
		names = append(names, k.Name)
	}
	list := strings.Join(names, ", ")
	which := kinds
	flag.Func("kind", "the `store`: "+list+"; all if not given", func(name string) error {
		i := slices.Index(names, name)
		if i < 0 {
			return fmt.Errorf("want one of %s", list)
		}
		which = kinds[i : i+1]
		return nil
	})

	from := flag.Uint64("from", 1, "the first seed")
	seeds := flag.Uint64("seeds", 1000, "how many seeds, of all kinds together")
	flag.Parse()

	p := &progress{which: which, from: *from, seeds: *seeds}
	began := time.Now()
	// Package testing creates a test for each worker, because synctest needs a test.
	testing.Main(func(string, string) (bool, error) { return true, nil },
		[]testing.InternalTest{{Name: "Seeds", F: func(t *testing.T) {
			t.Cleanup(func() {
				fmt.Printf("%d seeds, %d holds, in %v\n", min(p.next.Load(), p.seeds), p.granted.Load(),
					time.Since(began).Round(time.Second))
			})
			for range runtime.GOMAXPROCS(0) {
				t.Run("worker", p.work)
			}
		}}}, nil, nil)
}

// progress is the range of seeds, and how far the workers have come.
type progress struct {
	which         []Kind
	from, seeds   uint64
	next, granted atomic.Uint64
	failed        atomic.Bool
}

// work runs seeds until no seed is left or a seed has failed.
func (p *progress) work(t *testing.T) {
	t.Parallel()
	// A seed that fails ends this goroutine, so a deferred function must note the failure.
	defer func() {
		if t.Failed() {
			p.failed.Store(true)
		}
	}()

	n := uint64(len(p.which))
	for !p.failed.Load() {
		i := p.next.Add(1) - 1
		if i >= p.seeds {
			return
		}
		p.granted.Add(uint64(run(t, p.which[i%n], p.from+i/n, sound, nil)))
	}
}
