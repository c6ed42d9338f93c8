package pubsublock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
	"github.com/hasplock/hasp/pubsublock"
)

// These tests run in virtual time, so their durations are exact.

// bubble runs f with two drivers on one Redis. The first uses the proxy.
func bubble(t *testing.T, f func(t *testing.T, v *redistest.VirtualServer, a, b rig)) {
	synctest.Test(t, func(t *testing.T) {
		v := redistest.Virtual(t)
		a, b := over(t, v.Client()), over(t, v.Direct())
		f(t, v, a, b)
	})
}

// over returns a driver over rdb, with a Client.
func over(t *testing.T, rdb *redis.Client) rig {
	d := open(rdb)
	c := await.Value(hasp.New(d, &hasp.Options{TTL: term, Timeout: 3 * time.Second}))
	t.Cleanup(func() { c.Close() })
	return rig{strategytest.Rig[Driver]{Redis: rdb, Driver: d}, c}
}

// waiter is a Lock in progress.
type waiter struct {
	stop  context.CancelFunc
	done  chan struct{}
	lease *hasp.Lease // these after done
	err   error
	at    time.Time
}

// wait begins a Lock, and returns when it sleeps.
func (r rig) wait(t *testing.T, key string, opts ...hasp.Option) *waiter {
	ctx, stop := context.WithCancel(t.Context())
	t.Cleanup(stop)
	w := &waiter{stop: stop, done: make(chan struct{})}
	go func() {
		w.lease, w.err = r.client.Lock(ctx, key, opts...)
		w.at = time.Now()
		close(w.done)
	}()
	synctest.Wait()
	return w
}

// granted fails the test unless the key was granted between from and to after the moment since.
func (w *waiter) granted(t *testing.T, since time.Time, from, to time.Duration) {
	t.Helper()
	<-w.done
	if w.err != nil {
		t.Fatalf("lock: %v", w.err)
	}
	if d := w.at.Sub(since); d < from || d > to {
		t.Errorf("granted after %v, want %v to %v", d, from, to)
	}
}

func (w *waiter) waits(t *testing.T) {
	t.Helper()
	synctest.Wait()
	if w.ended() {
		t.Fatalf("the wait has ended: %v", w.err)
	}
}

func (w *waiter) ended() bool {
	select {
	case <-w.done:
		return true
	default:
		return false
	}
}

// leave ends a Lock that still waits.
func (w *waiter) leave() { w.stop(); <-w.done }

// A Client that has just had a key leaves it to those that waited meanwhile. If they have
// left, its delay is short, and ends before its wait does.
func TestDelayOfAClientThatHadTheKey(t *testing.T) {
	for _, left := range []time.Duration{time.Minute, 5 * time.Millisecond} {
		bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
			first := claim("k")
			a.Acquire(t, first)
			all := []*waiter{b.wait(t, "k"), over(t, v.Direct()).wait(t, "k"), over(t, v.Direct()).wait(t, "k")}

			// One of three takes the key, and the other two leave.
			a.Release(t, first)
			holder := slices.IndexFunc(all, func(w *waiter) bool {
				time.Sleep(time.Millisecond)
				return w.ended()
			})
			w := a.wait(t, "k", hasp.WithMaxWait(time.Second+left))
			for i, o := range all {
				if i != holder {
					o.leave()
				}
			}
			time.Sleep(time.Second)
			began := time.Now()
			unlock(t, all[holder].lease)
			w.granted(t, began, min(left, 10*time.Millisecond)-2*time.Millisecond, min(left, 30*time.Millisecond))
			unlock(t, w.lease)
		})
	}
}

// Redis wakes the Clients that wait for a key in the same order each time, as these links
// do: one is slower than the other. The Clients take turns nevertheless, also if the last
// holder wants the key again at once, and not only when the next one has it.
func TestClientsOfACrowdTakeTurns(t *testing.T) {
	for _, c := range []struct{ atOnce, ahead bool }{{}, {atOnce: true}, {atOnce: true, ahead: true}} {
		synctest.Test(t, func(t *testing.T) {
			const clients, turns = 6, 120
			v := redistest.Virtual(t)
			var rivals []rig
			all := make([]*waiter, clients)
			granted := make(chan int, clients)
			wait := func(i int) {
				w := rivals[i].wait(t, "k")
				go func() { <-w.done; granted <- i }()
				all[i] = w
			}
			for i := range clients {
				rdb, link := v.Link()
				link.Delay(time.Duration(i+1) * 100 * time.Microsecond)
				rivals = append(rivals, over(t, rdb))
			}
			first, direct := claim("k"), over(t, v.Direct())
			if c.ahead {
				wait(0) // no store has refused this Client
				time.Sleep(10 * time.Millisecond)
			} else {
				direct.Acquire(t, first)
				wait(0)
			}
			for i := range clients - 1 {
				wait(i + 1)
			}
			time.Sleep(20 * time.Millisecond) // until all others have been refused
			if !c.ahead {
				direct.Release(t, first)
			}

			wins, holder := make([]int, clients), <-granted
			lease := all[holder].lease
			for range turns {
				time.Sleep(20 * time.Millisecond)
				unlock(t, lease)
				last := holder
				if c.atOnce {
					wait(last)
				}
				holder = <-granted
				if !c.atOnce {
					wait(last)
				}
				await.Must(t, all[holder].err)
				wins[holder]++
				lease = all[holder].lease
			}
			for _, w := range all {
				w.stop()
			}
			unlock(t, lease)
			t.Logf("turns of each Client: %v", wins)
			for i, n := range wins {
				if n < turns/clients/2 {
					t.Errorf("%+v: Client %d got %d of %d turns", c, i, n, turns)
				}
			}
		})
	}
}

// On a cluster of Redis 7 a release is published on Redisson's sharded channel.
func TestReleasesOnAClusterArePublishedSharded(t *testing.T) {
	t.Parallel()
	set := redistest.StartCluster(t, &redistest.Options{Bare: true})
	const key, name = "orders", "free:{orders}"
	var addrs []string
	for _, srv := range set.Servers {
		addrs = append(addrs, srv.Addr)
	}
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
	defer rdb.Close()
	sharded := rdb.SSubscribe(t.Context(), name)
	defer sharded.Close()
	await.Value(sharded.Receive(t.Context()))

	d := await.Value(pubsublock.NewDriver(rdb, &pubsublock.Options{Channel: "free"})).(Driver)
	for _, free := range []func(backend.Claim) error{
		func(c backend.Claim) error { return d.Release(t.Context(), c) },
		func(c backend.Claim) error { return d.Break(t.Context(), c.Key) },
	} {
		c := claim(key)
		await.Value(d.Acquire(t.Context(), c))
		await.Must(t, free(c))
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		if m, err := sharded.ReceiveMessage(ctx); err != nil || m.Channel != name || m.Payload != "0" {
			t.Errorf("got %v, %v", m, err)
		}
		cancel()
	}
}

// A hold of the key costs each process three commands at most, however many callers wait
// there: an attempt after each release, and its own release.
func TestCommandsPerContendedAcquisition(t *testing.T) {
	for _, shape := range []struct{ processes, callers, rounds int }{{2, 1, 15}, {4, 1, 8}, {4, 8, 5}, {8, 1, 4}} {
		t.Run(fmt.Sprint(shape.processes, " processes of ", shape.callers), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				v := redistest.Virtual(t)
				var holds atomic.Int64
				var wg sync.WaitGroup
				var clients []*hasp.Client
				for range shape.processes {
					c := await.Value(pubsublock.New(v.Client(), nil))
					defer c.Close()
					clients = append(clients, c)
					unlock(t, lock(t, c)) // scripts and connections are there from now on
				}
				before := v.Proxy.Count()
				for _, c := range clients {
					for range shape.callers {
						wg.Go(func() {
							for range shape.rounds {
								lease := lock(t, c)
								holds.Add(1)
								time.Sleep(10 * time.Millisecond)
								unlock(t, lease)
							}
						})
					}
				}
				wg.Wait()
				used := v.Proxy.Count() - before
				each := float64(used) / float64(holds.Load()*int64(shape.processes))
				t.Logf("%d commands for %d holds: %.2f a hold and process", used, holds.Load(), each)
				if each > 3 {
					t.Error("more than 3")
				}
			})
		})
	}
}

// A user without the right to the channels can lock, wait and unlock. It wakes no caller, and no
// message wakes it.
func TestUserWithoutChannels(t *testing.T) {
	t.Parallel()
	r := setup(t, redistest.Real)
	r.Do(t, "acl", "setuser", "ann", "on", ">pw", "~*", "resetchannels", "+@all")
	p := r.Server.Proxy()
	client := func(user, password string) *hasp.Client {
		o := r.Server.ClientOptions()
		o.Addr, o.Username, o.Password = p.Addr(), user, password
		rdb := redis.NewClient(o)
		t.Cleanup(func() { rdb.Close() })
		return over(t, rdb).client
	}
	both := []*hasp.Client{client("ann", "pw"), client("", "")}
	for what, free := range map[string]func(c *hasp.Client, l *hasp.Lease) error{
		"Unlock": func(_ *hasp.Client, l *hasp.Lease) error { return l.Unlock(t.Context()) },
		"Break":  func(c *hasp.Client, _ *hasp.Lease) error { return c.Break(t.Context(), "k") },
	} {
		for i, holder := range both {
			held := lock(t, holder)
			asked, done := p.Count(), make(chan error, 1)
			go func() {
				lease, err := both[1-i].Lock(t.Context(), "k", hasp.WithMaxWait(time.Minute))
				if err == nil {
					err = lease.Unlock(t.Context())
				}
				done <- err
			}()
			eventually(t, "the other asks", func() bool { return p.Count() > asked+1 })
			if err := errors.Join(free(holder, held), <-done); err != nil {
				t.Errorf("%s, holder %d: %v", what, i, err)
			}
		}
	}
}

// A release reports that nobody waits if its message has reached nobody. If it may not send the
// message, it does not know.
func TestReleaseThatNobodyHears(t *testing.T) {
	t.Parallel()
	r := setup(t, redistest.Real)
	unheard := func(d Driver) bool {
		c := claim("k")
		c.Unheard = new(atomic.Bool)
		r.Acquire(t, c)
		await.Must(t, d.Release(t.Context(), c))
		return c.Unheard.Load()
	}
	if !unheard(r.Driver) {
		t.Error("nobody listens")
	}
	r.Do(t, "acl", "setuser", "ann", "on", ">pw", "~*", "resetchannels", "+@all")
	o := r.Server.ClientOptions()
	o.Username, o.Password = "ann", "pw"
	rdb := redis.NewClient(o)
	defer rdb.Close()
	if unheard(open(rdb)) {
		t.Error("no message was sent")
	}
	_, stop, err := r.Driver.Listen(t.Context(), claim("k"))
	await.Must(t, err)
	defer stop()
	if unheard(r.Driver) {
		t.Error("a caller listens")
	}
}
