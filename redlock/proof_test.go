package redlock

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
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

// B has the vote of node 0, which then loses it and takes A's record from a command that
// comes late. If A renewed by that record, B would hold the key when the term on node 2
// has ended, and A as well. lab/model found it.
func TestARecordThatCameLateRenewsNothing(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		a, ofA := tr.linked(t)
		b, ofB := tr.linked(t)
		ofA[0].Fail("a-key", faultproxy.HoldRequest)
		c := aClaim("a-key")
		tr.acquire(t, a, c)
		tr.want(t, "A", c, "-xx")
		time.Sleep(2 * c.Timeout) // A gives up the command that is held

		ofB[1].StallRequests()
		ofB[2].StallRequests()
		late := aClaim("a-key")
		late.TTL, late.Timeout = 20*time.Second, 20*time.Second
		granted := make(chan error, 1)
		go func() { _, err := b.Acquire(t.Context(), late); granted <- err }()
		time.Sleep(time.Second)
		synctest.Wait()
		tr.want(t, "B", late, "x??")

		tr.vs[0].Mini.FlushAll()
		ofA[0].Release()
		synctest.Wait()
		tr.want(t, "A, late", c, "xxx")
		ofA[2].Down()
		renewed := renewOne(a, c, c.Timeout)
		time.Sleep(8 * time.Second) // the term of the record on node 2 ends
		ofB[2].Flow()
		if err := <-granted; err != nil {
			t.Errorf("B: %v", err)
		} else if renewed == nil {
			t.Error("A has renewed its lease, and B holds the key as well")
		}
	})
}

// The name of node 1 leads A to the server of node 0, as after a wrong answer of DNS, and A's link
// to node 2 is down. If that one server counted twice, A would go on when B has the key.
func TestAServerCountsOnceWhateverItsName(t *testing.T) {
	for _, shared := range []bool{false, true} {
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
			c.Shared = shared
			tr.acquire(t, a, c)

			to.Store(0)
			links[1].Cut()
			links[2].Down()
			for range 3 { // the first finds a connection that was cut
				if _, err := a.attempts[c.Token].raiseFence(t.Context()); err == nil {
					t.Errorf("shared %v: a fence counts that one server of three has", shared)
				}
			}
			for end := time.Now().Add(c.TTL); time.Now().Before(end); time.Sleep(c.TTL / 10) {
				if err := renewOne(a, c, c.Timeout); err == nil || errors.Is(err, backend.ErrLost) {
					t.Fatalf("shared %v: a renewal by one server of three: %v", shared, err)
				}
			}
			tr.acquire(t, b, aClaim("a-key"))

			// The second answer of the server is that A's own record is there.
			if _, err := a.Acquire(t.Context(), aClaim("free")); err == nil || errors.Is(err, backend.ErrHeld) {
				t.Errorf("shared %v: a free key, of which one server of three is asked: %v", shared, err)
			}
		})
	}
}

// A record that a vote did not prove counts from the next renewal on.
func TestAnUnprovenRecordCountsFromTheNextRenewalOn(t *testing.T) {
	held(t, 3, func(t *testing.T, tr trial, c backend.Claim) {
		tr.d.attempts[c.Token].on[0].proof = proof{} // as if its vote had been lost
		tr.vs[2].Proxy.Stall()
		if err := renewOne(tr.d, c, c.Timeout); err == nil {
			t.Error("a record without a proof counts")
		}
		tr.vs[2].Proxy.Flow()
		time.Sleep(time.Second)
		tr.renews(t, "by the other two", c)
		synctest.Wait() // node 1 may answer after the other two have decided
		tr.vs[2].Proxy.Stall()
		tr.renews(t, "the record counts now", c)
	})
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
