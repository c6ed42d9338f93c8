package fairlock_test

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
)

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
				var total atomic.Int32
				shares := make([]int, waiters)
				var wg sync.WaitGroup
				for i := range waiters {
					wg.Go(func() {
						for int(total.Load()) < waiters*rounds {
							lease, err := clients[i%len(clients)].Lock(w.Context(), "k")
							if err != nil {
								w.Error(err)
								return
							}
							total.Add(1)
							shares[i]++
							time.Sleep(time.Millisecond) // by then all other callers are in the queue
							if err := lease.Unlock(w.Context()); err != nil {
								w.Error(err)
							}
						}
					})
				}
				w.settle() // all wait
				for _, p := range ps[1:] {
					p.proxy.Commands()
				}
				ps[0].release(holder)
				wg.Wait()
				scripts := 0
				for _, p := range ps[1:] {
					for _, cmd := range p.proxy.Commands() {
						if strings.HasPrefix(cmd, "eval") {
							scripts++
						}
					}
				}
				// Each client sends each script in full once, and some callers finish
				// after the last round.
				if n := int(total.Load()); scripts > 2*n+16 {
					w.Errorf("%d scripts for %d acquisitions", scripts, n)
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
