package redlock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

// crowd is clients, each with a driver of its own, that contend for one key.
type crowd struct {
	t       *testing.T
	vs      redistest.VirtualServers
	drivers []*driver
	number  atomic.Int64 // of tokens
}

// trip is how long a node's answer takes.
const trip = 200 * time.Microsecond

func newCrowd(t *testing.T, nodes, clients int) *crowd {
	await.Crowd(t)
	c := &crowd{t: t, vs: redistest.VirtualNodes(t, nodes)}
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
	return backend.Claim{Key: "k", Token: fmt.Sprintf("token-%016d", c.number.Add(1)), Owner: "me", TTL: 30 * time.Second, Timeout: time.Second}
}

// waits makes one client wait, runs after, and returns how long after that the client got the key.
func waits(t *testing.T, before, after func(c *crowd)) (late time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t, 5, 2)
		before(c)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		w := startWait(ctx, c.drivers[0], c.claim())
		time.Sleep(5 * time.Second)
		synctest.Wait()
		select {
		case <-w.done:
			t.Error("a key that is held was had")
		default:
		}
		after(c)
		began := time.Now()
		if <-w.done; w.err != nil {
			t.Error(w.err)
		}
		late = time.Since(began)
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
		"all well":                 func(*crowd) {},
		"by a Break":               func(*crowd) {},
		"one node dead":            func(c *crowd) { c.vs[0].Proxy.Down() },
		"another is dead":          func(c *crowd) { c.vs[4].Proxy.Down() },
		"two are dead":             func(c *crowd) { c.vs[0].Proxy.Down(); c.vs[3].Proxy.Down() },
		"one hangs":                func(c *crowd) { c.vs[0].Proxy.Stall() },
		"one is slow":              func(c *crowd) { c.vs[0].Proxy.Delay(200 * time.Millisecond) },
		"one has another's record": func(c *crowd) { c.vs[0].Mini.Set("k", "somebody's") },
		"one has errors":           func(c *crowd) { spoilMark(c.vs[0]) },
		"one does not vote":        func(c *crowd) { c.vs[0].Restart(false) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var claim backend.Claim
			late := waits(t, func(c *crowd) {
				claim = c.claim()
				take(c.t, c.drivers[1], claim)
				time.Sleep(time.Second) // so that the votes after the quorum arrive
				spoil(c)
			}, func(c *crowd) {
				if name == "by a Break" {
					await.Must(t, c.drivers[1].Break(c.t.Context(), "k"))
				} else {
					strategytest.Want(t, "release", c.drivers[1].Release(c.t.Context(), claim), nil)
				}
				for _, v := range c.vs {
					v.Proxy.Flow()
				}
			})
			most := 25 * time.Millisecond
			if strings.Contains(name, "another's") {
				most = 2 * lookEvery // the lead publishes nothing, so the waiters poll
			}
			if late > most {
				t.Errorf("had %v after the release", late)
			}
		})
	}
}

// A clean-up of one waiter wakes the next waiter of its driver, over a channel that both share. The
// waiter whose clean-up it was pauses, because otherwise it would ask and clean up without end.
func TestAWaiterPausesAfterItsOwnCleanUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t, 3, 1)
		w := &waiting{ct: c.drivers[0].ct, c: c.claim(), wake: make(chan struct{}, 1), queue: noLead}
		w.stand(t.Context(), 0)
		defer w.stand(t.Context(), noLead)
		time.Sleep(time.Second)
		for token, least := range map[string]time.Duration{"another's": 0, w.c.Token: minSleep} {
			select {
			case <-w.wake: // the subscription
			default:
			}
			began := time.Now()
			channel := redisstore.DerivedKey("channel", w.c.Key) + ":" + w.ct.id
			await.Must(t, c.vs[0].Direct().Publish(t.Context(), channel, token).Err())
			<-w.wake
			if took := time.Since(began); took < least || took > least+minSleep/2 {
				t.Errorf("woken by the clean-up of %s after %v, want %v", token, took, least)
			}
		}
	})
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
		w := startWait(t.Context(), c.drivers[0], c.claim())
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

		strategytest.Want(t, "release", c.drivers[1].Release(t.Context(), holder), nil)
		began := time.Now()
		if <-w.done; w.err != nil || time.Since(began) > 2*maxPoll {
			t.Errorf("had after %v: %v", time.Since(began), w.err)
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

// If a majority is away and the lead has a record, Acquire reports an outage and not a refusal.
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

// aWait is a Wait in progress.
type aWait struct {
	done chan struct{} // closed when it has returned
	err  error
}

func startWait(ctx context.Context, d *driver, c backend.Claim) *aWait {
	w := &aWait{done: make(chan struct{})}
	go func() {
		defer close(w.done)
		_, w.err = d.Wait(ctx, c)
	}()
	return w
}

// The nodes hang for longer than a third of Timeout until ctx ends the wait. Then the last
// answer, which was that the key is held, says nothing about the present.
func TestSilenceAtTheEndOfAWaitIsAnOutage(t *testing.T) {
	for _, hung := range []string{"012", "12"} { // the lead may still answer
		try(t, 3, nil, func(t *testing.T, tr trial) {
			holder := aClaim("k")
			holder.TTL = time.Minute
			tr.acquire(t, tr.d, holder)
			ctx, cancel := context.WithCancel(t.Context())
			c := aClaim("k")
			c.Timeout = 9 * time.Second
			w := startWait(ctx, tr.d, c)
			time.Sleep(3 * time.Second)
			for _, i := range hung {
				tr.vs[i-'0'].Proxy.Stall()
			}
			stalled := time.Now()
			time.Sleep(2*lookEvery + c.Timeout/3) // all nodes are asked within 2*lookEvery
			cancel()
			<-w.done
			var dated *backend.UnavailableError
			if backend.Definite(w.err) || !errors.As(w.err, &dated) || dated.Since.Before(stalled) {
				t.Errorf("%s hang: got %v, want an outage since then", hung, w.err)
			}
			for _, v := range tr.vs {
				v.Proxy.Flow()
			}
		})
	}
}

// A look that no quorum answers ends a Wait, and the engine counts the outage from that look on.
func TestAnOutageEndsAWait(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		holder := aClaim("k")
		holder.TTL = time.Minute
		tr.acquire(t, tr.d, holder)
		w := startWait(t.Context(), tr.d, aClaim("k"))
		time.Sleep(3 * time.Second)
		down := time.Now()
		tr.each("012", func(v *redistest.VirtualServer) { v.Proxy.Down() })
		<-w.done
		var dated *backend.UnavailableError
		if !errors.As(w.err, &dated) || dated.Since.Before(down) || time.Since(down) > lookEvery {
			t.Errorf("after %v: got %v, want an outage since then", time.Since(down), w.err)
		}
	})
}

// A caller must not take its own late votes, which are about to be released, for those of a holder.
func TestACallerIsNotHeldByItsOwnVotes(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		c := aClaim("k")
		elsewhere(t, tr.vs[0], "k")
		tr.put(t, "k", c.Token+"#"+c.Owner, c.TTL, 1, 2)
		tr.each("012", func(v *redistest.VirtualServer) { v.Proxy.Delay(10 * time.Millisecond) })
		time.AfterFunc(55*time.Millisecond, func() { tr.lose("12", "k") }) // after the first survey, and before the last attempt
		tr.acquire(t, tr.d, c)
	})
}
