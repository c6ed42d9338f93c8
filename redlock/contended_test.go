package redlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// crowd is clients, each with a driver of its own, that contend for one key.
type crowd struct {
	t       *testing.T
	vs      redistest.VirtualServers
	drivers []*driver
	number  atomic.Int64 // of tokens

	mu     sync.Mutex // guards all below
	holder string
	grants []time.Time
	served []int         // by client
	waited time.Duration // the longest
}

// trip is how long a node's answer takes.
const trip = 200 * time.Microsecond

func newCrowd(t *testing.T, nodes, clients int) *crowd {
	await.Crowd(t)
	c := &crowd{t: t, vs: redistest.VirtualNodes(t, nodes), served: make([]int, clients)}
	for range clients {
		d := drives(t, c.vs.Clients(), nil)
		c.drivers = append(c.drivers, d)
		take(t, d, claim(fmt.Sprint("its-own", len(c.drivers))))
	}
	for _, v := range c.vs {
		v.Proxy.Delay(trip)
	}
	return c
}

// claim returns a claim for the key, with a new token.
func (c *crowd) claim() backend.Claim {
	return backend.Claim{Key: "k", Token: fmt.Sprint("token", c.number.Add(1)), Owner: "me", TTL: 30 * time.Second, Timeout: time.Second}
}

// wait makes a client wait for the key, hold it and release it.
func (c *crowd) wait(ctx context.Context, i int, hold time.Duration) error {
	began, claim := time.Now(), c.claim()
	if _, err := c.drivers[i].Wait(ctx, claim); err != nil {
		return err
	}
	c.mu.Lock()
	if c.holder != "" {
		c.t.Errorf("%s holds the key, and so does %s", c.holder, claim.Token)
	}
	c.holder = claim.Token
	c.grants = append(c.grants, time.Now())
	c.waited = max(c.waited, time.Since(began))
	c.served[i]++
	c.mu.Unlock()
	time.Sleep(hold)
	c.mu.Lock()
	c.holder = ""
	c.mu.Unlock()
	return c.drivers[i].Release(ctx, claim)
}

// contend makes all clients contend until each has held the key that often. It fails the test
// if the key is free for longer than a second, or a client waits for longer than ten.
func (c *crowd) contend(times int, hold time.Duration) {
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Minute)
	defer cancel()
	commands := c.commands()
	c.grants = []time.Time{time.Now()}
	enough := make(chan struct{})
	var left atomic.Int64
	left.Store(int64(len(c.drivers)))
	var wg sync.WaitGroup
	for i := range c.drivers {
		wg.Go(func() {
			for round := 1; ; round++ {
				if err := c.wait(ctx, i, hold); err != nil {
					c.t.Errorf("client %d: %v", i, err)
					return
				}
				if round == times && left.Add(-1) == 0 {
					close(enough)
				}
				select {
				case <-enough:
					return
				case <-ctx.Done():
					return
				default:
				}
			}
		})
	}
	wg.Wait()
	n := len(c.grants) - 1
	c.t.Logf("%d acquisitions in %v, longest gap %v, longest wait %v, %.1f commands an acquisition, shares %d to %d",
		n, c.grants[n].Sub(c.grants[0]), c.gap(), c.waited, float64(c.commands()-commands)/float64(n), slices.Min(c.served), slices.Max(c.served))
	if c.gap() > time.Second || c.waited > 10*time.Second {
		c.t.Error("the key was free, or somebody waited, for too long")
	}
}

func (c *crowd) commands() (total int64) {
	for _, v := range c.vs {
		total += v.Proxy.Count()
	}
	return total
}

// gap returns the longest time without a grant.
func (c *crowd) gap() (longest time.Duration) {
	for i, at := range c.grants[1:] {
		longest = max(longest, at.Sub(c.grants[i]))
	}
	return longest
}

// Waiters get the key whatever fails on the node that contended attempts ask first.
func TestWaitersDoNotNeedTheLead(t *testing.T) {
	for name, spoil := range map[string]func(lead *redistest.VirtualServer){
		"dead":          func(lead *redistest.VirtualServer) { lead.Proxy.Down() },
		"hangs":         func(lead *redistest.VirtualServer) { lead.Proxy.Stall() },
		"slow":          func(lead *redistest.VirtualServer) { lead.Proxy.Delay(200 * time.Millisecond) },
		"has an orphan": func(lead *redistest.VirtualServer) { lead.Mini.Set("k", "somebody's") },
		"has errors":    spoilMark,
		"does not vote": func(lead *redistest.VirtualServer) { lead.Restart(false) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := newCrowd(t, 5, 5)
				c.contend(1, 0)
				spoil(c.vs[0])
				c.served, c.waited = make([]int, 5), 0
				c.contend(1, 5*time.Millisecond)
				c.vs[0].Proxy.Flow()
			})
		})
	}
}

// waits makes one client wait, runs after, and returns how long after that the client
// got the key.
func waits(t *testing.T, before, after func(c *crowd)) (late time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t, 5, 2)
		before(c)
		had := make(chan time.Time, 1)
		go func() {
			if err := c.wait(t.Context(), 0, 0); err != nil {
				t.Error(err)
			}
			had <- c.grants[0]
		}()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if len(had) > 0 {
			t.Error("a key that is held was had")
		}
		after(c)
		began := time.Now()
		late = (<-had).Sub(began)
	})
	return late
}

// holdBy puts a record on the nodes, each by one of several holders.
func holdBy(holders ...string) func(c *crowd) {
	return func(c *crowd) {
		for i, v := range c.vs {
			if h := holders[i%len(holders)]; h != "" {
				v.Mini.Set("k", h)
				v.Mini.SetTTL("k", time.Hour)
			}
		}
	}
}

func vanish(c *crowd) {
	for _, v := range c.vs {
		v.Mini.Del("k")
	}
}

func TestWaitersNoticeAnUnpublishedRelease(t *testing.T) {
	for name, before := range map[string]func(c *crowd){
		"the record of another strategy":       holdBy("somebody's"),
		"a hold whose messages are lost":       holdBy("token#owner"),
		"a vote split by those who went away":  holdBy("a#x", "b#x", "a#x", "b#x", "c#x"),
		"a hold of no more than a quorum":      holdBy("token#owner", "token#owner", "token#owner", "", ""),
		"a vote split with nodes left to take": holdBy("a#x", "b#x", "a#x", "", ""),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for range 4 { // sleeps are random
				if late := waits(t, before, vanish); late > lookEvery+20*time.Millisecond {
					t.Errorf("had after %v", late)
				}
			}
		})
	}
}

func TestWaitersAreWokenByARelease(t *testing.T) {
	for name, spoil := range map[string]func(c *crowd){
		"all well":        func(*crowd) {},
		"one node dead":   func(c *crowd) { c.vs[0].Proxy.Down() },
		"another is dead": func(c *crowd) { c.vs[4].Proxy.Down() },
		"two are dead":    func(c *crowd) { c.vs[0].Proxy.Down(); c.vs[3].Proxy.Down() },
		"one hangs":       func(c *crowd) { c.vs[0].Proxy.Stall() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var claim backend.Claim
			late := waits(t, func(c *crowd) {
				claim = c.claim()
				take(c.t, c.drivers[1], claim)
				time.Sleep(time.Second) // for the votes beyond the quorum
				spoil(c)
			}, func(c *crowd) {
				if err := c.drivers[1].Release(c.t.Context(), claim); err != nil {
					t.Errorf("release: %v", err)
				}
				for _, v := range c.vs {
					v.Proxy.Flow()
				}
			})
			if late > 25*time.Millisecond {
				t.Errorf("had %v after the release", late)
			}
		})
	}
}

// A waiter that may not subscribe asks for it once a second, and finds the release by polling.
func TestARefusedSubscriptionIsNotRepeatedAtEachLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t, 3, 2)
		holder := c.claim()
		take(t, c.drivers[1], holder)
		for _, v := range c.vs {
			v.Proxy.Answer("subscribe ", "-NOPERM this user has no permissions to access one of the channels\r\n")
			v.Proxy.Commands()
		}
		had := make(chan error, 1)
		go func() { had <- c.wait(t.Context(), 0, 0) }()
		time.Sleep(10 * time.Second)
		asked := 0
		for _, v := range c.vs {
			for _, command := range v.Proxy.Commands() {
				if strings.HasPrefix(command, "subscribe ") {
					asked++
				}
			}
		}
		if asked < 5 || asked > 12 {
			t.Errorf("asked %d times in 10 s", asked)
		}

		if err := c.drivers[1].Release(t.Context(), holder); err != nil {
			t.Error(err)
		}
		began := time.Now()
		if err := <-had; err != nil || time.Since(began) > 2*maxPoll {
			t.Errorf("had after %v: %v", time.Since(began), err)
		}
	})
}

func TestAWaitThatEndsReportsTheHolder(t *testing.T) {
	try(t, 5, nil, func(t *testing.T, tr trial) {
		holder := aClaim("k")
		tr.acquire(t, tr.direct(t, nil), holder)
		for i := range 6 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i+1)*300*time.Millisecond)
			defer cancel()
			_, err := tr.d.Wait(ctx, aClaim("k"))
			if held, ok := err.(*backend.HeldError); !ok || held.Owner != holder.Owner || held.RetryAfter <= 0 {
				t.Errorf("wait %d: got %#v", i, err)
			}
		}
	})
}

// Waiters get the key of a set with fewer nodes than a safe set needs.
func TestWaitOnFewNodes(t *testing.T) {
	for n := 1; n <= 2; n++ {
		try(t, n, &Options{AllowUnsafeNodes: true}, func(t *testing.T, tr trial) {
			held := aClaim("k")
			tr.acquire(t, tr.d, held)
			w := startWait(t.Context(), tr.direct(t, &Options{AllowUnsafeNodes: true}), aClaim("k"))
			time.Sleep(time.Second)
			tr.release(t, tr.d, held)
			<-w.done
			if w.err != nil {
				t.Errorf("wait on %d nodes: %v", n, w.err)
			}
		})
	}
}

// If a majority is away and the lead has a record, Acquire reports an outage and
// not a refusal.
func TestAcquireWithoutAMajorityIsAnOutage(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		for _, v := range tr.vs {
			elsewhere(t, v, "k")
		}
		if _, err := tr.d.Acquire(t.Context(), aClaim("k")); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("got %v, want ErrHeld", err)
		}
		synctest.Wait()
		tr.each("12", func(v *redistest.VirtualServer) { v.Proxy.Down() })
		_, err := tr.d.Acquire(t.Context(), aClaim("k")) // which asks the lead first, after that refusal
		isOutage(t, "acquire", err, "12")
	})
}
