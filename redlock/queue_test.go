package redlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/strategytest"
)

// line is waiters of one key that arrive one after another, each with a driver of its
// own. Driver 0 holds the key.
type line struct {
	*crowd
	holder  backend.Claim
	cancels []context.CancelFunc
	wg      sync.WaitGroup

	mu     sync.Mutex // guards served
	served []int      // the waiters, in the order of their grants
}

func newLine(t *testing.T, nodes, waiters int) *line {
	l := &line{crowd: newCrowd(t, nodes, waiters+1)}
	for _, d := range l.drivers {
		for _, n := range d.m.nodes {
			n.latency.Store(int64(trip)) // all have the same lead
		}
	}
	l.holder = l.claim()
	take(t, l.drivers[0], l.holder)
	for i := 1; i <= waiters; i++ {
		ctx, cancel := context.WithCancel(t.Context())
		l.cancels = append(l.cancels, cancel)
		l.wg.Go(func() {
			claim := l.claim()
			if _, err := l.drivers[i].Wait(ctx, claim); err != nil {
				if ctx.Err() == nil {
					t.Errorf("waiter %d: %v", i, err)
				}
				return
			}
			l.mu.Lock()
			l.served = append(l.served, i)
			l.mu.Unlock()
			if err := l.drivers[i].Release(t.Context(), claim); err != nil {
				t.Errorf("release by waiter %d: %v", i, err)
			}
		})
		time.Sleep(100 * time.Millisecond) // the next one arrives later
	}
	return l
}

// release releases the key and waits for the others. It returns how long they took.
func (l *line) release() time.Duration {
	began := time.Now()
	if err := l.drivers[0].Release(l.t.Context(), l.holder); err != nil {
		l.t.Error(err)
	}
	l.wg.Wait()
	return time.Since(began)
}

// Waiters keep their order if the lead dies, hangs, is emptied or becomes slow.
func TestWaitersGetTheKeyInOrder(t *testing.T) {
	for name, spoil := range map[string]func(l *line){
		"all well":            func(*line) {},
		"the lead dies":       func(l *line) { l.vs[0].Proxy.Down() },
		"the lead hangs":      func(l *line) { l.vs[0].Proxy.Stall() },
		"the lead is emptied": func(l *line) { l.vs[0].Mini.FlushAll() },
		"the lead is slow":    func(l *line) { l.vs[0].Proxy.Delay(200 * time.Millisecond) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				l := newLine(t, 3, 8)
				time.Sleep(time.Second)
				spoil(l)
				time.Sleep(2 * time.Second)
				took := l.release()
				if !slices.IsSorted(l.served) || len(l.served) != 8 {
					t.Errorf("served in the order %v", l.served)
				}
				if took > 3*time.Second {
					t.Errorf("all are served after %v", took)
				}
				l.vs[0].Proxy.Flow()
			})
		})
	}
}

// A waiter that leaves does not keep the next one from the key, and leaves no trace, also if
// its driver is closed at once.
func TestAWaiterThatLeavesLetsTheNextPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLine(t, 3, 3)
		l.cancels[0]()
		l.cancels[1]() // as the engine does before it closes a driver
		synctest.Wait()
		strategytest.Want(t, "close", l.drivers[2].Close(), nil)
		time.Sleep(time.Millisecond)
		if took := l.release(); took > 10*time.Millisecond || !slices.Equal(l.served, []int{3}) {
			t.Errorf("served %v after %v", l.served, took)
		}
		time.Sleep(time.Second)
		for i, v := range l.vs {
			for _, key := range v.Mini.Keys() {
				if strings.Contains(key, ":turns:") || strings.Contains(key, ":looks:") {
					t.Errorf("node %d keeps %s", i, key)
				}
			}
		}
	})
}

// A waiter that has died keeps the others from the key for a second, and until one of them looks
// again.
func TestADeadWaiterCountsAsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLine(t, 3, 2)
		keys, now := keysOf("k")[1:], float64(time.Now().UnixMilli())
		for i, v := range l.vs {
			if _, err := v.Mini.ZAdd(keys[0], now-60_000, "dead"); err != nil {
				t.Fatalf("node %d: %v", i, err)
			}
			if _, err := v.Mini.ZAdd(keys[1], now, "dead"); err != nil {
				t.Fatalf("node %d: %v", i, err)
			}
		}
		took := l.release()
		if took < 500*time.Millisecond || took > time.Second+laterEvery+50*time.Millisecond || !slices.Equal(l.served, []int{1, 2}) {
			t.Errorf("served %v after %v", l.served, took)
		}
	})
}

// A free key is not refused for the place of a waiter that does not take it.
func TestAcquireDoesNotWaitForADeadWaiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLine(t, 3, 0)
		keys, now := keysOf("k")[1:], float64(time.Now().UnixMilli())
		for i := range keys {
			await.Value(l.vs[0].Mini.ZAdd(keys[i], now, "dead"))
		}
		l.drivers[0].ct.refused("k") // so it asks the lead first

		l.release()
		time.Sleep(10 * trip) // until the lead has released it as well
		began := time.Now()
		take(t, l.drivers[0], l.claim())
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("got the key after %v", took)
		}
	})
}

// A free key is not refused because two nodes still have a record of the last hold while a
// third one is late.
func TestAcquireSeesThroughALateNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLine(t, 5, 0)
		l.release()
		synctest.Wait()
		for _, v := range l.vs[:2] {
			v.Mini.Set(redisstore.LockKey("k"), l.holder.Token+redisstore.Mark)
		}
		l.vs[2].Proxy.Delay(25 * time.Millisecond)
		time.AfterFunc(30*time.Millisecond, func() {
			l.vs[0].Mini.Del(redisstore.LockKey("k"))
			l.vs[1].Mini.Del(redisstore.LockKey("k"))
		})
		take(t, l.drivers[0], l.claim())
	})
}

// A caller that releases a key after a long hold and wants it again at once comes after
// those who wait, also if the lead answers later than the others.
func TestAcquireLetsWaitersPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLine(t, 3, 1)
		time.Sleep(time.Second)
		l.vs[0].Proxy.Delay(10 * trip)
		await.Must(t, l.drivers[0].Release(t.Context(), l.holder))
		_, err := l.drivers[0].Acquire(t.Context(), l.claim())
		l.mu.Lock()
		served := len(l.served) == 1 // then the waiter has released the key already
		l.mu.Unlock()
		if !served && !errors.Is(err, backend.ErrHeld) {
			t.Errorf("got %v, want ErrHeld", err)
		}
		l.wg.Wait() // its release must not end with the test's context
		if err == nil {
			return
		}
		synctest.Wait()
		take(t, l.drivers[0], l.claim()) // nobody waits any more
	})
}

// If another value has a key of the queue, all waiters get the lock, and the value stays.
func TestWaitersWithoutAQueue(t *testing.T) {
	for i, key := range keysOf("k")[1:3] {
		t.Run(fmt.Sprint("key ", i), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLine(t, 3, 4)
				for _, v := range l.vs {
					v.Mini.Del(key)
					v.Mini.Set(key, "another value")
				}
				if took := l.release(); took > time.Second || len(l.served) != 4 {
					t.Errorf("served %v after %v", l.served, took)
				}
				for _, v := range l.vs {
					if got, _ := v.Mini.Get(key); got != "another value" {
						t.Errorf("%s is now %q", key, got)
					}
				}
			})
		})
	}
}

// A rival has the vote of one node of three, and another node hangs. The attempt gives its
// vote back instead of waiting for that node. Otherwise the key would be blocked.
func TestSplitVoteWhileANodeHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLine(t, 3, 0)
		l.release()
		time.Sleep(100 * time.Millisecond)
		l.vs[2].Mini.Set("k", "rival#somebody")
		l.vs[2].Mini.SetTTL("k", time.Minute)
		l.vs[0].Proxy.Stall()

		began := time.Now()
		claim := l.claim()
		if _, err := l.drivers[0].Acquire(t.Context(), claim); !errors.Is(err, backend.ErrHeld) || time.Since(began) > claim.Timeout/4 {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		time.Sleep(100 * time.Millisecond)
		if l.vs[1].Mini.Exists("k") {
			t.Error("the vote of the second node was not given back")
		}
	})
}
