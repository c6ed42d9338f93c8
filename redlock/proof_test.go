package redlock

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// named returns a caller that reaches node i at the server at[i], over links of its own.
func (tr trial) named(at redistest.VirtualServers) (caller, []*faultproxy.Proxy) {
	clients, links := at.Clients(), make([]*faultproxy.Proxy, len(at))
	for i, v := range tr.vs {
		clients[i], links[i] = v.Named(func() *server { return at[i] })
	}
	cr := drives(tr.T, clients, nil)
	cr.meet(aClaim)
	return cr, links
}

// linked returns a caller with links of its own.
func (tr trial) linked() (caller, []*faultproxy.Proxy) { return tr.named(tr.vs) }

// slow is a caller whose request to node 1 is lost, and whose request to node 2 is late. Node 0 has
// voted for it. It returns a function that lets the late request through, and then returns the
// result.
func (tr trial) slow(key string) (finish func() error) {
	tr.Helper()
	c := patient(key)
	cr, links := tr.linked()
	links[1].Down()
	links[2].StallRequests()
	granted := make(chan error, 1)
	go func() { granted <- cr.ask(c) }()
	time.Sleep(20 * time.Millisecond)
	synctest.Wait()
	if got := tr.holds(c); got[0] != 'x' {
		tr.Fatalf("the slow attempt has votes on %s", got)
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
	three(t, func(tr trial) {
		a, ofA := tr.linked()
		ofA[0].Fail("a-key", faultproxy.HoldRequest)
		c := aClaim("a-key")
		a.acquire(c)
		tr.want(c, "-xx")                 // A
		time.Sleep(c.TTL - attemptTime/2) // A gives up the command that is held

		finish := tr.slow("a-key")
		tr.each("0", empty)
		ofA[0].Release()
		tr.want(c, "xxx") // A, late
		ofA[2].Down()
		renewed := a.renew(c)
		time.Sleep(attemptTime / 2) // the term of the record on node 2 ends
		tr.wants("B", finish(), nil)
		if renewed == nil {
			tr.Error("A has renewed its lease, and B holds the key as well")
		}
	})
}

// Node 0 has voted for B, loses that vote, and takes A's record from a repair. A renews by nodes 0
// and 1, and its record on node 2 ends. If B, whose request to node 2 is late, won by its two votes,
// the key would have two holders. It makes no difference which Timeouts the Clients have.
func TestASlowAttemptAsksAgain(t *testing.T) {
	for _, timeout := range []time.Duration{200 * time.Millisecond, 3 * time.Second} {
		three(t, func(tr trial) {
			a, ofA := tr.linked()
			c := aClaim("k")
			c.TTL, c.Timeout = 2*time.Second, timeout
			ofA[0].Down()
			a.acquire(c)
			ofA[0].Up()

			finish := tr.slow("k")
			tr.each("0", empty)
			time.Sleep(probeEvery)
			a.renews(c)       // by nodes 1 and 2; repairs node 0
			tr.want(c, "xxx") // A
			ofA[2].Down()
			for range 3 {
				time.Sleep(c.TTL / 3)
				a.renews(c) // by nodes 0 and 1
			}
			time.Sleep(10 * time.Millisecond) // the term of the record on node 2 has ended
			tr.isUnclear(finish())            // B, while A holds the key
			a.renews(c)
		})
	}
}

// A slow attempt whose quorum still has its record wins. A node that has lost its data may have the
// record from a late command, and not know another hold. Nor does a node count that has lost the
// record.
func TestASlowAttemptNeedsNodesThatHaveKeptTheirData(t *testing.T) {
	for what, spoil := range map[string]disturb{
		"":          func(v *server) {},
		"no record": func(v *server) { v.Mini.Del("k") },
		"no mark":   func(v *server) { v.Mini.Del(markKey) },
		"a mark that makes it wait": func(v *server) {
			mark, _ := v.Mini.Get(markKey)
			end := time.Now().Add(absence).UnixMilli()
			v.Mini.Set(markKey, fmt.Sprint(runOfMark(mark), " ", end, " ", absence.Milliseconds()))
		},
	} {
		three(t, func(tr trial) {
			tr.Log(what)
			finish := tr.slow("k")
			spoil(tr.vs[0])
			time.Sleep(2 * attemptTime)
			if err := finish(); what == "" {
				tr.wants("a slow attempt", err, nil)
			} else {
				tr.isUnclear(err)
			}
		})
	}
}

// A is resumed by another driver, which does not reach node 2, and cannot know that the record on
// node 0 comes from a repair just before the end of the term. B has a lost vote of node 0.
func TestAResumeNearTheEndOfTheTerm(t *testing.T) {
	for _, late := range []bool{true, false} {
		three(t, func(tr trial) {
			a, ofA := tr.linked()
			other, ofOther := tr.linked()
			ofOther[2].Down()
			ofA[0].Down()
			c := patient("k")
			a.acquire(c)
			repaired := c.TTL - attemptTime
			if late {
				time.Sleep(c.TTL - attemptTime*9/10)
				repaired = attemptTime * 8 / 10
			}
			tr.put("0", "k", c.Token+"#"+c.Owner, repaired) // as if it had been repaired
			before := tr.vs[1].Mini.TTL("k")
			err := other.renew(c)
			if !late {
				tr.wants("resume", err, nil)
				return
			}
			tr.isUnclear(err)
			if after := tr.vs[1].Mini.TTL("k"); after > before {
				tr.Errorf("a resume that failed has prolonged the term by %v", after-before)
			}
		})
	}
}

// The name of node 1 leads A to the server of node 0, as after a wrong answer of DNS, and A's link
// to node 2 is down. If that one server counted twice, A would go on when B has the key.
func TestAServerCountsOnceWhateverItsName(t *testing.T) {
	three(t, func(tr trial) {
		at := slices.Clone(tr.vs)
		a, links := tr.named(at)
		b, _ := tr.linked()
		c := aClaim("a-key")
		a.acquire(c)

		at[1] = at[0]
		links[1].Cut()
		links[2].Down()
		ended := make(chan struct{})
		close(ended)
		asked := []chan struct{}{ended, ended, ended}
		for range 3 { // the first finds a connection that was cut
			h := a.hs.byToken[c.Token]
			if _, err := a.hs.confirm(tr.Context(), h, asked); err == nil {
				tr.Errorf("a fence counts that one server of three has")
			}
		}
		for end := time.Now().Add(c.TTL); time.Now().Before(end); time.Sleep(c.TTL / 10) {
			tr.isUnclear(a.renew(c)) // a renewal by one server of three
		}
		b.acquire(aClaim("a-key"))

		// The second answer of the server is that A's own record is there.
		tr.isUnclear(a.ask(aClaim("free"))) // acquire a free key of one server of three
	})
}

// A record that a vote did not prove counts from the next renewal on.
func TestAnUnprovenRecordCountsFromTheNextRenewalOn(t *testing.T) {
	held(t, 3, func(tr trial, c backend.Claim) {
		tr.hs.byToken[c.Token].on[0].countsUntil = time.Time{} // as if its vote had been lost
		time.Sleep(c.TTL / 2)
		tr.each("2", hang)
		tr.isUnclear(tr.renew(c)) // a renewal by a record without a proof
		if left := tr.vs[0].Mini.TTL("k"); left > c.TTL/2 {
			tr.Errorf("a renewal without a quorum has prolonged a record without a proof: %v", left)
		}
		tr.each("2", flow)
		time.Sleep(time.Second)
		tr.renews(c)    // by the other two
		synctest.Wait() // node 1 may answer after the other two have decided
		tr.each("2", hang)
		tr.renews(c) // the record counts now
	})
}

// A node that was repaired in the last second of a term does not count for that hold. See SURE_LATE
// in lab/model/redlock.pml.
func TestARepairInTheLastSecondDoesNotCount(t *testing.T) {
	for ttl, counts := range map[time.Duration]bool{attemptTime * 9 / 10: false, attemptTime * 3 / 2: true} {
		three(t, func(tr trial) {
			c := aClaim("k")
			c.TTL = ttl
			tr.acquire(c)
			synctest.Wait()
			tr.lose("0", "k")
			tr.renews(c)      // with two of three
			tr.want(c, "xxx") // repaired
			tr.lose("2", "k")
			if err := tr.renew(c); counts {
				tr.wants("a repair before that", err, nil)
			} else {
				tr.isUnclear(err) // a repair in the last second
			}
		})
	}
}

// A vote counts only if the node did not wait any more when it was asked, however late its
// reply comes.
func TestAVoteOfANodeThatWaitsNeverCounts(t *testing.T) {
	three(t, func(tr trial) {
		b, ofB := tr.linked()
		tr.each("0", empty)
		tr.each("2", down)
		end := b.abstains(aClaim, "0", absence) // at once
		time.Sleep(time.Until(end) - 100*time.Millisecond)
		ofB[0].Delay(300 * time.Millisecond)
		tr.isUnclear(b.ask(aClaim("k"))) // its reply comes after the wait
		time.Sleep(time.Second)
		b.acquire(aClaim("k"))
	})
}

// Two servers swap their addresses. Both nodes vote again, although each finds the run of its server
// in what is known of the other node.
func TestTwoNodesThatSwapTheirAddresses(t *testing.T) {
	three(t, func(tr trial) {
		at := slices.Clone(tr.vs)
		cr, links := tr.named(at)
		at[1], at[2] = at[2], at[1]
		links[1].Cut()
		links[2].Cut()
		cr.findsDeadConnections()
		cr.acquire(aClaim("k"))
	})
}
