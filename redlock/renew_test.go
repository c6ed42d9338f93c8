package redlock

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// held runs f with n nodes that all have c's record, and that know the scripts of
// renewals and repairs.
func held(t *testing.T, n int, f func(t *testing.T, tr trial, c backend.Claim)) {
	t.Helper()
	try(t, n, func(t *testing.T, tr trial) {
		w, c := aClaim("w"), aClaim("k")
		tr.acquire(t, tr.d, w)
		synctest.Wait()
		tr.lose("0", "w")
		wants(t, "renew", renewOne(tr.d, w), nil)
		for _, v := range tr.vs {
			await.Must(t, v.Direct().ScriptLoad(t.Context(), source("repair")).Err())
		}
		synctest.Wait()
		tr.release(t, tr.d, w)
		tr.acquire(t, tr.d, c)
		synctest.Wait()
		f(t, tr, c)
	})
}

// lose deletes the key on the nodes that which lists.
func (tr trial) lose(which, key string) {
	tr.each(which, func(v *redistest.VirtualServer) { v.Mini.Del(key) })
}

// renews fails the test unless c is renewed at once.
func (tr trial) renews(t *testing.T, what string, c backend.Claim) {
	t.Helper()
	began := time.Now()
	wants(t, what, renewOne(tr.d, c), nil)
	took(t, what, began, 0)
}

// lost fails the test unless a renewal reports the loss of c at once.
func (tr trial) lost(t *testing.T, what string, c backend.Claim) {
	t.Helper()
	began := time.Now()
	wants(t, what, renewOne(tr.d, c), backend.ErrLost)
	took(t, what, began, 0)
}

func TestRenewalNeedsAQuorumThatStillHadIt(t *testing.T) {
	held(t, 5, func(t *testing.T, tr trial, c backend.Claim) {
		tr.lose("03", "k")
		time.Sleep(3 * time.Second)
		tr.renews(t, "with three of five", c)
		tr.want(t, "what was lost is given back", c, "xxxxx")
		tr.left(t, "given back", c, 9800*time.Millisecond, c.TTL)

		// The three that had it first are one now.
		tr.lose("12", "k")
		before := tr.vs[0].Proxy.Count()
		tr.renews(t, "what was given back counts", c)
		tr.want(t, "again", c, "xxxxx")
		if sent := tr.vs[0].Proxy.Count() - before; sent != 1 {
			t.Errorf("a node that has it gets %d commands, want one", sent)
		}

		tr.lose("124", "k")
		tr.lost(t, "with two of five", c)
		time.Sleep(time.Second)
		tr.want(t, "nothing is given to nodes that do not have a lost one", c, "x--x-")
	})
}

// repairsLate renews c without node 0, whose repair arrives late.
func (tr trial) repairsLate(t *testing.T, c backend.Claim, late time.Duration) {
	t.Helper()
	tr.lose("0", "k")
	holdNext(tr.vs[0].Proxy, c.Token+"#"+c.Owner, late)
	tr.renews(t, "with two of three", c)
	tr.each("0", happened(t, "repair"))
}

// A repair ends with the lease by the node's own clock, however late it arrives.
func TestRepairIsNeverLaterThanTheLease(t *testing.T) {
	const trusted = 9898 * time.Millisecond
	for _, skew := range []time.Duration{0, time.Hour, -time.Hour} {
		for _, late := range []time.Duration{time.Millisecond, 9 * time.Second, 9890 * time.Millisecond, 9900 * time.Millisecond, 9990 * time.Millisecond} {
			held(t, 3, func(t *testing.T, tr trial, c backend.Claim) {
				tr.vs[0].Skew(skew)
				tr.repairsLate(t, c, late)
				time.Sleep(late)
				if late > trusted {
					tr.want(t, "too late", c, "-xx")
					return
				}
				tr.want(t, "late", c, "xxx")
				tr.lose("12", "k")
				tr.left(t, "repaired", c, trusted-late-2*time.Millisecond, trusted-late)
			})
		}
	}
}

// After an unlock no command writes the key: neither a renewal with a late answer, nor a
// repair in flight.
func TestNothingIsRepairedAfterUnlock(t *testing.T) {
	for _, late := range []time.Duration{0, 300 * time.Millisecond, 1500 * time.Millisecond} {
		held(t, 3, func(t *testing.T, tr trial, c backend.Claim) {
			if late > 0 {
				tr.repairsLate(t, c, late)
			} else {
				tr.lose("0", "k")
				tr.each("0", delay(500*time.Millisecond))
				tr.renews(t, "with a late answer", c)
			}
			tr.vs[0].Proxy.Commands()
			began := time.Now()
			tr.release(t, tr.d, c)
			took(t, "release", began, 0)
			time.Sleep(5 * time.Second)
			tr.want(t, "afterwards", c, "---")
			if sent := strings.Join(tr.vs[0].Proxy.Commands(), "\n"); strings.Contains(sent, c.Token+"#"+c.Owner) {
				t.Errorf("after Unlock: %s", sent)
			}
		})
	}
}

// A renewal whose caller has stopped waiting repairs nothing: the lease may have ended meanwhile.
func TestAnAbandonedRenewalRepairsNothing(t *testing.T) {
	held(t, 3, func(t *testing.T, tr trial, c backend.Claim) {
		time.Sleep(9 * time.Second)
		tr.lose("0", "k")
		for _, v := range tr.vs[1:] {
			v.Proxy.Delay(950 * time.Millisecond)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 890*time.Millisecond)
		defer cancel()
		tr.d.Renew(ctx, []backend.Claim{c}, func(_ int, _ backend.Grant, err error) { t.Errorf("renew: got %v, want no answer", err) })
		time.Sleep(2 * time.Second)
		tr.want(t, "after the lease's end", c, "-xx")
	})
}

// A lost hold, or a node that hangs, does not change the results of other holds in the batch.
func TestRenewalsInBulkHaveTheirOwnResults(t *testing.T) {
	held(t, 3, func(t *testing.T, tr trial, c backend.Claim) {
		gone, half, long := aClaim("gone"), aClaim("half"), aClaim("long")
		tr.acquire(t, tr.d, half)
		synctest.Wait()
		tr.lose("0", "half")
		long.TTL = 3 * time.Minute
		tr.each("2", hang)
		defer tr.each("2", flow)
		got := make([][]error, 4) // an element for each claim, because results come at the same time
		began := time.Now()
		tr.d.Renew(t.Context(), []backend.Claim{c, gone, half, long}, func(i int, _ backend.Grant, err error) { got[i] = append(got[i], err) })
		took(t, "the batch", began, time.Second) // one of two that answer does not have one of them
		for i, want := range []error{nil, backend.ErrLost, nil, backend.ErrInvalid} {
			if len(got[i]) != 1 {
				t.Fatalf("claim %d has the results %v", i, got[i])
			}
			if i != 2 {
				wants(t, fmt.Sprint("claim ", i), got[i][0], want)
			}
		}
		isOutage(t, "one has it, one does not, one hangs", got[2][0], "2")
	})
}

// use takes a key and releases it. It fails the test unless holds returns on meanwhile.
func (tr trial) use(t *testing.T, what, on string) {
	t.Helper()
	c := aClaim("k")
	tr.acquire(t, tr.d, c)
	tr.want(t, what, c, on)
	tr.release(t, tr.d, c)
	synctest.Wait()
}

// leavesAlone uses the key for a second, and fails the test unless node 1, which lacks the record,
// is asked for about one connection in probeEvery.
func (tr trial) leavesAlone(t *testing.T, on string) {
	t.Helper()
	before := tr.vs[1].Dials.Load()
	for range 1000 {
		tr.use(t, "without a node", on)
		time.Sleep(time.Millisecond)
	}
	if n := tr.vs[1].Dials.Load() - before; n < 4 || n > 12 { // go-redis may make two for a call
		t.Errorf("asked for %d connections in 1 s, want one in %v", n, probeEvery)
	}
}

// While the others suffice, a node that refuses connections is asked once in
// probeEvery, and costs nothing otherwise.
func TestANodeThatRefusesIsLeftAloneWhileTheOthersSuffice(t *testing.T) {
	try(t, 5, func(t *testing.T, tr trial) {
		tr.each("13", (*redistest.VirtualServer).Kill)
		tr.use(t, "its connections are found dead", "x-x-x")
		tr.use(t, "it refuses new ones", "x-x-x")
		tr.leavesAlone(t, "x-x-x")

		// Without a third node there is no quorum.
		tr.vs[4].Kill()
		var err error
		for range 10 { // until it is known that the third one refuses, too
			err = ask(t, tr.d, aClaim("k"))
			isOutage(t, "without three of five", err, "134")
		}
		if n := strings.Count(fmt.Sprint(err), syscall.ECONNREFUSED.Error()); n != 3 {
			t.Errorf("%d of three are said to refuse: %v", n, err)
		}
		synctest.Wait()
		tr.each("134", func(v *redistest.VirtualServer) { v.Start(true) })
		time.Sleep(probeEvery)
		for range 2 { // the nodes begin to wait, and then they have waited
			for range 2 {
				_ = ask(t, tr.d, aClaim("all are"))
				synctest.Wait()
			}
			time.Sleep(absence)
		}
		tr.use(t, "all are", "xxxxx")
	})
}

// A node that accepts connections and closes each of them is left alone like one
// that refuses them, and is used again once it answers.
func TestANodeThatClosesConnectionsIsLeftAlone(t *testing.T) {
	try(t, 3, func(t *testing.T, tr trial) {
		tr.each("1", down)
		suspect := func(n *node) bool {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.suspicionLocked() != nil
		}
		for !suspect(tr.d.m.nodes[1]) { // a use need not ask all nodes
			tr.use(t, "without a node", "x-x")
		}
		tr.leavesAlone(t, "x-x")

		tr.each("1", up)
		time.Sleep(probeEvery)
		tr.use(t, "the node is back", "xxx")
		tr.use(t, "the node stays", "xxx")
	})
}

// A node that hangs and is asked whether it is back does not delay what the other nodes decide.
func TestAProbeOfANodeThatHangsDelaysNoVerdict(t *testing.T) {
	try(t, 3, func(t *testing.T, tr trial) {
		tr.each("0", hang)
		tr.acquire(t, tr.d, aClaim("first"))
		time.Sleep(time.Second) // it is suspect now
		synctest.Wait()
		tr.each("1", elsewhere(t, "k")) // one yes and one no
		time.Sleep(probeEvery)
		began := time.Now()
		wants(t, "attempt", tryOnce(t, tr.d, aClaim("k"), 0, noLead), backend.ErrHeld)
		took(t, "the attempt", began, leadTimeout)
		tr.each("0", flow)
	})
}

// The engine tries a renewal for a short time first, and then for longer, so that a distant node
// over a new connection can answer. The first try alone must not make the node suspect.
func TestARenewalIsTriedAgainForLonger(t *testing.T) {
	held(t, 3, func(t *testing.T, tr trial, c backend.Claim) {
		for _, v := range tr.vs {
			v.Proxy.StallRequests()
			time.AfterFunc(110*time.Millisecond, v.Proxy.Flow)
		}
		c.Timeout = 100 * time.Millisecond
		isUnclear(t, "a short try", renewOne(tr.d, c))
		c.Timeout = 200 * time.Millisecond
		wants(t, "a longer try", renewOne(tr.d, c), nil)
	})
}

// Renewals leave a node alone that hangs, as other calls do.
func TestRenewalsWaitForFewAnswersOfANodeThatHangs(t *testing.T) {
	held(t, 3, func(t *testing.T, tr trial, c backend.Claim) {
		tr.each("2", hang)
		for range 200 {
			tr.renews(t, "by two of three", c)
			time.Sleep(10 * time.Millisecond)
		}
		if n := len(running()); n > int(c.Timeout/probeEvery)+2 {
			t.Errorf("%d goroutines wait for the node", n)
		}
		tr.each("2", flow)
		time.Sleep(c.Timeout)
		tr.renews(t, "when the node is back", c)
		tr.left(t, "when the node is back", c, c.TTL, c.TTL)
	})
}

// twoOfThree kills node 2, and makes attempts until that is known.
func (tr trial) twoOfThree(t *testing.T) {
	t.Helper()
	tr.vs[2].Kill()
	for i := range 5 {
		tr.acquire(t, tr.d, aClaim(fmt.Sprint("two of three", i)))
		synctest.Wait()
	}
}

// If there is no quorum without the lead, an attempt waits for its vote, however slow it is.
func TestALeadThatIsNeededIsWaitedFor(t *testing.T) {
	try(t, 3, func(t *testing.T, tr trial) {
		tr.twoOfThree(t)
		tr.each("0", delay(5*leadTimeout))
		wants(t, "attempt", tryOnce(t, tr.d, aClaim("k"), 0, 0), nil)
	})
}

// A hold that a renewal has found lost does not block the key. Its release removes the records of a
// minority, at once or when their node is back, however long the last renewal prolonged them.
func TestReleaseAfterALossRemovesWhatIsLeft(t *testing.T) {
	for _, renewed := range []bool{false, true} {
		held(t, 5, func(t *testing.T, tr trial, c backend.Claim) {
			longer := c
			longer.TTL = time.Minute
			if renewed {
				tr.renews(t, "all have it", longer)
				synctest.Wait()
			}
			tr.lose("234", "k")
			tr.lost(t, "two have it", longer)
			tr.want(t, "after the loss", c, "xx---")
			tr.each("1", down)
			wants(t, "release", tr.d.Release(t.Context(), c), backend.ErrLost)
			tr.want(t, "released", c, "-x---")
			time.Sleep(30 * time.Second)
			tr.each("1", up)
			time.Sleep(5 * time.Second)
			tr.want(t, "when the node is back", c, "-----")
		})
	}
}
