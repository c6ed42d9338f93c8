package hasp_test

import (
	"context"
	"crypto/rand"
	"errors"
	mathrand "math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

// Three Clients and three callers of a library that polls each 50 to 250 ms share a key, although
// the Clients poll much more often. The library holds the key again as soon as it has unlocked it.
func TestClientsShareAMixedKey(t *testing.T) {
	const (
		trip = 200 * time.Microsecond
		hold = 5 * time.Millisecond
	)
	synctest.Test(t, func(t *testing.T) {
		store := new(memlock.Store)
		ctx := timeout(t, t.Context(), 30*time.Second)
		var ours, theirs, longest atomic.Int64
		var wg sync.WaitGroup
		var last *hasp.Client
		for range 3 {
			library := store.Driver()
			wg.Go(func() {
				for ctx.Err() == nil {
					time.Sleep(trip)
					claim := backend.Claim{Key: "k", Token: rand.Text(), Owner: "library", TTL: time.Minute}
					if _, err := library.Acquire(ctx, claim); err != nil {
						time.Sleep(50*time.Millisecond + mathrand.N(200*time.Millisecond))
						continue
					}
					theirs.Add(1)
					time.Sleep(hold)
					_ = library.Release(context.Background(), claim)
				}
			})

			f := faultyOver(store)
			f.acquire = func(q *call) error {
				time.Sleep(trip)
				err := q.send()
				var held *backend.HeldError
				if errors.As(err, &held) {
					held.Foreign = held.Owner == "library"
				}
				return err
			}
			c := await.Value(hasp.New(f, nil))
			last = c
			defer c.Close()
			for range 2 { // so that the hold is also handed over in the Client
				wg.Go(func() {
					for {
						asked := time.Now()
						l, err := c.Lock(ctx, "k")
						if err != nil {
							return
						}
						longest.Store(max(longest.Load(), int64(time.Since(asked))))
						ours.Add(1)
						time.Sleep(hold)
						unlock(t, l)
					}
				})
			}
		}
		wg.Wait()

		// When the library has gone, the Clients leave no gap any more.
		time.Sleep(time.Minute)
		began := time.Now()
		for range 30 {
			unlock(t, lockNow(t, last, "k"))
			time.Sleep(10 * time.Millisecond)
		}
		within(t, "30 Locks without the library", began, 30*(10*time.Millisecond+2*trip))

		share := float64(theirs.Load()) / float64(ours.Load()+theirs.Load())
		t.Logf("%d holds of the Clients, %d of the library", ours.Load(), theirs.Load())
		if share < 0.25 || share > 0.75 {
			t.Errorf("the library has %.2f of the holds", share)
		}
		if d := time.Duration(longest.Load()); d > 2*time.Second {
			t.Errorf("a caller of hasp waited for %v", d)
		}
	})
}
