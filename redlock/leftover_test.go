package redlock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

// keepsTerms is a term that no test outlasts: a record that is gone was released, and
// has not expired.
const keepsTerms = 90 * time.Second

// rounds are locks, attempts, cancelled waits and unlocks of several clients at once.
type rounds struct {
	clients []*hasp.Client
	each    int                  // of each client
	pause   func() time.Duration // between the steps of a round
	keys    int
	waits   bool // a Lock waits; else it is cut short as an attempt

	granted, refused, cut, outages atomic.Int64
}

// run returns when all rounds are over. Until then it disturbs the proxies.
func (r *rounds) run(t *testing.T, proxies []*faultproxy.Proxy, pause func() time.Duration) {
	var wg sync.WaitGroup
	for _, c := range r.clients {
		wg.Go(func() {
			for range r.each {
				r.round(t.Context(), c)
			}
		})
	}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		disturb(proxies, pause, stop)
	}()
	wg.Wait()
	close(stop)
	<-done
	for _, p := range proxies {
		p.Delay(0)
	}
	t.Logf("%d granted, %d refused, %d cut short, %d outages", r.granted.Load(), r.refused.Load(), r.cut.Load(), r.outages.Load())
}

func (r *rounds) round(ctx context.Context, c *hasp.Client) {
	key := fmt.Sprint("k", rand.IntN(r.keys))
	var opts []hasp.Option
	if rand.IntN(4) == 0 {
		opts = append(opts, hasp.WithFence())
	}
	var lease *hasp.Lease
	var err error
	lock := c.TryLock
	if r.waits {
		lock = c.Lock
	}
	switch rand.IntN(4) {
	case 0:
		lease, err = c.TryLock(ctx, key, opts...)
	case 1, 2:
		within, cancel := context.WithTimeout(ctx, r.pause())
		defer cancel()
		lease, err = lock(within, key, opts...)
	case 3:
		within, cancel := context.WithCancel(ctx)
		defer cancel()
		defer time.AfterFunc(r.pause(), cancel).Stop()
		lease, err = lock(within, key, opts...)
	}
	switch {
	case err == nil:
		r.granted.Add(1)
		time.Sleep(r.pause())
		if rand.IntN(4) == 0 {
			_ = lease.Extend(ctx, keepsTerms)
		}
		_ = lease.Unlock(ctx)
	case errors.Is(err, hasp.ErrHeld):
		r.refused.Add(1)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		r.cut.Add(1)
	default:
		r.outages.Add(1)
	}
}

// disturb disturbs one node after another until stop is closed, so that a majority is
// well most of the time. It holds no command for longer than another timeout after the
// client has given it up.
func disturb(proxies []*faultproxy.Proxy, pause func() time.Duration, stop <-chan struct{}) {
	for {
		for _, p := range proxies {
			p.Release() // what came to be held since
		}
		p := proxies[rand.IntN(len(proxies))]
		heal := func() {}
		switch rand.IntN(7) {
		case 0:
			p.Delay(pause() / 8) // of each reply
		case 1:
			p.Stall()
			heal = p.Flow
		case 2:
			p.Down()
			heal = p.Up
		case 3:
			p.Cut()
		case 4:
			p.Fail("k", faultproxy.LoseReply)
		case 5:
			p.Fail("k", faultproxy.HangReply)
		case 6:
			p.Fail("k", faultproxy.HoldRequest)
			heal = p.Release
		}
		timer := time.NewTimer(pause())
		select {
		case <-timer.C:
			heal()
		case <-stop:
			timer.Stop()
			heal()
			return
		}
	}
}

// leftOn returns the records that no client holds any more.
func leftOn(i int, keys []string) (left []string) {
	for _, key := range keys {
		if key != markKey && !strings.Contains(key, "}:fence:") {
			left = append(left, fmt.Sprintf("%s on node %d", key, i))
		}
	}
	return left
}

// nothingLeft fails the test if a node has a record.
func nothingLeft(t *testing.T, what string, vs redistest.VirtualServers) {
	t.Helper()
	for i, v := range vs {
		if left := leftOn(i, v.Mini.Keys()); len(left) > 0 {
			t.Errorf("%s: %q", what, left)
		}
	}
}

// A vote that arrives late does not outlast a Break by the driver that asked for it.
func TestBreakWaitsForVotesInFlight(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		d := drives(t, tr.vs.Clients(), nil)
		tr.vs[2].Proxy.Delay(500 * time.Millisecond)
		c := claim("k")
		c.TTL = keepsTerms
		tr.acquire(t, d, c)
		tr.vs[2].Proxy.Delay(0)
		if err := d.Break(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		nothingLeft(t, "after Break", tr.vs)
	})
}

// A program that ends right after its Unlock leaves no record, because Close waits
// for the votes of slow nodes and for their release.
func TestCloseLeavesNothing(t *testing.T) {
	for name, end := range map[string]func(t *testing.T, c *hasp.Client){
		"unlocked": func(t *testing.T, c *hasp.Client) {
			strategytest.Unlock(t, strategytest.Lock(t, c))
		},
		"refused": func(t *testing.T, c *hasp.Client) {
			if _, err := c.TryLock(t.Context(), "held"); !errors.Is(err, hasp.ErrHeld) {
				t.Errorf("got %v, want ErrHeld", err)
			}
		},
		"cancelled": func(t *testing.T, c *hasp.Client) {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Millisecond)
			defer cancel()
			if _, err := c.Lock(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v, want the end of the context", err)
			}
		},
	} {
		for _, n := range []int{3, 5} {
			for _, slow := range []time.Duration{5 * time.Millisecond, 200 * time.Millisecond} {
				for _, fresh := range []bool{true, false} {
					t.Run(fmt.Sprintf("%s, %d nodes, %v, fresh %v", name, n, slow, fresh), func(t *testing.T) {
						t.Parallel()
						try(t, n, nil, func(t *testing.T, tr trial) {
							for _, v := range tr.vs[:n/2+1] {
								elsewhere(t, v, "held")
							}
							d := tr.d
							if fresh {
								d = New(tr.vs.Clients(), nil)
							}
							for i, v := range tr.vs {
								v.Proxy.Delay(time.Duration(i) * slow)
							}
							c := hasp.New(d, nil)
							end(t, c)
							c.Close()
							for i, v := range tr.vs {
								if left := leftOn(i, v.Mini.Keys()); len(left) > 0 && left[0] != fmt.Sprintf("held on node %d", i) {
									t.Errorf("after Close: %q", left)
								}
							}
						})
					})
				}
			}
		}
	}
}

// A vote whose reply hangs has its record released when Close waits for it.
func TestCloseReleasesAVoteThatWasNotAnswered(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		tr.vs[2].Proxy.Fail("k", faultproxy.HangReply)
		c := hasp.New(tr.d, &hasp.Options{Timeout: time.Second})
		strategytest.Unlock(t, strategytest.Lock(t, c))
		c.Close()
		nothingLeft(t, "after Close", tr.vs)
	})
}

// Whatever was started and disturbed, at the end no node has a record of it, long before
// the terms end, and no goroutine runs.
func TestNothingIsLeft(t *testing.T) {
	for n, waits := range map[int]bool{3: true, 5: false} {
		t.Run(fmt.Sprint(n, " nodes"), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				vs := redistest.VirtualNodes(t, n)
				// A step lasts up to 1 s, and rarely so long that renewals are due.
				pause := func() time.Duration {
					if rand.IntN(200) == 0 {
						return rand.N(50 * time.Second)
					}
					return rand.N(300*time.Millisecond) >> rand.IntN(8)
				}
				r := &rounds{each: 250, pause: pause, keys: 3, waits: waits}
				var proxies []*faultproxy.Proxy
				for _, v := range vs {
					proxies = append(proxies, v.Proxy)
				}
				for range 4 {
					c := hasp.New(New(vs.Clients(), nil), &hasp.Options{TTL: keepsTerms, Timeout: time.Second})
					defer c.Close()
					r.clients = append(r.clients, c)
					strategytest.Unlock(t, strategytest.Lock(t, c)) // the set is new
				}
				r.run(t, proxies, func() time.Duration { return rand.N(900 * time.Millisecond) })
				if r.granted.Load() < 50 || r.refused.Load()+r.cut.Load() < 50 || r.outages.Load() > 500 {
					t.Error("that is no mixture")
				}

				time.Sleep(20 * time.Second)
				nothingLeft(t, "at the end", vs)
				for _, c := range r.clients {
					c.Close()
				}
				synctest.Wait()
				if left := running(); len(left) > 0 {
					t.Errorf("%d goroutines are left after Close:\n%s", len(left), strings.Join(left, "\n\n"))
				}
			})
		})
	}
}

// The same with real servers and sockets.
func TestNothingIsLeftOnRealServers(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartNodes(t, 3, nil)
	pause := func() time.Duration { return rand.N(100*time.Millisecond) >> rand.IntN(8) }
	r := &rounds{each: 40, pause: pause, keys: 2, waits: true}
	for range 3 {
		open := func() (*hasp.Client, error) {
			return hasp.Open(t.Context(), "redlock+"+nodes.URL()+"?ttl=90s&timeout=1s", nil)
		}
		c, err := open()
		for end := time.Now().Add(40 * time.Second); err != nil; c, err = open() {
			if time.Now().After(end) { // a second is short for a busy machine
				t.Fatal(err)
			}
		}
		defer c.Close()
		r.clients = append(r.clients, c)
	}
	r.run(t, nodes.Proxies, pause)
	end := time.Now().Add(40 * time.Second)
	for {
		keys, err := nodes.Keys(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var left []string
		for i, on := range keys {
			left = append(left, leftOn(i, on)...)
		}
		if len(left) == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("left: %q", left)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// The driver forgets holds that expired without a Release, as those of programs that
// leave a lock to its term.
func TestExpiredHoldsAreForgotten(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		for range 200 {
			c := aClaim("k")
			tr.acquire(t, tr.d, c)
			time.Sleep(c.TTL + c.Timeout + time.Millisecond)
		}
		tr.d.mu.Lock()
		defer tr.d.mu.Unlock()
		if n := len(tr.d.attempts); n > 100 {
			t.Errorf("the driver remembers %d holds of 200 that expired", n)
		}
	})
}
