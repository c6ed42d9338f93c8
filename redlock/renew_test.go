package redlock

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

// held runs f with n nodes that all have c's record, and that know the scripts of
// renewals and repairs.
func held(t *testing.T, n int, f func(t *testing.T, tr trial, c backend.Claim)) {
	t.Helper()
	try(t, n, nil, func(t *testing.T, tr trial) {
		w := aClaim("w")
		tr.acquire(t, tr.d, w)
		synctest.Wait()
		tr.vs[0].Mini.Del("w")
		if err := renewOne(tr.d, w, time.Second); err != nil {
			t.Fatalf("renew: %v", err)
		}
		for _, v := range tr.vs {
			await.Must(t, v.Direct().ScriptLoad(t.Context(), source("repair")).Err())
		}
		synctest.Wait()
		tr.release(t, tr.d, w)
		c := aClaim("k")
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
	if err := renewOne(tr.d, c, 3*time.Second); err != nil {
		t.Errorf("%s: %v", what, err)
	}
	took(t, what, began, 0)
}

// lost fails the test unless a renewal reports the loss of c at once.
func (tr trial) lost(t *testing.T, what string, c backend.Claim) {
	t.Helper()
	began := time.Now()
	if err := renewOne(tr.d, c, 3*time.Second); !errors.Is(err, backend.ErrLost) {
		t.Errorf("%s: got %v, want ErrLost", what, err)
	}
	took(t, what, began, 0)
}

func TestRenewalNeedsAQuorumThatStillHadIt(t *testing.T) {
	held(t, 5, func(t *testing.T, tr trial, c backend.Claim) {
		tr.lose("03", "k")
		time.Sleep(3 * time.Second)
		tr.renews(t, "with three of five", c)
		tr.want(t, "what was lost is given back", c, "xxxxx")
		for i, v := range tr.vs {
			if left := v.Mini.TTL("k"); left < 9800*time.Millisecond || left > 10*time.Second {
				t.Errorf("node %d has it for %v", i, left)
			}
		}

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

// A repair ends with the lease by the node's own clock, however late it arrives.
func TestRepairIsNeverLaterThanTheLease(t *testing.T) {
	for _, skew := range []time.Duration{0, time.Hour, -time.Hour} {
		for late, want := range map[time.Duration]string{time.Millisecond: "xxx", 9 * time.Second: "xxx", 9890 * time.Millisecond: "xxx", 9900 * time.Millisecond: "-xx", 9990 * time.Millisecond: "-xx"} {
			held(t, 3, func(t *testing.T, tr trial, c backend.Claim) {
				v := tr.vs[0]
				v.Skew(skew)
				tr.lose("0", "k")
				began := time.Now()
				holdNext(v.Proxy, c.Token+"#"+c.Owner, late)
				tr.renews(t, "with two of three", c)
				synctest.Wait()
				if v.Proxy.Pending() > 0 {
					t.Fatal("nothing was given back")
				}
				time.Sleep(late)
				tr.want(t, "late "+late.String(), c, want)
				if left, end := v.Mini.TTL("k"), 9898*time.Millisecond-time.Since(began); v.Mini.Exists("k") && (left > end || left < end-2*time.Millisecond) {
					t.Errorf("late %v: given for %v, want %v, what is left of the lease", late, left, end)
				}
			})
		}
	}
}

// After an unlock no command writes the key: neither a renewal with a late answer, nor a
// repair in flight.
func TestNothingIsRepairedAfterUnlock(t *testing.T) {
	t.Run("late answer", func(t *testing.T) {
		held(t, 3, func(t *testing.T, tr trial, c backend.Claim) {
			tr.lose("0", "k")
			tr.vs[0].Proxy.Delay(500 * time.Millisecond)
			tr.vs[0].Proxy.Commands()
			tr.renews(t, "with two of three", c)
			tr.release(t, tr.d, c)
			time.Sleep(5 * time.Second)
			tr.want(t, "afterwards", c, "---")
			for _, cmd := range tr.vs[0].Proxy.Commands() {
				if strings.Contains(cmd, c.Token+"#"+c.Owner) {
					t.Errorf("%q after Unlock", cmd)
				}
			}
		})
	})
	for _, late := range []time.Duration{300 * time.Millisecond, 1500 * time.Millisecond} {
		t.Run("on its way for "+late.String(), func(t *testing.T) {
			held(t, 3, func(t *testing.T, tr trial, c backend.Claim) {
				tr.lose("0", "k")
				holdNext(tr.vs[0].Proxy, c.Token+"#"+c.Owner, late)
				tr.renews(t, "with two of three", c)
				synctest.Wait()
				if tr.vs[0].Proxy.Pending() > 0 {
					t.Fatal("nothing was given back")
				}
				began := time.Now()
				tr.release(t, tr.d, c)
				took(t, "release", began, 0)
				time.Sleep(4 * time.Second)
				tr.want(t, "afterwards", c, "---")
			})
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
		if err := renewOne(tr.d, c, 890*time.Millisecond); err == nil || backend.Definite(err) {
			t.Errorf("renew: got %v, want no answer", err)
		}
		time.Sleep(2 * time.Second)
		tr.want(t, "after the lease's end", c, "-xx")
	})
}

// A lost hold, or a node that hangs, does not change the results of other holds in the batch.
func TestRenewalsInBulkHaveTheirOwnResults(t *testing.T) {
	held(t, 3, func(t *testing.T, tr trial, c backend.Claim) {
		all := []backend.Claim{c, aClaim("gone"), aClaim("half"), aClaim("long")}
		tr.acquire(t, tr.d, all[2])
		synctest.Wait()
		tr.lose("0", "half")
		all[3].TTL = 3 * time.Minute
		tr.vs[2].Proxy.Stall()
		defer tr.vs[2].Proxy.Flow()
		got := make([]error, len(all))
		told := make([]int, len(all))
		began := time.Now()
		tr.d.Renew(t.Context(), all, func(i int, _ backend.Grant, err error) { got[i] = err; told[i]++ })
		took(t, "the batch", began, time.Second) // one of two that answer does not have one of them
		for i, n := range told {
			if n != 1 {
				t.Errorf("claim %d was told %d times", i, n)
			}
		}
		if got[0] != nil || !errors.Is(got[1], backend.ErrLost) || !errors.Is(got[3], backend.ErrInvalid) {
			t.Errorf("got %v", got)
		}
		isOutage(t, "one has it, one does not, one hangs", got[2], "2")
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

// While the others suffice, a node that refuses connections is asked once in
// probeEvery, and costs nothing otherwise.
func TestANodeThatRefusesIsLeftAloneWhileTheOthersSuffice(t *testing.T) {
	try(t, 5, nil, func(t *testing.T, tr trial) {
		tr.each("13", (*redistest.VirtualServer).Kill)
		tr.use(t, "its connections are found dead", "x-x-x")
		tr.use(t, "it refuses new ones", "x-x-x")
		before := tr.vs[1].Dials.Load()
		for range 1000 {
			tr.use(t, "without two of five", "x-x-x")
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		if n := tr.vs[1].Dials.Load() - before; n < 4 || n > 12 { // go-redis may make two for a call
			t.Errorf("asked for %d connections in 1 s, want one in %v", n, probeEvery)
		}

		_ = tr.d.m.nodes[1].admit() // for which it may be time
		if err := fmt.Sprint(tr.d.m.nodes[1].admit()); !strings.Contains(err, "node2:") || !strings.Contains(err, syscall.ECONNREFUSED.Error()) {
			t.Errorf("why it is not asked: %s", err)
		}

		// Without a third node there is no quorum.
		tr.each("4", (*redistest.VirtualServer).Kill)
		var err error
		for range 10 { // until it is known that the third one refuses, too
			_, err = tr.d.Acquire(t.Context(), aClaim("k"))
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
				_, _ = tr.d.Acquire(t.Context(), aClaim("all are"))
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
	try(t, 3, nil, func(t *testing.T, tr trial) {
		tr.vs[1].Proxy.Down()
		suspect := func(n *node) bool {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.suspicionLocked() != nil
		}
		for !suspect(tr.d.m.nodes[1]) { // a use need not ask all nodes
			tr.use(t, "without a node", "x-x")
		}

		before := tr.vs[1].Dials.Load()
		for range 1000 {
			tr.use(t, "without a node", "x-x")
			time.Sleep(time.Millisecond)
		}
		if n := tr.vs[1].Dials.Load() - before; n < 4 || n > 12 {
			t.Errorf("%d connections in 1 s, want one in %v", n, probeEvery)
		}

		tr.vs[1].Proxy.Up()
		time.Sleep(probeEvery)
		tr.use(t, "the node is back", "xxx")
		tr.use(t, "the node stays", "xxx")
	})
}

// A node that hangs and is asked whether it is back does not delay what the other nodes decide.
func TestAProbeOfANodeThatHangsDelaysNoVerdict(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		tr.vs[0].Proxy.Stall()
		tr.acquire(t, tr.d, aClaim("first"))
		time.Sleep(time.Second) // it is suspect now
		synctest.Wait()
		elsewhere(t, tr.vs[1], "k") // one yes and one no
		time.Sleep(probeEvery)
		c := aClaim("k")
		began := time.Now()
		_, err := tryOnce(t, tr.d, c, 0, noLead)
		if !errors.Is(err, backend.ErrHeld) {
			t.Errorf("got %v, want ErrHeld", err)
		}
		took(t, "the attempt", began, leadTimeout)
		tr.vs[0].Proxy.Flow()
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
		for i, timeout := range []time.Duration{100 * time.Millisecond, 200 * time.Millisecond} {
			c.Timeout = timeout
			if err := renewOne(tr.d, c, timeout); (err == nil) != (i == 1) {
				t.Errorf("within %v: %v", timeout, err)
			}
		}
	})
}

// Renewals leave a node alone that hangs, as other calls do.
func TestRenewalsWaitForFewAnswersOfANodeThatHangs(t *testing.T) {
	held(t, 3, func(t *testing.T, tr trial, c backend.Claim) {
		tr.vs[2].Proxy.Stall()
		for range 200 {
			tr.renews(t, "by two of three", c)
			time.Sleep(10 * time.Millisecond)
		}
		if n := len(running()); n > int(c.Timeout/probeEvery)+2 {
			t.Errorf("%d goroutines wait for the node", n)
		}
		tr.vs[2].Proxy.Flow()
		time.Sleep(c.Timeout)
		tr.renews(t, "when the node is back", c)
		synctest.Wait()
		if left := tr.vs[2].Mini.TTL("k"); left != c.TTL {
			t.Errorf("the node has the record for %v", left)
		}
	})
}

// If there is no quorum without the lead, an attempt waits for its vote, however slow it is.
func TestALeadThatIsNeededIsWaitedFor(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		tr.vs[2].Kill()
		for i := range 5 {
			tr.acquire(t, tr.d, aClaim(fmt.Sprint("two of three", i)))
			synctest.Wait()
		}
		tr.vs[0].Proxy.Delay(5 * leadTimeout)
		if _, err := tryOnce(t, tr.d, aClaim("k"), 0, 0); err != nil {
			t.Error(err)
		}
	})
}

// A hold that a renewal has found lost does not block the key. Its release removes the records of a
// minority, at once or when their node is back, however long the last renewal prolonged them.
func TestReleaseAfterALossRemovesWhatIsLeft(t *testing.T) {
	for _, renewed := range []bool{false, true} {
		try(t, 5, nil, func(t *testing.T, tr trial) {
			c := aClaim("k")
			tr.acquire(t, tr.d, c)
			synctest.Wait()
			longer := c
			longer.TTL = time.Minute
			if renewed {
				strategytest.Want(t, "renew", renewOne(tr.d, longer, time.Second), nil)
				synctest.Wait()
			}
			tr.each("234", func(v *redistest.VirtualServer) { v.Mini.Del("k") })
			strategytest.Want(t, "renew", renewOne(tr.d, longer, time.Second), backend.ErrLost)
			tr.want(t, "after the loss", c, "xx---")
			tr.vs[1].Proxy.Down()
			strategytest.Want(t, "release", tr.d.Release(t.Context(), c), backend.ErrLost)
			tr.want(t, "released", c, "-x---")
			time.Sleep(30 * time.Second)
			tr.vs[1].Proxy.Up()
			time.Sleep(5 * time.Second)
			tr.want(t, "when the node is back", c, "-----")
		})
	}
}
