package redlock

import (
	"context"
	"fmt"
	"github.com/hasplock/hasp/internal/await"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/strategytest"
)

// The release of the last reader wakes the writer that waits, and the writer's release
// wakes all readers.
func TestTheLastReaderWakesAWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t, 3, 8)
		reader := func() backend.Claim { r := c.claim(); r.Shared = true; return r }
		one, two := reader(), reader()
		take(t, c.drivers[0], one)
		take(t, c.drivers[1], two)
		claim := c.claim()
		writer := startWait(t.Context(), c.drivers[2], claim)
		time.Sleep(5 * time.Second)
		c.free(0, one)
		time.Sleep(5 * time.Second)
		select {
		case <-writer.done:
			t.Error("the writer has the key beside a reader")
		default:
		}
		c.free(1, two)
		c.soon("writer", writer)

		var readers []*aWait
		for i := 3; i < 8; i++ {
			readers = append(readers, startWait(t.Context(), c.drivers[i], reader()))
		}
		time.Sleep(5 * time.Second)
		c.free(2, claim)
		c.soon("readers", readers...)
	})
}

// free releases a claim that a client has.
func (c *crowd) free(i int, claim backend.Claim) {
	c.t.Helper()
	if err := c.drivers[i].Release(c.t.Context(), claim); err != nil {
		c.t.Error(err)
	}
}

// soon fails the test unless all waits get the key within 20 ms.
func (c *crowd) soon(what string, waits ...*aWait) {
	c.t.Helper()
	began := time.Now()
	for _, w := range waits {
		if <-w.done; w.err != nil {
			c.t.Errorf("%s: %v", what, w.err)
		}
	}
	if late := time.Since(began); late > 20*time.Millisecond {
		c.t.Errorf("%s after %v", what, late)
	}
}

// flow makes readers come on each driver until stop.
func (c *crowd) flow(first, last int, hold time.Duration, waits bool) (stop func() []int) {
	ctx, cancel := context.WithCancel(c.t.Context())
	var wg sync.WaitGroup
	got := make([]int, last)
	for i := first; i < last; i++ {
		wg.Go(func() {
			for ctx.Err() == nil {
				r := c.claim()
				r.Shared, r.TTL = true, 2*time.Second
				var err error
				if waits {
					_, err = c.drivers[i].Wait(ctx, r)
				} else {
					_, err = c.drivers[i].Acquire(ctx, r)
				}
				if err != nil {
					time.Sleep(time.Duration(1+rand.IntN(5)) * time.Millisecond)
					continue
				}
				got[i]++
				time.Sleep(hold/2 + rand.N(hold))
				_ = c.drivers[i].Release(context.Background(), r)
			}
		})
	}
	return func() []int { cancel(); wg.Wait(); return got }
}

// writes makes the first driver take the key that often, and fails the test if it waits for
// longer than most.
func (c *crowd) writes(times int, most time.Duration) {
	c.t.Helper()
	for range times {
		w := c.claim()
		ctx, cancel := context.WithTimeout(c.t.Context(), 20*time.Second)
		began := time.Now()
		_, err := c.drivers[0].Wait(ctx, w)
		cancel()
		if took := time.Since(began); err != nil || took > most {
			c.t.Errorf("writer: %v after %v", err, took)
		}
		_ = c.drivers[0].Release(c.t.Context(), w)
		time.Sleep(100 * time.Millisecond)
	}
}

// A leftover of a reader, on any node, keeps a writer from the key no longer than without
// it, although readers keep coming. The readers get the key as well. A leftover of a writer on
// the lead does not let readers pass a writer that waits.
func TestALeftoverBesideReaders(t *testing.T) {
	t.Parallel()
	for _, waits := range []bool{false, true} {
		for on := -1; on < 3; on++ {
			t.Run(fmt.Sprint("on ", on, " waits ", waits), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					c := newCrowd(t, 3, 7)
					if on >= 0 {
						v := c.vs[on]
						v.Mini.ZAdd("k", float64(time.Now().Add(60*time.Second).UnixMilli()), "leftover-of-a-reader#dead")
						v.Mini.SetTTL("k", 60*time.Second)
					}
					stop := c.flow(1, 7, 40*time.Millisecond, waits)
					time.Sleep(200 * time.Millisecond)
					c.writes(2, 2*time.Second)
					if got := stop()[1:]; slices.Min(got) < 2 {
						t.Errorf("the readers got the key %v times", got)
					}
				})
			})
		}
		t.Run(fmt.Sprint("of a writer, waits ", waits), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCrowd(t, 3, 7)
				elsewhere(t, c.vs[0], "k")
				stop := c.flow(1, 7, 40*time.Millisecond, waits)
				time.Sleep(time.Second)
				c.writes(1, 3*time.Second)
				stop()
			})
		})
	}
}

// busy has all drivers but the first one wait for the key for 5 s. It returns how many commands the
// nodes get from them.
func (c *crowd) busy() (n int64) {
	ctx, cancel := context.WithCancel(c.t.Context())
	var wg sync.WaitGroup
	for _, d := range c.drivers[1:] {
		wg.Go(func() { _, _ = d.Wait(ctx, c.claim()) })
	}
	time.Sleep(2 * time.Second)
	before := c.commands()
	time.Sleep(5 * time.Second)
	n = c.commands() - before
	cancel()
	wg.Wait()
	return n
}

// Inspect lists all members of a quorum, although one of them is missing on a node. Its renewal
// gives it back to that node, next to the other.
func TestAReaderThatANodeLacks(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		one, two := aReader("k"), aReader("k")
		one.Owner, two.Owner = "one", "two"
		tr.acquire(t, tr.d, one)
		tr.acquire(t, tr.d, two)
		synctest.Wait()
		await.Value(tr.vs[0].Mini.ZRem("k", two.Token+"#two"))
		tr.vs[2].Proxy.Delay(time.Millisecond)
		s, err := tr.d.Inspect(t.Context(), "k")
		if err != nil || len(s.Shared) != 2 {
			t.Errorf("%+v, %v", s, err)
		}

		strategytest.Want(t, "renewal", renewOne(tr.d, two, time.Second), nil)
		synctest.Wait()
		if members, err := tr.vs[0].Mini.ZMembers("k"); err != nil || len(members) != 2 {
			t.Errorf("node 0 has %q, %v", members, err)
		}
		tr.release(t, tr.d, one)
		tr.release(t, tr.d, two)
		time.Sleep(20 * time.Millisecond) // commands to node 2 take a millisecond each
		nothingLeft(t, "released", tr.vs)
	})
}

// The lead votes yes for a writer, because an intent keeps readers out there. Readers have the other
// nodes. So the writer goes to another lead, and leaves intents.
func TestAWriterThatOnlyTheLeadLetsIn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t, 3, 7)
		c.vs[c.drivers[0].leader("k")].Mini.Set(redisstore.IntentKey("k"), "another's")
		stop := c.flow(1, 7, 200*time.Millisecond, false)
		time.Sleep(300 * time.Millisecond)
		c.writes(1, 5*time.Second)
		stop()
	})
}

// If nodes are far away, a look takes longer than 300 ms, and the intents last until the next one.
func TestAWriterFarAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t, 3, 13)
		for _, v := range c.vs {
			v.Proxy.Delay(200 * time.Millisecond)
		}
		stop := c.flow(1, 13, time.Second, true)
		time.Sleep(2 * time.Second)
		c.writes(3, 5*time.Second)
		stop()
	})
}

// If the lead has lost the record of readers, a writer's votes there are in vain, and must not
// wake it again. The writers that wait go to another lead. On that lead each would get a vote in
// vain, and its release would wake the next one.
func TestWritersDoNotWakeEachOther(t *testing.T) {
	for _, writers := range []int{1, 4} {
		synctest.Test(t, func(t *testing.T) {
			c := newCrowd(t, 3, writers+1)
			r := c.claim()
			r.Shared = true
			take(t, c.drivers[0], r)
			time.Sleep(time.Second)
			c.vs[c.drivers[0].leader("k")].Mini.Del("k")
			n := c.busy()
			if t.Logf("%d writers: %d commands in 5 s", writers, n); n > 1500 {
				t.Errorf("%d writers send %d commands in 5 s", writers, n)
			}
		})
	}
}

// When a writer that waits dies, its intents end, and a reader gets the key then.
func TestAReaderAfterADeadWriter(t *testing.T) {
	intent := redisstore.IntentKey("k")
	for range 10 { // sleeps are random
		synctest.Test(t, func(t *testing.T) {
			c := newCrowd(t, 3, 2)
			first, reader := c.claim(), c.claim()
			first.Shared, reader.Shared = true, true
			take(t, c.drivers[0], first)
			var last time.Time // when the writer repeated its intents
			var w *aWait
			for range 10 + rand.IntN(10) {
				for _, v := range c.vs {
					v.Mini.Set(intent, "writer")
					v.Mini.SetTTL(intent, redisstore.IntentTTL)
				}
				last = time.Now()
				if w == nil {
					w = startWait(t.Context(), c.drivers[1], reader)
				}
				time.Sleep(time.Duration(50+rand.IntN(200)) * time.Millisecond)
			}
			if <-w.done; w.err != nil || time.Since(last) > redisstore.IntentTTL+20*time.Millisecond {
				t.Errorf("a reader got in %v after the writer died: %v", time.Since(last), w.err)
			}
		})
	}
}
