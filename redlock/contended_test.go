package redlock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// crowd is callers that contend for the key k. The first one is also the trial's.
type crowd struct {
	trial
	callers []caller
}

// trip is how long a node's answer takes.
const trip = 200 * time.Microsecond

func newCrowd(t *testing.T, nodes, clients int) *crowd {
	await.Crowd(t)
	c := &crowd{}
	c.vs = redistest.VirtualNodes(t, nodes)
	c.T = t
	for i := range clients {
		cr := c.another()
		c.callers = append(c.callers, cr)
		cr.acquire(aClaim(fmt.Sprint("its-own", i)))
	}
	c.caller = c.callers[0]
	c.each("01234"[:nodes], delay(trip))
	return c
}

// waits makes one client wait, runs after, and returns how long after that the client got the key.
func waits(t *testing.T, before, after func(c *crowd)) (late time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t, 5, 2)
		before(c)
		ctx := await.Timeout(t, time.Minute)
		w := c.startWait(ctx, aClaim("k"))
		time.Sleep(5 * time.Second)
		synctest.Wait()
		select {
		case <-w.done:
			t.Error("a key that is held was had")
		default:
		}
		after(c)
		late = w.took()
	})
	return late
}

// holdBy puts a record on the nodes, each by one of several holders.
func holdBy(holders ...string) func(c *crowd) {
	return func(c *crowd) {
		for i := range c.vs {
			if h := holders[i%len(holders)]; h != "" {
				c.put(fmt.Sprint(i), "k", h, time.Hour)
			}
		}
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
				late := waits(t, before, func(c *crowd) { c.lose("01234", "k") })
				if late > lookEvery+20*time.Millisecond {
					t.Errorf("had after %v", late)
				}
			}
		})
	}
}

func TestWaitersAreWokenByARelease(t *testing.T) {
	const late = 25 * time.Millisecond
	for name, row := range map[string]struct {
		nodes string
		spoil disturb
		most  time.Duration
	}{
		"all well":          {"", nil, late},
		"one node dead":     {"0", down, late},
		"another is dead":   {"4", down, late},
		"two are dead":      {"03", down, late},
		"one hangs":         {"0", hang, late},
		"one is slow":       {"0", delay(200 * time.Millisecond), late},
		"one has errors":    {"0", spoilMark, late},
		"one does not vote": {"0", func(v *server) { v.Restart(false) }, late},

		// The lead publishes nothing, so the waiters poll.
		"one has another's record": {"0", func(v *server) { _ = v.Mini.Set("k", "another") }, 2 * lookEvery},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			claim := aClaim("k")
			late := waits(t, func(c *crowd) {
				c.callers[1].acquire(claim)
				time.Sleep(time.Second) // so that the votes after the quorum arrive
				c.each(row.nodes, row.spoil)
			}, func(c *crowd) {
				c.callers[1].release(claim)
				c.each("0", flow)
			})
			if late > row.most {
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
		w := &waiting{ct: c.ct, c: aClaim("k"), wake: make(chan struct{}, 1), queue: noLead}
		w.stand(t.Context(), 0)
		defer w.stand(t.Context(), noLead)
		time.Sleep(time.Second)
		for token, least := range map[string]time.Duration{"another's": 0, w.c.Token: minSleep} {
			select {
			case <-w.wake: // the subscription
			default:
			}
			began := time.Now()
			await.Must(t, c.vs[0].Direct().Publish(t.Context(), channelOf("k")+":"+w.ct.id, token).Err())
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
		holder := aClaim("k")
		holder.TTL = time.Minute
		c.callers[1].acquire(holder)
		for _, v := range c.vs {
			v.Proxy.Answer("subscribe ", "-NOPERM this user has no permissions to access one of the channels\r\n")
			v.Proxy.Commands()
		}
		w := c.startWait(t.Context(), aClaim("k"))
		time.Sleep(10 * time.Second)
		asked := 0
		for _, v := range c.vs {
			asked += strings.Count("\n"+strings.Join(v.Proxy.Commands(), "\n"), "\nsubscribe ")
		}
		if asked < 5 || asked > 12 {
			t.Errorf("asked %d times in 10 s", asked)
		}

		c.callers[1].release(holder)
		if late := w.took(); late > 2*maxPoll {
			t.Errorf("had after %v", late)
		}
	})
}

// Waiters get the key of a set with fewer nodes than a safe set needs.
func TestWaitOnFewNodes(t *testing.T) {
	o := &Options{AllowUnsafeNodes: true}
	for n := 1; n <= 2; n++ {
		fresh(t, n, o, func(tr trial) {
			held := aClaim("k")
			tr.acquire(held)
			w := drives(tr.T, tr.vs.Clients(), o).startWait(tr.Context(), aClaim("k"))
			time.Sleep(time.Second)
			tr.release(held)
			w.took()
		})
	}
}

// If a majority is away and the lead has a record, Acquire reports an outage and not a refusal.
func TestAcquireWithoutAMajorityIsAnOutage(t *testing.T) {
	three(t, func(tr trial) {
		tr.elsewhere("012", "k")
		tr.refused(aClaim("k"))
		synctest.Wait()
		tr.each("12", down)
		// This asks the lead first, after that refusal.
		tr.isOutage("acquire", tr.ask(aClaim("k")), "12")
	})
}

// aWait is a Wait in progress.
type aWait struct {
	caller
	done chan struct{} // closed when it has returned
	err  error
}

func (cr caller) startWait(ctx context.Context, c backend.Claim) *aWait {
	w := &aWait{caller: cr, done: make(chan struct{})}
	go func() {
		defer close(w.done)
		_, w.err = cr.Wait(ctx, c)
	}()
	return w
}

// took returns how long the wait still took. It fails the test if it got no key.
func (w *aWait) took() time.Duration {
	w.Helper()
	began := time.Now()
	<-w.done
	w.wants("wait", w.err, nil)
	return time.Since(began)
}

// If no quorum answers a look, the Wait ends with an outage since that look. If the nodes hang
// until ctx ends the Wait, for longer than a third of Timeout, the last answer, which was that the
// key is held, says nothing about the present.
func TestSilenceAtTheEndOfAWaitIsAnOutage(t *testing.T) {
	const timeout = 9 * time.Second
	for _, c := range []struct {
		nodes string
		how   disturb
		most  time.Duration // how long the Wait may go on
	}{
		{nodes: "012", how: hang, most: 2*lookEvery + timeout/3}, // all nodes are asked within 2*lookEvery
		{nodes: "12", how: hang, most: 2*lookEvery + timeout/3},  // the lead may still answer
		{nodes: "012", how: down, most: lookEvery},
	} {
		three(t, func(tr trial) {
			holder, waiter := aClaim("k"), aClaim("k")
			holder.TTL = time.Minute
			tr.acquire(holder)
			ctx, cancel := context.WithCancel(tr.Context())
			defer cancel()
			waiter.Timeout = timeout
			w := tr.startWait(ctx, waiter)
			time.Sleep(3 * time.Second)
			tr.each(c.nodes, c.how)
			began := time.Now()
			time.AfterFunc(c.most, cancel)
			<-w.done
			var dated *backend.UnavailableError
			if backend.Definite(w.err) || !errors.As(w.err, &dated) || dated.Since.Before(began) {
				tr.Errorf("%s disturbed: got %v, want an outage since then", c.nodes, w.err)
			}
			tr.each("012", flow)
		})
	}
}

// A caller must not take its own late votes, which are about to be released, for those of a holder.
func TestACallerIsNotHeldByItsOwnVotes(t *testing.T) {
	three(t, func(tr trial) {
		c := aClaim("k")
		tr.elsewhere("0", "k")
		tr.put("12", "k", c.Token+"#"+c.Owner, c.TTL)
		tr.each("012", delay(10*time.Millisecond))
		time.AfterFunc(55*time.Millisecond, func() { tr.lose("12", "k") }) // after the first survey, and before the last attempt
		tr.acquire(c)
	})
}
