// Command simulate runs Clients, a store and the network between them in
// virtual time, as a seed says, and checks what callers observe: one holder of
// each key, fences that grow, calls that return in time, nothing left behind,
// events that add up.
//
//	go run ./internal/simulate -seeds 100000
//	go run ./internal/simulate -kind redlock3 -from 17 -seeds 1
//
// A seed decides what every caller and every fault does. Goroutines that are ready
// at one instant run in the order that the scheduler chooses. So a failing seed
// may have to be run several times.
package main

import (
	"flag"
	"fmt"
	"maps"
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
		debug.SetGCPercent(400) // a seed lives for a moment, and makes much garbage
	}
	kind := flag.String("kind", "", "which store: "+strings.Join(names(), ", ")+"; default all")
	from := flag.Uint64("from", 1, "the first seed")
	seeds := flag.Uint64("seeds", 1000, "how many seeds, of all kinds together")
	flag.Parse()
	which := names()
	if *kind != "" {
		which = []string{*kind}
	}
	if kinds[which[0]] == nil {
		fmt.Fprintf(os.Stderr, "simulate: no kind %q; there are %s\n", *kind, strings.Join(names(), ", "))
		os.Exit(2)
	}
	began := time.Now()
	var next, granted atomic.Uint64
	var failed atomic.Bool
	work := func(t *testing.T) {
		t.Parallel()
		// A seed that fails ends this goroutine.
		defer func() {
			if t.Failed() {
				failed.Store(true)
			}
		}()
		for !failed.Load() {
			i := next.Add(1) - 1
			if i >= *seeds {
				return
			}
			n := uint64(len(which))
			granted.Add(uint64(simulate(t, which[i%n], *from+i/n)))
		}
	}
	testing.Main(func(string, string) (bool, error) { return true, nil }, []testing.InternalTest{{Name: "Seeds", F: func(t *testing.T) {
		t.Cleanup(func() {
			fmt.Printf("%d seeds, %d holds, in %v\n", min(next.Load(), *seeds), granted.Load(), time.Since(began).Round(time.Second))
		})
		for range runtime.GOMAXPROCS(0) {
			t.Run("worker", work)
		}
	}}}, nil, nil)
}

// names are the kinds, sorted.
func names() []string { return slices.Sorted(maps.Keys(kinds)) }
