package hasp_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

// Callers of several Clients that poll a store share a key evenly, also if they
// hold it for longer than a poll takes. The time between two holds and the number
// of attempts stay small.
func TestClientsThatPollShareAKey(t *testing.T) {
	for _, clients := range []int{2, 4, 8} {
		for _, hold := range []time.Duration{time.Millisecond, 10 * time.Millisecond} {
			t.Run(fmt.Sprint(clients, " clients, ", hold), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { shareAKey(t, clients, hold) })
			})
		}
	}
}

func shareAKey(t *testing.T, clients int, hold time.Duration) {
	const callers, length = 64, 10 * time.Second
	const trip = 200 * time.Microsecond
	store := memlock.NewStore()
	attempts, longest := 0, time.Duration(0)
	var mu sync.Mutex
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()

	var wg sync.WaitGroup
	shares := make([]float64, callers)
	for i := range clients {
		f := newFaulty()
		f.Driver = store.Driver()
		f.acquire = func(_ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
			time.Sleep(trip)
			mu.Lock()
			attempts++
			mu.Unlock()
			return send()
		}
		c := hasp.New(f, nil)
		defer c.Close()
		for j := i; j < callers; j += clients {
			wg.Go(func() {
				for ctx.Err() == nil {
					asked := time.Now()
					l, err := c.Lock(ctx, "k")
					if err != nil {
						return
					}
					mu.Lock()
					longest = max(longest, time.Since(asked))
					shares[j]++
					mu.Unlock()
					time.Sleep(hold)
					l.Unlock(context.Background())
				}
			})
		}
	}
	wg.Wait()

	mu.Lock() // an Acquire whose Lock has ended may still be on its way
	defer mu.Unlock()
	sum, squares := 0.0, 0.0
	for _, s := range shares {
		sum += s
		squares += s * s
	}
	jain := sum * sum / (callers * squares)
	busy := time.Duration(sum) * hold
	t.Logf("%v holds, Jain's index %.3f, longest wait %v, %.2f attempts for each, held %v of %v",
		sum, jain, longest, float64(attempts)/sum, busy, length)
	if jain < 0.9 {
		t.Errorf("Jain's index of the shares is %.3f", jain)
	}
	if longest > 30*callers*hold { // nearly always below 10 turns of all callers
		t.Errorf("a caller waited for %v", longest)
	}
	if float64(attempts) > 10*sum {
		t.Errorf("%d attempts for %v holds", attempts, sum)
	}
	if busy < length*6/10 {
		t.Errorf("the key was held for %v of %v", busy, length)
	}
}

// Clients that have waited for a long hold share the key evenly some seconds after it, also if
// a round trip takes much less than a hold and each Client has one caller.
func TestClientsShareAKeyAfterALongHold(t *testing.T) {
	for _, trip := range []time.Duration{20 * time.Microsecond, 200 * time.Microsecond} {
		t.Run(fmt.Sprint("trip ", trip), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const clients, hold = 5, time.Millisecond
				store := memlock.NewStore()
				ctx, cancel := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				var mu sync.Mutex
				shares := make([]float64, clients)
				first := hasp.New(store.Driver(), nil)
				defer first.Close()
				long := lockNow(t, first, "k")
				for i := range clients {
					f := newFaulty()
					f.Driver = store.Driver()
					f.acquire = func(_ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
						time.Sleep(trip)
						return send()
					}
					c := hasp.New(f, nil)
					defer c.Close()
					wg.Go(func() {
						for ctx.Err() == nil {
							l, err := c.Lock(ctx, "k")
							if err != nil {
								return
							}
							time.Sleep(hold)
							l.Unlock(context.Background())
							mu.Lock()
							shares[i]++
							mu.Unlock()
						}
					})
				}
				time.Sleep(5 * time.Second)
				unlock(t, long)
				for second := range 9 {
					mu.Lock()
					clear(shares)
					mu.Unlock()
					time.Sleep(time.Second)
					mu.Lock()
					sum, squares := 0.0, 0.0
					for _, s := range shares {
						sum += s
						squares += s * s
					}
					jain := sum * sum / squares / clients
					t.Logf("second %d: %v holds, Jain's index %.2f", second+1, sum, jain)
					if second == 8 && jain < 0.8 {
						t.Errorf("Jain's index of the shares in second %d is %.2f: %v", second+1, jain, shares)
					}
					mu.Unlock()
				}
				cancel()
				wg.Wait()
			})
		})
	}
}

// However many Clients poll for one key, the number of attempts for each hold is small, all
// get the key equally often, and none waits much longer than the others.
func TestManyClientsThatPollShareAKey(t *testing.T) {
	await.Crowd(t)
	for _, clients := range []int{2, 10, 50, 200} {
		t.Run(fmt.Sprint(clients, " clients"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { pollOneKey(t, clients, 5*time.Millisecond) })
		})
	}
}

func pollOneKey(t *testing.T, clients int, hold time.Duration) {
	const trip = 200 * time.Microsecond
	store := memlock.NewStore()
	settled := time.Now().Add(max(time.Duration(20*clients)*hold, 2*time.Second))
	end := settled.Add(time.Duration(60*clients) * hold)
	var mu sync.Mutex
	var attempts, holds int
	var longest time.Duration
	each := make([]float64, clients)
	var wg sync.WaitGroup
	for i := range clients {
		f := newFaulty()
		f.Driver = store.Driver()
		f.acquire = func(_ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
			time.Sleep(trip)
			if mu.Lock(); time.Now().After(settled) {
				attempts++
			}
			mu.Unlock()
			return send()
		}
		c := hasp.New(f, nil)
		defer c.Close()
		wg.Go(func() {
			for time.Now().Before(end) {
				asked := time.Now()
				l := lockNow(t, c, "k")
				if mu.Lock(); time.Now().After(settled) {
					holds++
					each[i]++
					longest = max(longest, time.Since(asked))
				}
				mu.Unlock()
				time.Sleep(hold)
				l.Unlock(context.Background())
			}
		})
	}
	wg.Wait()
	var sum, squares float64
	for _, n := range each {
		sum, squares = sum+n, squares+n*n
	}
	perHold, jain := float64(attempts)/float64(holds), sum*sum/squares/float64(clients)
	rounds := float64(longest) / float64(time.Duration(clients)*hold)
	t.Logf("%.1f attempts for each hold, Jain's index %.2f, longest wait %.1f rounds", perHold, jain, rounds)
	if perHold > 9 || jain < 0.9 || rounds > 10 {
		t.Error("too many attempts, or an unequal share")
	}
	if free := 1 - sum*float64(hold)/float64(end.Sub(settled)); free > 0.25 {
		t.Errorf("the key was free for %.0f %% of the time", 100*free)
	}
}

// A Client that has a key for itself leaves it to others for a part of the time
// only. A Client that comes later gets its turn nevertheless.
func TestALoneClientIsFoundByALaterOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memlock.NewStore()
		polls := func() *hasp.Client {
			f := newFaulty()
			f.Driver = store.Driver()
			return hasp.New(f, nil)
		}
		first, later := polls(), polls()
		defer first.Close()
		defer later.Close()

		ctx, cancel := context.WithCancel(t.Context())
		holds := 0
		var mu sync.Mutex
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				for ctx.Err() == nil {
					l, err := first.Lock(ctx, "k")
					if err != nil {
						return
					}
					mu.Lock()
					holds++
					mu.Unlock()
					time.Sleep(10 * time.Millisecond)
					l.Unlock(context.Background())
				}
			})
		}
		time.Sleep(10 * time.Second)
		mu.Lock()
		if holds < 920 {
			t.Errorf("%d holds of 10 ms in 10 s, by a Client that is alone", holds)
		}
		mu.Unlock()
		waited := time.Duration(0) // about 4 s in all; one wait in 1,000 takes 3 s
		for range 10 {
			asked := time.Now()
			l := lockNow(t, later, "k")
			waited += time.Since(asked)
			l.Unlock(t.Context())
			time.Sleep(2 * time.Second)
		}
		if waited > 16*time.Second {
			t.Errorf("a Client that came later waited for %v in ten Locks", waited)
		}
		cancel()
		wg.Wait()
	})
}

// Callers come while another caller of their Client holds a key that was free. They
// get the key one after another, however old the Client is and however long each of
// them holds the key.
func TestALineThatFormsBehindAHolderGetsTheKey(t *testing.T) {
	for _, hold := range []time.Duration{10 * time.Millisecond, 10 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			f := newFaulty()
			f.Driver = memlock.NewStore().Driver()
			c := hasp.New(f, nil)
			defer c.Close()

			time.Sleep(time.Hour)
			first := lockNow(t, c, "k")
			var wg sync.WaitGroup
			var freed time.Time
			for range 16 {
				wg.Go(func() {
					l, err := c.Lock(t.Context(), "k")
					if err != nil {
						t.Error(err)
						return
					}
					if gap := time.Since(freed); gap > 100*time.Millisecond {
						t.Errorf("holds of %v: the key was free for %v while callers waited", hold, gap)
					}
					time.Sleep(hold)
					freed = time.Now()
					l.Unlock(context.Background())
				})
			}
			synctest.Wait()
			time.Sleep(hold)
			freed = time.Now()
			first.Unlock(t.Context())
			wg.Wait()
		})
	}
}

// The first caller after a row leaves during the gap. The next one waits for the rest of it.
func TestGapOutlastsACallerThatLeaves(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		var asked, freed []time.Time
		f.acquire = func(_ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
			time.Sleep(100 * time.Microsecond)
			asked = append(asked, time.Now())
			return send()
		}
		ctx, leave := context.WithCancel(t.Context())
		f.release = func(_ backend.Claim, send func() error) error {
			freed = append(freed, time.Now())
			time.AfterFunc(100*time.Microsecond, leave)
			return send()
		}

		first := lockNow(t, c, "k")
		var wg sync.WaitGroup
		for i := range 8 {
			ctx := ctx
			if i != 5 { // the sixth caller comes after the row
				ctx = t.Context()
			}
			wg.Go(func() {
				if l, err := c.Lock(ctx, "k"); err == nil {
					time.Sleep(3 * time.Millisecond)
					l.Unlock(t.Context())
				}
			})
			synctest.Wait()
		}
		time.Sleep(3 * time.Millisecond)
		first.Unlock(t.Context())
		wg.Wait()
		if len(asked) < 2 || asked[1].Sub(freed[0]) < 200*time.Microsecond {
			t.Errorf("asked at %v, freed at %v: want a gap of two round trips", asked, freed)
		}
	})
}

// A busy machine delays answers. They still show the same hold, so the Client does not
// poll more often.
func TestLateAnswersAreOfTheSameHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := heldByAnother(t, newFaulty(), time.Hour)
		n := 0
		f.acquire = func(_ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
			g, err := send()
			if n++; n%2 == 0 {
				time.Sleep(20 * time.Millisecond)
			}
			return g, err
		}
		c := hasp.New(f, nil)
		_, err := c.Lock(t.Context(), "k", hasp.WithMaxWait(10*time.Second))
		want(t, "Lock", err, hasp.ErrHeld)
		// Some 55 attempts until the sleep is 50 ms, and then one in about 60 ms.
		if a, _, _ := f.calls(); a > 230 {
			t.Errorf("%d attempts in 10 s at one hold", a)
		}
		c.Close()
	})
}

// Options.Backoff replaces the pace.
func TestBackoffReplacesThePace(t *testing.T) {
	o := &hasp.Options{Backoff: func(int) time.Duration { return time.Second }}
	withClient(t, o, func(t *testing.T, f *faulty, c *hasp.Client) {
		heldByAnother(t, f, time.Hour)
		want(t, "Lock", errOf(c.Lock(t.Context(), "k", hasp.WithMaxWait(time.Minute))), hasp.ErrHeld)
		// Each sleep is shortened by up to a half.
		if a, _, _ := f.calls(); a < 60 || a > 125 {
			t.Errorf("%d attempts in a minute", a)
		}
	})
}
