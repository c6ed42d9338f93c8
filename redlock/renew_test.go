package redlock

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/strategytest"
)

// held runs f with n nodes that all have c's record, and that know the script of renewals.
func held(t *testing.T, n int, f func(tr trial, c backend.Claim)) {
	t.Helper()
	try(t, n, func(tr trial) {
		w, c := aClaim("w"), aClaim("k")
		tr.acquire(w)
		synctest.Wait()
		tr.lose("0", "w")
		tr.renews(w)
		synctest.Wait()
		tr.release(w)
		tr.acquire(c)
		synctest.Wait()
		f(tr, c)
	})
}

func TestRenewalNeedsAQuorumThatStillHadIt(t *testing.T) {
	held(t, 5, func(tr trial, c backend.Claim) {
		tr.lose("03", "k")
		time.Sleep(3 * time.Second)
		tr.renews(c)        // with three of five
		tr.want(c, "xxxxx") // what was lost is given back
		tr.left(c, 9800*time.Millisecond, c.TTL)

		// The three that had it first are one now.
		tr.lose("12", "k")
		before := tr.vs[0].Proxy.Count()
		tr.renews(c)        // what was given back counts
		tr.want(c, "xxxxx") // again
		if sent := tr.vs[0].Proxy.Count() - before; sent != 1 {
			tr.Errorf("a node that has it gets %d commands, want one", sent)
		}

		tr.lose("124", "k")
		tr.lost(c) // with two of five
		time.Sleep(time.Second)
		tr.want(c, "x--x-") // nothing is given to nodes that do not have a lost one
	})
}

// repairsLate renews c without node 0, whose repair arrives late.
func (tr trial) repairsLate(c backend.Claim, late time.Duration) {
	tr.Helper()
	tr.lose("0", "k")
	tr.holdNext("0", c.Token+"#"+c.Owner, late)
	tr.renews(c) // with two of three
	tr.happened("0", "repair")
}

// A repair ends with the lease by the node's own clock, however late it arrives.
func TestRepairIsNeverLaterThanTheLease(t *testing.T) {
	const trusted = 9898 * time.Millisecond
	for _, skew := range []time.Duration{0, time.Hour, -time.Hour} {
		for _, late := range []time.Duration{time.Millisecond, 9 * time.Second, 9890 * time.Millisecond, 9900 * time.Millisecond, 9990 * time.Millisecond} {
			held(t, 3, func(tr trial, c backend.Claim) {
				tr.vs[0].Skew(skew)
				tr.repairsLate(c, late)
				time.Sleep(late)
				if late > trusted {
					tr.want(c, "-xx") // too late
					return
				}
				tr.want(c, "xxx") // late
				tr.lose("12", "k")
				tr.left(c, trusted-late-2*time.Millisecond, trusted-late)
			})
		}
	}
}

// After an unlock no command writes the key: neither a renewal with a late answer, nor a
// repair in flight. If the key is kept, the release on that node waits for them. MaxTTL bounds the
// terms of holds, but a key may be kept for longer.
func TestNothingIsRepairedAfterUnlock(t *testing.T) {
	for _, row := range []struct {
		late, keep time.Duration
		on         string // which nodes keep the key
	}{
		{on: "---"}, // only the answer is late
		{late: 300 * time.Millisecond, on: "---"},
		{late: 300 * time.Millisecond, keep: 12 * time.Hour, on: "kkk"},
		{late: 1500 * time.Millisecond, on: "---"},
	} {
		held(t, 3, func(tr trial, c backend.Claim) {
			if row.late > 0 {
				tr.repairsLate(c, row.late)
			} else {
				tr.lose("0", "k")
				tr.each("0", delay(500*time.Millisecond))
				tr.renews(c)
			}
			tr.vs[0].Proxy.Commands()
			began := time.Now()
			c = strategytest.Kept(c, row.keep)
			tr.release(c)
			tr.took("release", began, 0)
			time.Sleep(5 * time.Second)
			tr.kept(c, row.on)
			if sent := strings.Join(tr.vs[0].Proxy.Commands(), "\n"); strings.Contains(sent, c.Token+"#"+c.Owner) {
				tr.Errorf("after Unlock: %s", sent)
			}
		})
	}
}

// A renewal whose caller has stopped waiting repairs nothing: the lease may have ended meanwhile.
func TestAnAbandonedRenewalRepairsNothing(t *testing.T) {
	held(t, 3, func(tr trial, c backend.Claim) {
		time.Sleep(9 * time.Second)
		tr.lose("0", "k")
		tr.each("12", delay(950*time.Millisecond))
		ctx, cancel := context.WithTimeout(tr.Context(), 890*time.Millisecond)
		defer cancel()
		tr.Renew(ctx, []backend.Claim{c}, func(_ int, _ backend.Grant, err error) { tr.Errorf("renew: got %v, want no answer", err) })
		time.Sleep(2 * time.Second)
		tr.want(c, "-xx") // after the lease's end
	})
}

// A lost hold, or a node that hangs, does not change the results of other holds in the batch.
func TestRenewalsInBulkHaveTheirOwnResults(t *testing.T) {
	held(t, 3, func(tr trial, c backend.Claim) {
		gone, half, long := aClaim("gone"), aClaim("half"), aClaim("long")
		tr.acquire(half)
		synctest.Wait()
		tr.lose("0", "half")
		long.TTL = 3 * time.Minute
		tr.each("2", hang)
		defer tr.each("2", flow)
		got := slices.Repeat([]error{errNotAsked}, 4)
		began := time.Now()
		tr.Renew(tr.Context(), []backend.Claim{c, gone, half, long}, func(i int, _ backend.Grant, err error) { got[i] = err })
		tr.took("the batch", began, time.Second) // one of two that answer does not have one of them
		tr.wants("renew", got[0], nil)
		tr.wants("gone", got[1], backend.ErrLost)
		tr.isOutage("one has it, one does not, one hangs", got[2], "2")
		tr.wants("a long term", got[3], backend.ErrInvalid)
	})
}

// use takes a key and releases it. It fails the test unless holds returns on meanwhile.
func (tr trial) use(on string) {
	tr.Helper()
	c := aClaim("k")
	tr.acquire(c)
	tr.want(c, on)
	tr.release(c)
	synctest.Wait()
}

// While the others suffice, a node that refuses connections, or accepts and closes each of them, is
// asked for one connection in probeEvery, and costs nothing otherwise.
func TestANodeThatRefusesIsLeftAloneWhileTheOthersSuffice(t *testing.T) {
	for text, row := range map[string]struct {
		cut, mend disturb
	}{
		syscall.ECONNREFUSED.Error(): {(*server).Kill, func(v *server) { v.Start(true) }},
		"":                           {down, up},
	} {
		three(t, func(tr trial) {
			tr.Log(text)
			tr.each("1", row.cut)
			n := tr.m.nodes[1]
			suspect := func() bool {
				n.mu.Lock()
				defer n.mu.Unlock()
				return n.suspicionLocked() != nil
			}
			for !suspect() { // a use need not ask all nodes
				tr.use("x-x")
			}
			before := tr.vs[1].Dials.Load()
			for range 1000 {
				tr.use("x-x")
				time.Sleep(time.Millisecond)
			}
			if n := tr.vs[1].Dials.Load() - before; n < 4 || n > 12 { // go-redis may make two for a call
				tr.Errorf("asked for %d connections in 1 s, want one in %v", n, probeEvery)
			}

			// Without a second node there is no quorum.
			tr.each("2", row.cut)
			var err error
			for range 10 { // until it is known that the second one refuses, too
				err = tr.ask(aClaim("k"))
				tr.isOutage("without two of three", err, "12")
			}
			if n := strings.Count(fmt.Sprint(err), text); text != "" && n != 2 {
				tr.Errorf("%d of two are said to refuse: %v", n, err)
			}
			synctest.Wait()
			tr.each("12", row.mend)
			time.Sleep(probeEvery)
			for range 2 { // the nodes begin to wait, and then they have waited
				for range 2 {
					_ = tr.ask(aClaim("all are"))
					synctest.Wait()
				}
				time.Sleep(absence)
			}
			tr.use("xxx")
			tr.use("xxx") // they stay
		})
	}
}

// A node that hangs does not delay what the other nodes decide, also when it is asked whether it is
// back. An attempt that needs its vote gives the other votes back, which would block the key.
func TestANodeThatHangsDelaysNoVerdict(t *testing.T) {
	three(t, func(tr trial) {
		tr.elsewhere("1", "k") // one yes and one no
		tr.each("0", hang)
		for range 2 {
			began, c := time.Now(), aClaim("k")
			tr.refused(c)
			if took := time.Since(began); took > c.Timeout/4 {
				tr.Errorf("refused after %v", took)
			}
			time.Sleep(leadTimeout)
			tr.want(c, "-?-")
			time.Sleep(time.Second) // node 0 is suspect now, and is asked again
		}

		began := time.Now()
		tr.wants("attempt", tr.tryOnce(aClaim("k"), 0, noLead), backend.ErrHeld)
		tr.took("the attempt", began, leadTimeout)
		tr.each("0", flow)
	})
}

// The engine tries a renewal for a short time first, and then for longer, so that a distant node
// over a new connection can answer. The first try alone must not make the node suspect.
func TestARenewalIsTriedAgainForLonger(t *testing.T) {
	held(t, 3, func(tr trial, c backend.Claim) {
		for _, v := range tr.vs {
			v.Proxy.StallRequests()
			time.AfterFunc(110*time.Millisecond, v.Proxy.Flow)
		}
		c.Timeout = 100 * time.Millisecond
		tr.isUnclear(tr.renew(c)) // a short try
		c.Timeout = 200 * time.Millisecond
		tr.wants("a longer try", tr.renew(c), nil)
	})
}

// Renewals leave a node alone that hangs, as other calls do.
func TestRenewalsWaitForFewAnswersOfANodeThatHangs(t *testing.T) {
	held(t, 3, func(tr trial, c backend.Claim) {
		tr.each("2", hang)
		for range 200 {
			tr.renews(c) // by two of three
			time.Sleep(10 * time.Millisecond)
		}
		if n := len(running()); n > int(c.Timeout/probeEvery)+2 {
			tr.Errorf("%d goroutines wait for the node", n)
		}
		tr.each("2", flow)
		time.Sleep(c.Timeout)
		tr.renews(c) // when the node is back
		tr.left(c, c.TTL, c.TTL)
	})
}

// A hold that a renewal has found lost does not block the key. Its release removes the records of a
// minority, at once or when their node is back, however long the last renewal prolonged them.
func TestReleaseAfterALossRemovesWhatIsLeft(t *testing.T) {
	for _, renewed := range []bool{false, true} {
		held(t, 5, func(tr trial, c backend.Claim) {
			longer := c
			longer.TTL = time.Minute
			if renewed {
				tr.renews(longer) // all have it
				synctest.Wait()
			}
			tr.lose("234", "k")
			tr.lost(longer)     // two have it
			tr.want(c, "xx---") // after the loss
			tr.each("1", down)
			tr.releasesNothing(c)
			tr.want(c, "-x---") // released
			time.Sleep(30 * time.Second)
			tr.each("1", up)
			time.Sleep(5 * time.Second)
			tr.want(c, "-----") // when the node is back
		})
	}
}
