package etcdlock_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/etcdlock"
	"github.com/hasplock/hasp/internal/await"
)

// Calls that found no connection leave nothing to clean up.
func TestNothingSentNothingToEnd(t *testing.T) {
	t.Parallel()
	link := linkTo(t, startOne(t))
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
// clean-up. Calls that have failed take no room from later ones.
func TestCallsAtOnce(t *testing.T) {
	t.Parallel()
	d, meddler := openMeddled(t, startOne(t), nil)
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
		ask := d.Acquire
		if i%2 > 0 {
			ask = d.Wait
		}
		// A transaction has one change of a key, so the callers take many of them.
		key := fmt.Sprint("key-", i%8)
		wg.Go(func() { _, _ = ask(ctx, claimFor(key, long)) })
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
	meddler.set(nil, nil)
	free(t, d, take(t, d, "later", time.Minute))
	free(t, d, wants(t, d, "later").granted(t))
}

// While no member answers, and while the password is wrong, the driver asks again after pauses that
// grow to a second. While all goes well, it checks the password once for each connection, however
// many holds and waits there are.
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
		checks := func() float64 { return metric(t, s, `grpc_server_started_total\{grpc_method="Authenticate".*`) }
		a, b := openDriver(t, "joe:hunter2@"+s.Client), openDriver(t, "joe:hunter2@"+s.Client)
		var cs []backend.Claim
		for i := range 64 {
			cs = append(cs, take(t, a, fmt.Sprint("key-", i), long))
		}
		for i, err := range renewAll(t.Context(), a, cs) {
			if err != nil {
				t.Errorf("renewal of hold %d: %v", i, err)
			}
		}
		for range 10 {
			handOver(t, a, b, func(backend.Claim) {})
		}
		if n := checks(); n < 3 || n > 9 {
			t.Errorf("%v password checks, want 3 to 9", n) // root and both drivers, which may connect again
		}

		await.Value(root.UserChangePassword(t.Context(), "joe", "another"))
		few(t, "passwords", a, checks)
	})
}

// TestManyKeysWaitedFor waits for more keys than the server allows streams for each connection. After
// a while without use, neither leases nor watches are left.
func TestManyKeysWaitedFor(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1, "--max-concurrent-streams", "100")[0]
	holder, waiter := openDriver(t, s.Client), openDriver(t, s.Client)

	var held []backend.Claim
	var waits []waiting
	for i := range 120 {
		key := fmt.Sprint("many-", i)
		held = append(held, take(t, holder, key, long))
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
	await.Until(t, "the end of unused leases and watches", func() bool {
		return holder.Idle()+waiter.Idle() == 0 && metric(t, s, "etcd_debugging_mvcc_watcher_total") == 0
	})
}
