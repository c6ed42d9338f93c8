// Package world is the body of the command simulate: Clients, callers and faults in
// virtual time, and the checks. A program gives it the stores.
package world

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

// Main runs the command. It ends the program.
func Main(kinds ...Kind) {
	testing.Init()
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400) // a seed is short, and makes much garbage
	}
	var names []string
	for _, k := range kinds {
		names = append(names, k.Name)
	}
	list, which := strings.Join(names, ", "), kinds
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
	limit := flag.Duration("time", 0, "begin no seed after this time; 0 is no limit")
	flag.Parse()

	p := &progress{which: which, from: *from, seeds: *seeds}
	began := time.Now()
	if *limit > 0 {
		p.end = began.Add(*limit)
	}
	// Package testing gives each worker a test, which synctest needs.
	testing.Main(func(string, string) (bool, error) { return true, nil }, []testing.InternalTest{{Name: "Seeds", F: func(t *testing.T) {
		t.Cleanup(func() {
			fmt.Printf("%d seeds, %d holds, in %v\n", min(p.next.Load(), p.seeds), p.granted.Load(), time.Since(began).Round(time.Second))
		})
		for range runtime.GOMAXPROCS(0) {
			t.Run("worker", p.work)
		}
	}}}, nil, nil)
}

// progress says which seeds are run, and which were.
type progress struct {
	which         []Kind
	from, seeds   uint64
	end           time.Time // no seed begins after it, if it is not zero
	next, granted atomic.Uint64
	failed        atomic.Bool
}

// work runs seeds until all were run or one has failed.
func (p *progress) work(t *testing.T) {
	t.Parallel()
	// A seed that fails ends this goroutine.
	defer func() {
		if t.Failed() {
			p.failed.Store(true)
		}
	}()
	n := uint64(len(p.which))
	for !p.failed.Load() && (p.end.IsZero() || time.Now().Before(p.end)) {
		i := p.next.Add(1) - 1
		if i >= p.seeds {
			return
		}
		p.granted.Add(uint64(Run(t, p.which[i%n], p.from+i/n)))
	}
}
