package etcdlock_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/etcdlock"
)

// TestManyKeysWaitedFor waits for more keys than the server allows streams for each
// connection.
func TestManyKeysWaitedFor(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1, "--max-concurrent-streams", "100")[0]
	holder, waiter := openDriver(t, s.Client), openDriver(t, s.Client)

	var held []backend.Claim
	var waits []waiting
	for i := range 120 {
		key := fmt.Sprint("many-", i)
		held = append(held, take(t, holder, key, 5*time.Minute))
		waits = append(waits, wants(t, waiter, key))
	}
	for _, c := range held {
		queued(t, holder, c.Key, 1)
	}
	free(t, waiter, take(t, waiter, "another", time.Minute))
	for i, c := range held {
		free(t, holder, c)
		free(t, waiter, waits[i].granted(t))
	}
}

// The event of a release is lost. The waiter finds out.
func TestLostEvent(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)[0]
	d, m := openMeddled(t, s.Client, nil)
	h := openDriver(t, s.Client)
	handOver(t, h, d, func(backend.Claim) {
		m.changing(func(msg any) {
			if r, ok := msg.(*pb.WatchResponse); ok {
				r.Events = nil
			}
		})
	})
}

// TestMemoryOfWaiters compares the memory of few waiters for a key with that of many. Each
// one's must not grow with their number.
func TestMemoryOfWaiters(t *testing.T) {
	s := startServers(t, 1)[0]
	holder := openDriver(t, s.Client)
	each := func(n int) float64 {
		d, _ := openMeddled(t, s.Client, &etcdlock.Options{Window: 5 * time.Minute}) // a busy machine takes long
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
			c := claimFor(key, 5*time.Minute)
			c.Timeout = patience
			wantsAs(t, d, c)
		}
		eventually(t, "the reads of the waiters", func() error {
			if k := d.Behind(); k < n {
				return fmt.Errorf("%d of %d", k, n)
			}
			return nil
		})
		return (heap() - before) / float64(n)
	}
	few, many := each(100), each(600)
	t.Logf("%.0f bytes for each of 100 waiters, %.0f for each of 600", few, many)
	if many > 2*few {
		t.Errorf("%.0f bytes for each of 100 waiters, %.0f for each of 600: want as much, or less than twice that", few, many)
	}
}

// TestRefusedWatch takes the user's right away. The driver must not ask for a watch all the
// time.
func TestRefusedWatch(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)[0]
	root := enableUsers(t, s)
	d := openDriver(t, "joe:hunter2@"+s.Client)
	musts(t)(root.UserRevokeRole(context.Background(), "joe", "locks"))

	const most = 24 // 20 ms, 40 ms, 80 ms and so on up to 1 s make 10 in 5 s, of two messages each
	asked := func() float64 { return metric(t, s, `grpc_server_msg_received_total\{grpc_method="Watch".*`) }
	before := asked()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	c := claimFor("refused", time.Minute)
	c.Timeout = time.Minute
	if _, err := d.Wait(ctx, c); err == nil {
		t.Error("a Wait without the right was granted")
	}
	if n := asked() - before; n < 2 || n > most {
		t.Errorf("%v requests for a watch that is refused, want 2 to %d", n, most)
	}
}
