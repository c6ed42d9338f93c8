package acceptance

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// TestSlotsOfEveryStrategy has callers of several Clients share three slots of a key. There
// are never more than three at once, never two on one slot, and no caller starves.
func TestSlotsOfEveryStrategy(t *testing.T) {
	const clients, callers, slots, turns = 3, 4, 3, 5
	redis := redistest.Start(t, nil)
	urls := map[string]string{
		"memlock":  "memlock://slots",
		"filelock": "filelock://" + t.TempDir(),
		"redlock":  "redlock+" + redistest.StartNodes(t, 3, nil).URL(),
	}
	for _, s := range sharing {
		urls[s.name] = s.name + "+" + redis.URL()
	}

	for _, strategy := range hasp.Strategies() {
		t.Run(strategy, func(t *testing.T) {
			url, ok := urls[strategy]
			if !ok {
				t.Fatal("registered, and no store to check it on: add one")
			}
			var mu sync.Mutex
			holders, most, last := map[int]int{}, 0, map[int]uint64{}
			all, full := 0, make(chan struct{})
			enter := func(l *hasp.Lease) {
				mu.Lock()
				defer mu.Unlock()
				all++
				if all > most && all == slots {
					close(full)
				}
				most = max(most, all)
				if holders[l.Slot()]++; holders[l.Slot()] > 1 || all > slots {
					t.Errorf("%d leases on slot %d, %d on all", holders[l.Slot()], l.Slot(), all)
				}
				if l.Fence() <= last[l.Slot()] {
					t.Errorf("fence %d of slot %d after %d", l.Fence(), l.Slot(), last[l.Slot()])
				}
				last[l.Slot()] = l.Fence()
			}
			leave := func(l *hasp.Lease) {
				mu.Lock()
				defer mu.Unlock()
				all--
				holders[l.Slot()]--
			}

			var wg sync.WaitGroup
			var opened []*hasp.Client
			for range clients {
				c, err := hasp.Open(t.Context(), url, nil)
				if err != nil {
					t.Fatal(err)
				}
				opened = append(opened, c)
				for range callers {
					wg.Go(func() {
						for range turns {
							l, err := c.Lock(t.Context(), strategy+"/slots", hasp.WithSlots(slots), hasp.WithFence())
							if err != nil {
								t.Error(err)
								return
							}
							enter(l)
							select { // the first leases last until all slots are taken
							case <-full:
								time.Sleep(10 * time.Millisecond)
							case <-time.After(10 * time.Second):
							}
							leave(l)
							if err := l.Unlock(context.Background()); err != nil {
								t.Error(err)
							}
						}
					})
				}
			}
			wg.Wait()
			if most != slots {
				t.Errorf("at most %d leases at once, want %d", most, slots)
			}
			for _, c := range opened {
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
