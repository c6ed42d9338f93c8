package redlock

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
)

// line is waiters of one key that arrive one after another, each with a driver of its
// own. The first caller holds the key.
type line struct {
	*crowd
	holder  backend.Claim
	cancels []context.CancelFunc
	wg      sync.WaitGroup

	mu     sync.Mutex // guards served
	served []int      // the waiters, in the order of their grants
}

func newLine(t *testing.T, nodes, waiters int) *line {
	l := &line{crowd: newCrowd(t, nodes, waiters+1), holder: aClaim("k")}
	for _, cr := range l.callers {
		for _, n := range cr.m.nodes {
			n.latency.Store(int64(trip)) // all have the same lead
		}
	}
	l.acquire(l.holder)
	for i := 1; i <= waiters; i++ {
		ctx, cancel := context.WithCancel(t.Context())
		l.cancels = append(l.cancels, cancel)
		l.wg.Go(func() {
			claim := aClaim("k")
			if _, err := l.callers[i].Wait(ctx, claim); err != nil {
				if ctx.Err() == nil {
					t.Errorf("waiter %d: %v", i, err)
				}
				return
			}
			l.mu.Lock()
			l.served = append(l.served, i)
			l.mu.Unlock()
			l.callers[i].release(claim)
		})
		time.Sleep(100 * time.Millisecond) // the next one arrives later
	}
	return l
}

// serve releases the key and waits for the others. It fails the test unless those get the key whom
// order lists, after a time from least to most.
func (l *line) serve(least, most time.Duration, order ...int) {
	l.Helper()
	began := time.Now()
	l.release(l.holder)
	l.wg.Wait()
	if took := time.Since(began); took < least || took > most || !slices.Equal(l.served, order) {
		l.Errorf("served %v after %v, want %v", l.served, took, order)
	}
}

// Waiters keep their order if the lead dies, hangs, is emptied or becomes slow.
func TestWaitersGetTheKeyInOrder(t *testing.T) {
	for name, spoil := range map[string]disturb{
		"all well":            flow,
		"the lead dies":       down,
		"the lead hangs":      hang,
		"the lead is emptied": empty,
		"the lead is slow":    delay(200 * time.Millisecond),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				l := newLine(t, 3, 8)
				time.Sleep(time.Second)
				spoil(l.vs[0])
				time.Sleep(2 * time.Second)
				l.serve(0, 3*time.Second, 1, 2, 3, 4, 5, 6, 7, 8)
				l.each("0", flow)
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
		l.wants("close", l.callers[2].Close(), nil)
		time.Sleep(time.Millisecond)
		l.serve(0, 10*time.Millisecond, 3)
		time.Sleep(time.Second)
		for i, v := range l.vs {
			if keys := fmt.Sprint(v.Mini.Keys()); strings.Contains(keys, ":turns:") || strings.Contains(keys, ":looks:") {
				t.Errorf("node %d keeps %s", i, keys)
			}
		}
	})
}

// A release wakes a waiter that leaves before the message arrives. It passes the message on.
func TestAWaiterThatLeavesAfterTheReleaseWakesTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLine(t, 3, 2)
		time.AfterFunc(trip/2, l.cancels[0])
		l.serve(0, 10*time.Millisecond, 2)
		if !l.ct.isContended("k") {
			t.Error("the holder has not learned from its release that others wait")
		}
	})
}

// A free key is not refused for the place of a waiter that does not take it.
func TestAcquireDoesNotWaitForADeadWaiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLine(t, 3, 0)
		l.refused(aClaim("k")) // so the next one asks the lead first
		now := float64(time.Now().UnixMilli())
		l.each("012", func(v *server) {
			await.Value(v.Mini.ZAdd(keysOf("k")[1], now, "dead"))
			await.Value(v.Mini.ZAdd(keysOf("k")[2], now, "dead"))
		})
		l.serve(0, trip)
		time.Sleep(10 * trip) // until the lead has released it as well
		began := time.Now()
		l.acquire(aClaim("k"))
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("got the key after %v", took)
		}
	})
}

// A free key is not refused because two nodes still have a record of the last hold while a
// third one is late.
func TestAcquireSeesThroughALateNode(t *testing.T) {
	try(t, 5, func(tr trial) {
		tr.each("0134", delay(trip))
		tr.put("01", "k", token+"#", time.Minute)
		tr.each("2", delay(25*time.Millisecond))
		time.AfterFunc(30*time.Millisecond, func() { tr.lose("01", "k") })
		tr.acquire(aClaim("k"))
	})
}

// A caller that releases a key after a long hold and wants it again at once comes after
// those who wait, also if the lead answers later than the others.
func TestAcquireLetsWaitersPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLine(t, 3, 1)
		time.Sleep(time.Second)
		l.each("0", delay(10*trip))
		l.release(l.holder)
		err := l.ask(aClaim("k"))
		l.mu.Lock()
		served := len(l.served) == 1 // then the waiter has released the key already
		l.mu.Unlock()
		if !served {
			l.wants("acquire", err, backend.ErrHeld)
		}
		l.wg.Wait() // its release must not end with the test's context
		if err != nil {
			synctest.Wait()
			l.acquire(aClaim("k")) // nobody waits any more
		}
	})
}
