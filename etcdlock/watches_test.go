package etcdlock_test

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

// TestManyKeysWaitedFor waits for more keys than the server allows streams for each
// connection.
func TestManyKeysWaitedFor(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1, "--max-concurrent-streams", "100")[0]
	holder, waiter := openDriver(t, s.client), openDriver(t, s.client)

	var held []backend.Claim
	var waits []waiting
	for i := range 300 {
		key := fmt.Sprint("many-", i)
		held = append(held, take(t, holder, key, 5*time.Minute))
		waits = append(waits, wants(t, waiter, key))
	}
	for _, c := range held {
		queued(t, holder, c.Key, 1)
	}
	if err := release(waiter, take(t, waiter, "another", time.Minute)); err != nil {
		t.Error(err)
	}
	for i, c := range held {
		if err := release(holder, c); err != nil {
			t.Error(err)
		}
		if err := release(waiter, waits[i].granted(t)); err != nil {
			t.Error(err)
		}
	}
}

// TestMemoryOfWaiters compares the memory of few waiters for a key with that of many. Each
// one's must not grow with their number.
func TestMemoryOfWaiters(t *testing.T) {
	s := startServers(t, 1)[0]
	holder := openDriver(t, s.client)
	each := func(n int) float64 {
		d := openDriver(t, s.client)
		key := fmt.Sprint("memory-", n)
		take(t, holder, key, 5*time.Minute)
		heap := func() float64 {
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return float64(m.HeapAlloc + m.StackInuse)
		}
		before := heap()
		for range n {
			wants(t, d, key)
		}
		queued(t, holder, key, n)
		eventually(t, "the reads of the waiters", func() error {
			if k := d.Behind(); k < n {
				return fmt.Errorf("%d of %d", k, n)
			}
			return nil
		})
		return (heap() - before) / float64(n)
	}
	few, many := each(150), each(900)
	t.Logf("%.0f bytes for each of 150 waiters, %.0f for each of 900", few, many)
	if many > 2*few {
		t.Errorf("%.0f bytes for each of 150 waiters, %.0f for each of 900: want as much, or less than twice that", few, many)
	}
}
