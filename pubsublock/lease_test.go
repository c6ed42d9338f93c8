package pubsublock_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/pubsublock"
)

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

// waitOn makes a caller wait for the key, and returns when it waits. The outcome comes
// later.
func waitOn(t *testing.T, r rig, c *hasp.Client) <-chan error {
	t.Helper()
	const channel = "redisson_lock__channel:{k}"
	done := make(chan error, 1)
	go func() {
		lease, err := c.Lock(t.Context(), "k")
		if err == nil {
			err = lease.Unlock(t.Context())
		}
		done <- err
	}()
	eventually(t, "a waiter listens", func() bool { return r.Redis.PubSubNumSub(t.Context(), channel).Val()[channel] > 0 })
	return done
}

func arrives(t *testing.T, what string, done <-chan error) {
	t.Helper()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	case <-time.After(time.Minute):
		t.Fatalf("%s: still waiting", what)
	}
}

func byURL(t *testing.T, srv *redistest.Server) *hasp.Client {
	t.Helper()
	c, err := hasp.Open(t.Context(), "pubsublock+"+srv.URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// A user without the right to the channels can lock, wait and unlock.
func TestUserWithoutChannels(t *testing.T) {
	t.Parallel()
	r := setup(t, &redistest.Options{Own: true, Real: true})
	if err := r.Redis.Do(t.Context(), "acl", "setuser", "ann", "on", ">pw", "~*", "resetchannels", "+@all").Err(); err != nil {
		t.Fatal(err)
	}
	p := r.Server.Proxy()
	o := r.Server.ClientOptions()
	o.Addr, o.Username, o.Password, o.ContextTimeoutEnabled = p.Addr(), "ann", "pw", true
	rdb := redis.NewClient(o)
	defer rdb.Close()
	ann := await.Value(pubsublock.New(rdb, nil))
	defer ann.Close()
	other := byURL(t, r.Server)

	lease := lock(t, ann)
	done := waitOn(t, r, other)
	unlock(t, lease) // tells nobody
	arrives(t, "behind ann", done)
	for _, free := range []func(c *hasp.Client, lease *hasp.Lease) error{
		func(_ *hasp.Client, lease *hasp.Lease) error { return lease.Unlock(t.Context()) },
		func(c *hasp.Client, _ *hasp.Lease) error { return c.Break(t.Context(), "k") },
	} {
		lease = lock(t, other)
		done, asked := make(chan error, 1), p.Count()
		go func() {
			lease, err := ann.Lock(t.Context(), "k")
			if err == nil {
				err = ann.Break(t.Context(), "k")
				lease.Unlock(t.Context())
			}
			done <- err
		}()
		eventually(t, "ann asks", func() bool { return p.Count() > asked+1 })
		if err := free(other, lease); err != nil {
			t.Error(err)
		}
		arrives(t, "ann", done)
	}
}

// Each Client has one caller, which locks the key again right after its Unlock. It does
// not take the key before the callers whom the release has woken.
func TestCallersThatComeBackTakeTurns(t *testing.T) {
	const clients, turns = 4, 160
	srv := redistest.Start(t, &redistest.Options{Real: true})
	shares := make([]int, clients)
	var all atomic.Int32
	var wg sync.WaitGroup
	for i := range clients {
		c := byURL(t, srv)
		wg.Go(func() {
			for all.Add(1) <= turns {
				l, err := c.Lock(t.Context(), t.Name())
				if err != nil {
					t.Error(err)
					return
				}
				shares[i]++
				time.Sleep(10 * time.Millisecond)
				if err := l.Unlock(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("turns of each caller: %v", shares)
	for i, n := range shares {
		if n < turns/clients/2 {
			t.Errorf("caller %d got %d of %d turns", i, n, turns)
		}
	}
}
