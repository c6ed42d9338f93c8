package redlock

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
)

// Holders follow one another, each with a random majority of nodes whose clocks are set.
func TestFencesGrowOverAnyMajoritiesThroughClocksThatDiffer(t *testing.T) {
	await.Crowd(t)
	t.Parallel()
	for seed := range uint64(4) {
		n := []int{3, 5}[seed%2]
		fresh(t, n, nil, func(tr trial) {
			r := rand.New(rand.NewPCG(seed, 1))
			callers := []caller{tr.caller, tr.another(), tr.another()}
			holds, last := 0, uint64(0)
			hold := func(cr caller) {
				c := aFenced("k")
				c.TTL = time.Second
				g, err := cr.Acquire(tr.Context(), c)
				switch {
				case errors.Is(err, backend.ErrHeld):
					time.Sleep(c.TTL) // what is left of an earlier one
				case err == nil:
					if g.Fence <= last {
						tr.Errorf("seed %d: hold %d has fence %d after %d", seed, holds, g.Fence, last)
					}
					last = g.Fence
					holds++
					_ = cr.Release(tr.Context(), c)
				}
			}

			hold(tr.caller)
			for range 40 {
				tr.each("01234"[:n], up)
				for _, i := range r.Perm(n)[:r.IntN(n/2+1)] {
					down(tr.vs[i])
				}
				if i := r.IntN(n); r.IntN(2) == 0 {
					tr.vs[i].Skew(time.Duration(r.Int64N(int64(20*time.Minute))) - 10*time.Minute)
				}
				for range 1 + r.IntN(4) {
					hold(callers[r.IntN(3)])
					time.Sleep(time.Duration(r.IntN(2000)) * time.Microsecond)
				}
			}
			// The order of the votes decides how many are granted: 41 at least in 80 runs of a seed.
			if holds < 20 {
				tr.Errorf("seed %d: %d holds are too few to tell", seed, holds)
			}
		})
	}
}

// counter is the key of the fence counter of k.
const counter = "hasp:{k}:fence:k"

func TestACounterThatIsNotANumberIsReportedAndKept(t *testing.T) {
	three(t, func(tr trial) {
		tr.warm(aFenced("k"))
		tr.vs[0].Mini.Set(counter, "somebody's")
		tr.vs[1].Mini.Del(counter)
		tr.vs[1].Mini.Lpush(counter, "somebody's")
		dump := func() string { return tr.vs[0].Mini.Dump() + tr.vs[1].Mini.Dump() }
		before := dump()

		err := tr.ask(aFenced("k"))
		tr.isUnclear(err)
		if strings.Count(fmt.Sprint(err), counter+`" is no fence counter; remove it`) != 2 {
			tr.Errorf("got %v, want an error that names both counters", err)
		}
		if after := dump(); after != before {
			tr.Errorf("the nodes have\n%s\nand had\n%s", after, before)
		}

		tr.vs[0].Mini.Del(counter)
		time.Sleep(2 * time.Second)
		tr.warm(aFenced("k")) // one such node is not in the way

		// One such node is not in the way of an attempt that asks it first.
		for lead := range 2 {
			c := aFenced("k")
			tr.wants(fmt.Sprint("lead ", lead), tr.tryOnce(c, 0, lead), nil)
			synctest.Wait()
			tr.release(c)
		}
	})
}

// Above 2^53 Lua cannot count in steps of one, so the counters end there. A reply with such a
// fence is no vote, nor one with no fence or no mark.
func TestNoFenceFollowsTheLargest(t *testing.T) {
	three(t, func(tr trial) {
		for i, reply := range []string{"+9007199254740993\r\n+mark", "+0\r\n+mark", "+5\r\n:1"} {
			c := aFenced("k")
			for _, v := range tr.vs {
				v.Proxy.Answer(c.Token, "*4\r\n:1\r\n"+reply+"\r\n+run\r\n")
			}
			if err := tr.ask(c); !strings.Contains(fmt.Sprint(err), "unexpected") {
				tr.Errorf("%d: got %v", i, err)
			}
			time.Sleep(5 * time.Second)
		}
	})
}

// Node 1 has voted for A, whose other votes are in flight. B has nodes 2 and 3, and
// writes its fence to nodes 1 and 3, but not to 2. If B were granted the key, A could
// follow with the votes of nodes 1 and 2, and with the same fence.
func TestAFenceCountsOnlyWhereItsHolderHasTheKey(t *testing.T) {
	three(t, func(tr trial) {
		for _, v := range tr.vs {
			v.Mini.Set(counter, "4000000000000000") // no clock decides
		}
		a, b := tr.another(), tr.another()
		ca, cb := aFenced("k"), aFenced("k")
		ca.Timeout = 5 * time.Second
		tr.fail("12", "mark "+ca.Token, faultproxy.HoldRequest)
		granted := make(chan error, 1)
		go func() { granted <- a.ask(ca) }()
		synctest.Wait()
		tr.fail("1", "k "+markKey+" "+counter+" "+cb.Token, faultproxy.LoseRequest)
		tr.isUnclear(b.ask(cb)) // B, whose fence only one of its nodes knows
		tr.happened("1", "B raises its fence")
		time.Sleep(time.Second)
		tr.vs[1].Proxy.Release()
		tr.wants("A", <-granted, nil)
	})
}

// The fence does not reach node 2, so it must reach node 3. Node 3 votes late, or the driver does not
// know the mark of node 3, so it asks for the vote late.
func TestAFenceIsWrittenAfterALateVote(t *testing.T) {
	for _, known := range []bool{true, false} {
		three(t, func(tr trial) {
			c := aFenced("k")
			const late = 100 * time.Millisecond
			n := tr.m.nodes[2]
			if known {
				tr.holdNext("2", "mark "+c.Token, late)
			} else {
				n.standing.Store(nil)
				n.turn <- struct{}{}
				time.AfterFunc(late, func() { <-n.turn })
			}
			tr.fail("1", "k "+markKey+" "+counter+" "+c.Token, faultproxy.LoseRequest)
			tr.acquire(c)
		})
	}
}
