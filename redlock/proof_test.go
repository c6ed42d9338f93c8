package redlock

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

// linked returns a driver with links of its own.
func (tr trial) linked(t *testing.T) (*driver, []*faultproxy.Proxy) {
	clients, links := tr.vs.Clients(), make([]*faultproxy.Proxy, len(tr.vs))
	for i, v := range tr.vs {
		clients[i], links[i] = v.Link()
	}
	d := drives(t, clients, nil)
	for range 2 {
		tr.warm(t, d, aClaim("warm"))
	}
	return d, links
}

// slow is a caller whose request to node 1 is lost, and whose request to node 2 is late. Node 0 has
// voted for it. It returns a function that lets the late request through, and then returns the
// result.
func (tr trial) slow(t *testing.T, c backend.Claim) (finish func() error) {
	t.Helper()
	d, links := tr.linked(t)
	links[1].Down()
	links[2].StallRequests()
	granted := make(chan error, 1)
	go func() { _, err := d.Acquire(t.Context(), c); granted <- err }()
	time.Sleep(20 * time.Millisecond)
	synctest.Wait()
	if got := tr.holds(c); got[0] != 'x' {
		t.Fatalf("the slow attempt has votes on %s", got)
	}
	return func() error {
		links[2].Flow()
		return <-granted
	}
}

// patient returns a claim with a long Timeout.
func patient(key string) backend.Claim {
	c := aClaim(key)
	c.Timeout = 5 * time.Second
	return c
}

// B has the vote of node 0, which then loses it and takes A's record from a command that comes late.
// If A renewed by that record, B would hold the key when the term on node 2 has ended, and A as
// well. lab/model found it.
func TestARecordThatCameLateRenewsNothing(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		a, ofA := tr.linked(t)
		ofA[0].Fail("a-key", faultproxy.HoldRequest)
		c := aClaim("a-key")
		tr.acquire(t, a, c)
		tr.want(t, "A", c, "-xx")
		time.Sleep(c.TTL - attemptTime/2) // A gives up the command that is held

		finish := tr.slow(t, patient("a-key"))
		tr.vs[0].Mini.FlushAll()
		ofA[0].Release()
		synctest.Wait()
		tr.want(t, "A, late", c, "xxx")
		ofA[2].Down()
		renewed := renewOne(a, c, c.Timeout)
		time.Sleep(attemptTime / 2) // the term of the record on node 2 ends
		if err := finish(); err != nil {
			t.Errorf("B: %v", err)
		} else if renewed == nil {
			t.Error("A has renewed its lease, and B holds the key as well")
		}
	})
}

// Node 0 has voted for B, loses that vote, and takes A's record from a repair. A renews by nodes 0
// and 1, and its record on node 2 ends. If B, whose request to node 2 is late, won by its two votes,
// the key would have two holders. It makes no difference which Timeouts the Clients have.
func TestASlowAttemptAsksAgain(t *testing.T) {
	for _, timeout := range []time.Duration{200 * time.Millisecond, 3 * time.Second} {
		try(t, 3, nil, func(t *testing.T, tr trial) {
			a, ofA := tr.linked(t)
			c := aClaim("k")
			c.TTL, c.Timeout = 2*time.Second, timeout
			ofA[0].Down()
			tr.acquire(t, a, c)
			ofA[0].Up()

			finish := tr.slow(t, patient("k"))
			tr.vs[0].Mini.FlushAll()
			time.Sleep(probeEvery)
			await.Must(t, renewOne(a, c, timeout)) // by nodes 1 and 2; repairs node 0
			synctest.Wait()
			tr.want(t, "A", c, "xxx")
			ofA[2].Down()
			for range 3 {
				time.Sleep(c.TTL / 3)
				await.Must(t, renewOne(a, c, timeout)) // by nodes 0 and 1
			}
			time.Sleep(10 * time.Millisecond) // the term of the record on node 2 has ended
			err := finish()
			if renewed := renewOne(a, c, timeout); err == nil && renewed == nil {
				t.Error("two holders")
			}
			if err == nil || errors.Is(err, backend.ErrHeld) {
				t.Errorf("B: got %v, want an outage", err)
			}
		})
	}
}

// A slow attempt whose quorum still has its record wins.
func TestASlowAttemptMayWin(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		finish := tr.slow(t, patient("k"))
		time.Sleep(2 * attemptTime)
		await.Must(t, finish())
	})
}

// A node that has lost its data may have the record from a late command, and not know another hold.
func TestASlowAttemptNeedsNodesThatHaveKeptTheirData(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		c := patient("k")
		finish := tr.slow(t, c)
		tr.vs[0].Mini.FlushAll()
		tr.put(t, "k", c.Token+"#"+c.Owner, c.TTL, 0)
		time.Sleep(2 * attemptTime)
		if err := finish(); err == nil || errors.Is(err, backend.ErrHeld) {
			t.Errorf("got %v, want an outage", err)
		}
	})
}

// A is resumed by another driver, which does not reach node 2, and cannot know that the record on
// node 0 comes from a repair just before the end of the term. B has a lost vote of node 0.
func TestAResumeNearTheEndOfTheTerm(t *testing.T) {
	for _, late := range []bool{true, false} {
		try(t, 3, nil, func(t *testing.T, tr trial) {
			a, ofA := tr.linked(t)
			other, ofOther := tr.linked(t)
			ofOther[2].Down()
			ofA[0].Down()
			c := patient("k")
			tr.acquire(t, a, c)
			ofA[0].Up()
			time.Sleep(probeEvery)
			if late {
				time.Sleep(c.TTL - probeEvery - attemptTime*9/10)
			}
			tr.put(t, "k", c.Token+"#"+c.Owner, attemptTime*8/10, 0) // as if it had been repaired
			if !late {
				tr.vs[0].Mini.SetTTL("k", c.TTL-attemptTime)
			}
			before := tr.vs[1].Mini.TTL("k")
			err := renewOne(other, c, c.Timeout)
			if late != (err != nil) || errors.Is(err, backend.ErrLost) {
				t.Errorf("late %v: %v", late, err)
			}
			if after := tr.vs[1].Mini.TTL("k"); late && after > before {
				t.Errorf("a resume that failed has prolonged the term by %v", after-before)
			}
		})
	}
}

// The name of node 1 leads A to the server of node 0, as after a wrong answer of DNS, and A's link
// to node 2 is down. If that one server counted twice, A would go on when B has the key.
func TestAServerCountsOnceWhateverItsName(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		var to atomic.Int32
		to.Store(1)
		clients, links := tr.vs.Clients(), make([]*faultproxy.Proxy, len(tr.vs))
		for i, v := range tr.vs {
			clients[i], links[i] = v.Named(func() *redistest.VirtualServer {
				if i == 1 {
					return tr.vs[to.Load()]
				}
				return v
			})
		}
		a := drives(t, clients, nil)
		for range 2 {
			tr.warm(t, a, aClaim("warm"))
		}
		b, _ := tr.linked(t)
		c := aClaim("a-key")
		tr.acquire(t, a, c)

		to.Store(0)
		links[1].Cut()
		links[2].Down()
		for range 3 { // the first finds a connection that was cut
			if _, err := a.hs.confirm(t.Context(), a.hs.byToken[c.Token]); err == nil {
				t.Errorf("a fence counts that one server of three has")
			}
		}
		for end := time.Now().Add(c.TTL); time.Now().Before(end); time.Sleep(c.TTL / 10) {
			if err := renewOne(a, c, c.Timeout); err == nil || errors.Is(err, backend.ErrLost) {
				t.Fatalf("a renewal by one server of three: %v", err)
			}
		}
		tr.acquire(t, b, aClaim("a-key"))

		// The second answer of the server is that A's own record is there.
		if _, err := a.Acquire(t.Context(), aClaim("free")); err == nil || errors.Is(err, backend.ErrHeld) {
			t.Errorf("a free key, of which one server of three is asked: %v", err)
		}
	})
}

// A record that a vote did not prove counts from the next renewal on.
func TestAnUnprovenRecordCountsFromTheNextRenewalOn(t *testing.T) {
	held(t, 3, func(t *testing.T, tr trial, c backend.Claim) {
		tr.d.hs.byToken[c.Token].on[0].counts = time.Time{} // as if its vote had been lost
		time.Sleep(c.TTL / 2)
		tr.vs[2].Proxy.Stall()
		if err := renewOne(tr.d, c, c.Timeout); err == nil {
			t.Error("a record without a proof counts")
		}
		if left := tr.vs[0].Mini.TTL("k"); left > c.TTL/2 {
			t.Errorf("a renewal without a quorum has prolonged a record without a proof: %v", left)
		}
		tr.vs[2].Proxy.Flow()
		time.Sleep(time.Second)
		tr.renews(t, "by the other two", c)
		synctest.Wait() // node 1 may answer after the other two have decided
		tr.vs[2].Proxy.Stall()
		tr.renews(t, "the record counts now", c)
	})
}

// A node that was repaired in the last second of a term does not count for that hold. See SURE_LATE
// in lab/model/redlock.pml.
func TestARepairInTheLastSecondDoesNotCount(t *testing.T) {
	for ttl, counts := range map[time.Duration]bool{attemptTime * 9 / 10: false, attemptTime * 3 / 2: true} {
		try(t, 3, nil, func(t *testing.T, tr trial) {
			c := aClaim("k")
			c.TTL = ttl
			tr.acquire(t, tr.d, c)
			synctest.Wait()
			tr.lose("0", "k")
			tr.renews(t, "with two of three", c)
			tr.want(t, "repaired", c, "xxx")
			tr.lose("2", "k")
			if err := renewOne(tr.d, c, c.Timeout); counts != (err == nil) || errors.Is(err, backend.ErrLost) {
				t.Errorf("a term of %v: %v", ttl, err)
			}
		})
	}
}

// A vote counts only if the node did not wait any more when it was asked, however late its
// reply comes.
func TestAVoteOfANodeThatWaitsNeverCounts(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		b, ofB := tr.linked(t)
		tr.vs[0].Mini.FlushAll()
		tr.vs[2].Proxy.Down()
		end := tr.abstains(t, "at once", b, aClaim, "0", absence)
		time.Sleep(time.Until(end) - 100*time.Millisecond)
		ofB[0].Delay(300 * time.Millisecond)
		c := aClaim("k")
		if _, err := b.Acquire(t.Context(), c); err == nil {
			t.Error("it counts when its reply comes after the wait")
		}
		time.Sleep(time.Second)
		strategytest.Want(t, "afterwards", strategytest.ErrOf(b.Acquire(t.Context(), aClaim("k"))), nil)
	})
}

// Two servers swap their addresses. Both nodes vote again, although each finds the run of its server
// in what is known of the other node.
func TestTwoNodesThatSwapTheirAddresses(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		var swapped atomic.Bool
		clients, links := tr.vs.Clients(), make([]*faultproxy.Proxy, len(tr.vs))
		for i, v := range tr.vs {
			clients[i], links[i] = v.Named(func() *redistest.VirtualServer {
				if swapped.Load() && i > 0 {
					return tr.vs[3-i]
				}
				return v
			})
		}
		d := drives(t, clients, nil)
		for range 2 {
			tr.warm(t, d, aClaim("warm"))
		}
		swapped.Store(true)
		links[1].Cut()
		links[2].Cut()
		var err error
		for range 5 {
			time.Sleep(time.Second)
			if _, err = d.Acquire(t.Context(), aClaim("k")); err == nil {
				return
			}
		}
		t.Errorf("five seconds later: %v", err)
	})
}
