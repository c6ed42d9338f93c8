package fairlock_test

import (
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
)

// share has callers of some Clients wait for "k", and hold it in turn, until each has
// held it for a number of rounds on average. It returns when all wait. The function
// that it returns waits for the end, and returns the numbers of holds.
func (w *world) share(clients []*hasp.Client, callers, rounds int) (shared func() (total int, shares []int)) {
	var mu sync.Mutex // guards total, shares
	total, shares := 0, make([]int, callers)
	var wg sync.WaitGroup
	const holding = time.Millisecond
	for i := range callers {
		wg.Go(func() {
			for more := true; more; {
				lease, err := clients[i%len(clients)].Lock(w.Context(), "k")
				if err != nil {
					w.Error(err)
					return
				}
				mu.Lock()
				total++
				more = total < callers*rounds
				shares[i]++
				mu.Unlock()
				time.Sleep(holding) // by then all other callers are in the queue
				want(w.T, "unlock", lease.Unlock(w.Context()), nil)
			}
		})
	}
	w.settle()
	return func() (int, []int) {
		wg.Wait()
		return total, shares
	}
}

// An acquisition costs two scripts, however many callers wait: the release that
// hands the key over, and the enqueue for the next place. All callers get equal
// shares.
func TestContendedAcquisitionIsTwoScripts(t *testing.T) {
	for name, ttl := range map[string]time.Duration{"ttl above the window": 30 * time.Second, "ttl below it": 2 * time.Second} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				const waiters, rounds = 64, 4
				holder, ps := w.procs(5)
				var clients []*hasp.Client
				for _, p := range ps[1:] {
					clients = append(clients, hasp.New(p.Driver, &hasp.Options{TTL: ttl}))
				}
				shared := w.share(clients, waiters, rounds)
				for _, p := range ps[1:] {
					p.proxy.Commands()
				}
				ps[0].release(holder)
				total, shares := shared()
				scripts := 0
				for _, p := range ps[1:] {
					scripts += p.scripts()
				}
				// Each client sends each script in full once, and some callers finish
				// after the last round.
				if scripts > 2*total+16 {
					w.Errorf("%d scripts for %d acquisitions", scripts, total)
				}
				if least, most := slices.Min(shares), slices.Max(shares); most > 2*least {
					w.Errorf("shares from %d to %d: %v", least, most, shares)
				}
				for _, c := range clients {
					c.Close()
				}
				synctest.Wait()
				w.empty("all have had their share")
			})
		})
	}
}
