package redlock

import (
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// named returns a driver that reaches node i at the server that leads returns, over links of its
// own.
func (tr trial) named(t *testing.T, leads func(i int) int) (*driver, []*faultproxy.Proxy) {
	clients, links := tr.vs.Clients(), make([]*faultproxy.Proxy, len(tr.vs))
	for i, v := range tr.vs {
		clients[i], links[i] = v.Named(func() *redistest.VirtualServer { return tr.vs[leads(i)] })
	}
	d := drives(t, clients, nil)
	tr.meet(t, d, aClaim)
	return d, links
}

// linked returns a driver with links of its own.
func (tr trial) linked(t *testing.T) (*driver, []*faultproxy.Proxy) {
	return tr.named(t, func(i int) int { return i })
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
	go func() { granted <- ask(t, d, c) }()
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
	try(t, 3, func(t *testing.T, tr trial) {
		a, ofA := tr.linked(t)
		ofA[0].Fail("a-key", faultproxy.HoldRequest)
		c := aClaim("a-key")
		tr.acquire(t, a, c)
		tr.want(t, "A", c, "-xx")
		time.Sleep(c.TTL - attemptTime/2) // A gives up the command that is held

		finish := tr.slow(t, patient("a-key"))
		tr.each("0", empty)
		ofA[0].Release()
		tr.want(t, "A, late", c, "xxx")
		ofA[2].Down()
		renewed := renewOne(a, c)
		time.Sleep(attemptTime / 2) // the term of the record on node 2 ends
		wants(t, "B", finish(), nil)
		if renewed == nil {
			t.Error("A has renewed its lease, and B holds the key as well")
		}
	})
}

// Node 0 has voted for B, loses that vote, and takes A's record from a repair. A renews by nodes 0
// and 1, and its record on node 2 ends. If B, whose request to node 2 is late, won by its two votes,
// the key would have two holders. It makes no difference which Timeouts the Clients have.
func TestASlowAttemptAsksAgain(t *testing.T) {
	for _, timeout := range []time.Duration{200 * time.Millisecond, 3 * time.Second} {
		try(t, 3, func(t *testing.T, tr trial) {
			a, ofA := tr.linked(t)
			c := aClaim("k")
			c.TTL, c.Timeout = 2*time.Second, timeout
			ofA[0].Down()
			tr.acquire(t, a, c)
			ofA[0].Up()

			finish := tr.slow(t, patient("k"))
			tr.each("0", empty)
			time.Sleep(probeEvery)
			await.Must(t, renewOne(a, c)) // by nodes 1 and 2; repairs node 0
			tr.want(t, "A", c, "xxx")
			ofA[2].Down()
			for range 3 {
				time.Sleep(c.TTL / 3)
				await.Must(t, renewOne(a, c)) // by nodes 0 and 1
			}
			time.Sleep(10 * time.Millisecond) // the term of the record on node 2 has ended
			isUnclear(t, "B, while A holds the key", finish())
			wants(t, "A, to the end", renewOne(a, c), nil)
		})
	}
}

// A slow attempt whose quorum still has its record wins.
func TestASlowAttemptMayWin(t *testing.T) {
	try(t, 3, func(t *testing.T, tr trial) {
		finish := tr.slow(t, patient("k"))
		time.Sleep(2 * attemptTime)
		await.Must(t, finish())
	})
}

// A node that has lost its data may have the record from a late command, and not know another hold.
// Nor does a node count that has lost the record.
func TestASlowAttemptNeedsNodesThatHaveKeptTheirData(t *testing.T) {
	for what, spoil := range map[string]func(v *redistest.VirtualServer){
		"no record": func(v *redistest.VirtualServer) { v.Mini.Del("k") },
		"no mark":   func(v *redistest.VirtualServer) { v.Mini.Del(markKey) },
		"a mark that makes it wait": func(v *redistest.VirtualServer) {
			mark, _ := v.Mini.Get(markKey)
			end := time.Now().Add(absence).UnixMilli()
			v.Mini.Set(markKey, fmt.Sprint(runOfMark(mark), " ", end, " ", absence.Milliseconds()))
		},
	} {
		try(t, 3, func(t *testing.T, tr trial) {
			finish := tr.slow(t, patient("k"))
			spoil(tr.vs[0])
			time.Sleep(2 * attemptTime)
			isUnclear(t, what, finish())
		})
	}
}

// A is resumed by another driver, which does not reach node 2, and cannot know that the record on
// node 0 comes from a repair just before the end of the term. B has a lost vote of node 0.
func TestAResumeNearTheEndOfTheTerm(t *testing.T) {
	for _, late := range []bool{true, false} {
		try(t, 3, func(t *testing.T, tr trial) {
			a, ofA := tr.linked(t)
			other, ofOther := tr.linked(t)
			ofOther[2].Down()
			ofA[0].Down()
			c := patient("k")
			tr.acquire(t, a, c)
			repaired := c.TTL - attemptTime
			if late {
				time.Sleep(c.TTL - attemptTime*9/10)
				repaired = attemptTime * 8 / 10
			}
			tr.put(t, "k", c.Token+"#"+c.Owner, repaired, 0) // as if it had been repaired
			before := tr.vs[1].Mini.TTL("k")
			err := renewOne(other, c)
			if !late {
				wants(t, "resume", err, nil)
				return
			}
			isUnclear(t, "resume", err)
			if after := tr.vs[1].Mini.TTL("k"); after > before {
				t.Errorf("a resume that failed has prolonged the term by %v", after-before)
			}
		})
	}
}

// The name of node 1 leads A to the server of node 0, as after a wrong answer of DNS, and A's link
// to node 2 is down. If that one server counted twice, A would go on when B has the key.
func TestAServerCountsOnceWhateverItsName(t *testing.T) {
	try(t, 3, func(t *testing.T, tr trial) {
		var astray atomic.Bool
		a, links := tr.named(t, func(i int) int {
			if i == 1 && astray.Load() {
				return 0
			}
			return i
		})
		b, _ := tr.linked(t)
		c := aClaim("a-key")
		tr.acquire(t, a, c)

		astray.Store(true)
		links[1].Cut()
		links[2].Down()
		ended := make(chan struct{})
		close(ended)
		asked := []chan struct{}{ended, ended, ended}
		for range 3 { // the first finds a connection that was cut
			h := a.hs.byToken[c.Token]
			if _, err := a.hs.confirm(t.Context(), h, asked); err == nil {
				t.Errorf("a fence counts that one server of three has")
			}
		}
		for end := time.Now().Add(c.TTL); time.Now().Before(end); time.Sleep(c.TTL / 10) {
			isUnclear(t, "a renewal by one server of three", renewOne(a, c))
		}
		tr.acquire(t, b, aClaim("a-key"))

		// The second answer of the server is that A's own record is there.
		isUnclear(t, "acquire a free key of one server of three", ask(t, a, aClaim("free")))
	})
}

// A record that a vote did not prove counts from the next renewal on.
func TestAnUnprovenRecordCountsFromTheNextRenewalOn(t *testing.T) {
	held(t, 3, func(t *testing.T, tr trial, c backend.Claim) {
		tr.d.hs.byToken[c.Token].on[0].counts = time.Time{} // as if its vote had been lost
		time.Sleep(c.TTL / 2)
		tr.each("2", hang)
		isUnclear(t, "a renewal by a record without a proof", renewOne(tr.d, c))
		if left := tr.vs[0].Mini.TTL("k"); left > c.TTL/2 {
			t.Errorf("a renewal without a quorum has prolonged a record without a proof: %v", left)
		}
		tr.each("2", flow)
		time.Sleep(time.Second)
		tr.renews(t, "by the other two", c)
		synctest.Wait() // node 1 may answer after the other two have decided
		tr.each("2", hang)
		tr.renews(t, "the record counts now", c)
	})
}

// A node that was repaired in the last second of a term does not count for that hold. See SURE_LATE
// in lab/model/redlock.pml.
func TestARepairInTheLastSecondDoesNotCount(t *testing.T) {
	for ttl, counts := range map[time.Duration]bool{attemptTime * 9 / 10: false, attemptTime * 3 / 2: true} {
		try(t, 3, func(t *testing.T, tr trial) {
			c := aClaim("k")
			c.TTL = ttl
			tr.acquire(t, tr.d, c)
			synctest.Wait()
			tr.lose("0", "k")
			tr.renews(t, "with two of three", c)
			tr.want(t, "repaired", c, "xxx")
			tr.lose("2", "k")
			if err := renewOne(tr.d, c); counts {
				wants(t, "a repair before that", err, nil)
			} else {
				isUnclear(t, "a repair in the last second", err)
			}
		})
	}
}

// A vote counts only if the node did not wait any more when it was asked, however late its
// reply comes.
func TestAVoteOfANodeThatWaitsNeverCounts(t *testing.T) {
	try(t, 3, func(t *testing.T, tr trial) {
		b, ofB := tr.linked(t)
		tr.each("0", empty)
		tr.each("2", down)
		end := tr.abstains(t, "at once", b, aClaim, "0", absence)
		time.Sleep(time.Until(end) - 100*time.Millisecond)
		ofB[0].Delay(300 * time.Millisecond)
		isUnclear(t, "its reply comes after the wait", ask(t, b, aClaim("k")))
		time.Sleep(time.Second)
		wants(t, "afterwards", ask(t, b, aClaim("k")), nil)
	})
}

// Two servers swap their addresses. Both nodes vote again, although each finds the run of its server
// in what is known of the other node.
func TestTwoNodesThatSwapTheirAddresses(t *testing.T) {
	try(t, 3, func(t *testing.T, tr trial) {
		var swapped atomic.Bool
		d, links := tr.named(t, func(i int) int {
			if i > 0 && swapped.Load() {
				return 3 - i
			}
			return i
		})
		swapped.Store(true)
		links[1].Cut()
		links[2].Cut()
		for range 4 {
			time.Sleep(time.Second)
			_ = ask(t, d, aClaim("k"))
		}
		time.Sleep(time.Second)
		tr.acquire(t, d, aClaim("other"))
	})
}
