package etcdlock_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/etcdlock"
	"github.com/hasplock/hasp/internal/await"
)

// Calls that found no connection leave nothing to clean up.
func TestNothingSentNothingToEnd(t *testing.T) {
	t.Parallel()
	link := linkTo(t, startServers(t, 1)[0].Client)
	d := openDriver(t, link.Store)
	link.Set(conformance.Down)
	await.Until(t, "calls that leave nothing", func() bool {
		before := d.Burials() // of calls whose connection was cut
		for range 20 {
			if _, err := acquire(d, claimFor("key", time.Hour)); err == nil {
				t.Fatal("acquired a key without etcd")
			}
		}
		return d.Burials() <= before
	})
}

// However many callers there are, few of their calls are under way at once, and few of the
// clean-up.
func TestCallsAtOnce(t *testing.T) {
	t.Parallel()
	d, meddler := openMeddled(t, startServers(t, 1)[0].Client, nil)
	const callers, most = 200, 64
	var mu sync.Mutex
	now, peak := map[string]int{}, map[string]int{}
	gates := map[string]chan struct{}{"LeaseGrant": make(chan struct{}), "LeaseRevoke": make(chan struct{})}
	meddler.set(func(method string) error {
		mu.Lock()
		now[method]++
		peak[method] = max(peak[method], now[method])
		mu.Unlock()
		if gate := gates[method]; gate != nil {
			<-gate
		}
		mu.Lock()
		now[method]--
		mu.Unlock()
		return nil
	}, failing("Txn", lost))
	blocked := func(method string) {
		await.Until(t, "calls of "+method, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return now[method] >= most
		})
		close(gates[method])
	}

	var wg sync.WaitGroup
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for i := range callers {
		wg.Go(func() { _, _ = d.Acquire(ctx, claimFor(fmt.Sprint("key-", i), 5*time.Minute)) })
	}
	blocked("LeaseGrant")
	wg.Wait()
	blocked("LeaseRevoke") // of the leases whose puts have no known outcome
	await.Until(t, "the end of the clean-up", func() bool { return d.Burials() == 0 })
	for _, method := range []string{"LeaseGrant", "Txn", "LeaseRevoke"} {
		if peak[method] > most {
			t.Errorf("%d calls of %s at once, want %d at most", peak[method], method, most)
		}
	}
}

// While no member answers, and while the password is wrong, the driver asks again after pauses that
// grow to a second.
func TestPauses(t *testing.T) {
	t.Parallel()
	few := func(t *testing.T, what string, d *etcdlock.Driver, count func() float64) {
		t.Helper()
		before, began := count(), time.Now()
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				for time.Since(began) < 4*time.Second {
					if _, err := acquire(d, claimFor(fmt.Sprint("pause-", i), time.Minute)); err == nil {
						t.Error("acquired a key")
					}
					time.Sleep(10 * time.Millisecond)
				}
			})
		}
		wg.Wait()
		most := 2 * (5 + time.Since(began).Seconds()) // after 0.1, 0.2, 0.4, 0.8 s, and so on; a search may ask twice
		if n := count() - before; n < 2 || n > most {
			t.Errorf("%v %s, want 2 to %v", n, what, most)
		}
	}
	t.Run("connections", func(t *testing.T) {
		t.Parallel()
		var made atomic.Int64
		d := await.Value(etcdlock.NewDriver(clientv3.Config{Endpoints: []string{serve(t, func(net.Conn) { made.Add(1) })}}, nil)).(*etcdlock.Driver)
		t.Cleanup(func() { d.Close() })
		few(t, "connections", d, func() float64 { return float64(made.Load()) })
	})
	t.Run("passwords", func(t *testing.T) {
		t.Parallel()
		s := startServers(t, 1)[0]
		root := enableUsers(t, s)
		d := openDriver(t, "joe:hunter2@"+s.Client)
		await.Value(root.UserChangePassword(t.Context(), "joe", "another"))
		few(t, "passwords", d, func() float64 { return metric(t, s, `grpc_server_started_total\{grpc_method="Authenticate".*`) })
	})
}

// TestManyKeysWaitedFor waits for more keys than the server allows streams for each connection.
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

// However many holds and waits there are, etcd checks the password once for each connection.
func TestPasswordChecks(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)[0]
	enableUsers(t, s)
	a, b := openDriver(t, "joe:hunter2@"+s.Client), openDriver(t, "joe:hunter2@"+s.Client)
	checks := func() float64 { return metric(t, s, `grpc_server_started_total\{grpc_method="Authenticate".*`) }
	var cs []backend.Claim
	for i := range 64 {
		cs = append(cs, take(t, a, fmt.Sprint("key-", i), 5*time.Minute))
	}
	for range 3 {
		for i, err := range renewAll(t.Context(), a, cs) {
			if err != nil {
				t.Errorf("renewal of hold %d: %v", i, err)
			}
		}
	}
	for range 10 {
		handOver(t, a, b, func(backend.Claim) {})
	}
	if n := checks(); n < 3 || n > 9 {
		t.Errorf("%v password checks, want 3 to 9", n) // root and both drivers, which may connect again
	}
}
