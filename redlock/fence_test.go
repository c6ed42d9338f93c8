package redlock

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// Holders follow one another, each with a random majority of nodes whose clocks are set.
func TestFencesGrowOverAnyMajoritiesThroughClocksThatDiffer(t *testing.T) {
	await.Crowd(t)
	t.Parallel()
	for seed := range uint64(4) {
		synctest.Test(t, func(t *testing.T) {
			r, n := rand.New(rand.NewPCG(seed, 1)), []int{3, 5}[seed%2]
			vs, drivers := redistest.VirtualNodes(t, n), make([]*driver, 3)
			for i := range drivers {
				drivers[i] = drives(t, vs.Clients(), nil)
			}
			holds, last := 0, uint64(0)
			hold := func(d *driver) {
				c := aFenced("k")
				c.TTL = time.Second
				g, err := d.Acquire(t.Context(), c)
				switch {
				case errors.Is(err, backend.ErrHeld):
					time.Sleep(c.TTL) // what is left of an earlier one
				case err == nil && g.Fence <= last:
					t.Errorf("seed %d: hold %d has fence %d after %d", seed, holds, g.Fence, last)
				case err == nil:
					holds, last = holds+1, g.Fence
					_ = d.Release(t.Context(), c)
				}
			}

			hold(drivers[0])
			for range 40 {
				gone := r.Perm(n)[:r.IntN(n/2+1)]
				for i, v := range vs {
					if slices.Contains(gone, i) {
						v.Proxy.Down()
					} else {
						v.Proxy.Up()
					}
				}
				if i := r.IntN(n); r.IntN(2) == 0 {
					vs[i].Skew(time.Duration(r.Int64N(int64(20*time.Minute))) - 10*time.Minute)
				}
				for range 1 + r.IntN(4) {
					hold(drivers[r.IntN(len(drivers))])
					time.Sleep(time.Duration(r.IntN(2000)) * time.Microsecond)
				}
			}
			// The order of the votes decides how many are granted: 41 at least in 80 runs of a seed.
			if holds < 20 {
				t.Errorf("seed %d: %d holds are too few to tell", seed, holds)
			}
		})
	}
}

func TestACounterThatIsNotANumberIsReportedAndKept(t *testing.T) {
	const counter = "hasp:{k}:fence:k"
	try(t, 3, nil, func(t *testing.T, tr trial) {
		tr.warm(t, tr.d, aFenced("k"))
		tr.vs[0].Mini.Set(counter, "somebody's")
		tr.vs[1].Mini.Del(counter)
		tr.vs[1].Mini.Lpush(counter, "somebody's")
		before := tr.vs[0].Mini.Dump() + tr.vs[1].Mini.Dump()

		_, err := tr.d.Acquire(t.Context(), aFenced("k"))
		if err == nil || errors.Is(err, backend.ErrHeld) || strings.Count(err.Error(), counter+`" is no fence counter; remove it`) != 2 {
			t.Errorf("got %v, want an outage that names both counters", err)
		}
		if after := tr.vs[0].Mini.Dump() + tr.vs[1].Mini.Dump(); after != before {
			t.Errorf("the nodes have\n%s\nand had\n%s", after, before)
		}

		tr.vs[0].Mini.Del(counter)
		time.Sleep(2 * time.Second)
		tr.warm(t, tr.d, aFenced("k")) // one such node is not in the way

		// One such node is not in the way of an attempt that asks it first.
		for lead := range 2 {
			c := aFenced("k")
			if _, err := tryOnce(t, tr.d, c, 0, lead); err != nil {
				t.Errorf("lead %d: %v", lead, err)
			}
			synctest.Wait()
			tr.release(t, tr.d, c)
		}
	})
}

// Above 2^53 Lua cannot count in steps of one, so the counters end there. A reply with such a
// fence is no vote, nor one with no fence or no mark.
func TestNoFenceFollowsTheLargest(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		for i, reply := range []string{"+9007199254740993\r\n+mark", "+0\r\n+mark", "+5\r\n:1"} {
			c := aFenced("k")
			a := &attempt{hs: tr.d.hs, c: c, h: newHold(c, 0, noLead, tr.d.m), lead: noLead}
			tr.vs[i].Proxy.Answer(a.h.record, "*4\r\n:1\r\n"+reply+"\r\n+run\r\n")
			if r := a.send(t.Context(), tr.d.m.nodes[i]); !r.unknown || r.vote == nil {
				t.Errorf("%q: %+v", reply, r)
			}
		}
	})
}

// Node 1 has voted for A, whose other votes are in flight. B has nodes 2 and 3, and
// writes its fence to nodes 1 and 3, but not to 2. If B were granted the key, A could
// follow with the votes of nodes 1 and 2, and with the same fence.
func TestAFenceCountsOnlyWhereItsHolderHasTheKey(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		const counter = "hasp:{k}:fence:k"
		for _, v := range tr.vs {
			v.Mini.Set(counter, "4000000000000000") // no clock decides
		}
		a, b := drives(t, tr.vs.Clients(), nil), drives(t, tr.vs.Clients(), nil)
		ca, cb := aFenced("k"), aFenced("k")
		ca.Timeout = 5 * time.Second
		for _, v := range tr.vs[1:] {
			v.Proxy.Fail("mark "+ca.Token, faultproxy.HoldRequest)
		}
		var ga backend.Grant
		var erra error
		done := make(chan struct{})
		go func() { defer close(done); ga, erra = a.Acquire(t.Context(), ca) }()
		synctest.Wait()
		tr.vs[1].Proxy.Fail("k "+markKey+" "+counter+" "+cb.Token, faultproxy.LoseRequest)
		gb, err := b.Acquire(t.Context(), cb)
		if err == nil {
			t.Errorf("B is granted fence %d, of whose nodes only one knows it", gb.Fence)
		}
		if tr.vs[1].Proxy.Pending() > 0 {
			t.Error("B has not tried to raise its fence on node 2")
		}
		_ = b.Release(t.Context(), cb)
		time.Sleep(time.Second)
		tr.vs[1].Proxy.Release()
		<-done
		if erra != nil {
			t.Errorf("A: %v", erra)
		}
		if err == nil && ga.Fence <= gb.Fence {
			t.Errorf("A has fence %d after B had %d", ga.Fence, gb.Fence)
		}
	})
}

// Node 3 takes the key late, and the fence does not reach node 2. Then the fence waits
// for the record on node 3.
func TestAFenceIsWrittenAfterALateVote(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		c := aFenced("k")
		tr.vs[2].Proxy.Fail("mark "+c.Token, faultproxy.HoldRequest)
		tr.vs[1].Proxy.Fail("k "+markKey+" hasp:{k}:fence:k "+c.Token, faultproxy.LoseRequest)
		time.AfterFunc(100*time.Millisecond, tr.vs[2].Proxy.Release)
		tr.acquire(t, tr.d, c)
	})
}
