package redlock

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// absence is how long a node that has forgotten its votes does not vote: the longest
// term, and a drift.
const absence = longTerm + longTerm/100 + 2*time.Millisecond

// waitsFor matches the error of a node that does not vote yet.
var waitsFor = regexp.MustCompile(`node(\d):6379: .* does not vote for another (\S+) `)

// abstains asks for keys until an error reports that all nodes that which lists do not
// vote. It fails the test unless the error is an outage and the reported time is about
// left. It returns when that time ends.
func (cr caller) abstains(claim func(string) backend.Claim, which string, left time.Duration) (end time.Time) {
	cr.Helper()
	var err error
	var found [][]string
	for range 12 { // first over connections that are dead
		err = cr.ask(claim("k"))
		cr.isUnclear(err)
		synctest.Wait()
		if found = waitsFor.FindAllStringSubmatch(fmt.Sprint(err), -1); len(found) == len(which) {
			break
		}
		time.Sleep(min(left/20, time.Second)) // what was left behind is cleaned up
	}
	names := ""
	for _, node := range found {
		names += string(node[1][0] - 1) // counts from 0 on
		got, _ := time.ParseDuration(node[2])
		if got < left*8/10 || got > left+2*time.Millisecond {
			names += " for " + node[2]
		}
		end = time.Now().Add(got)
	}
	if names != which {
		cr.Fatalf("%v, want %s to be away for %v", err, which, left)
	}
	return end
}

// findsDeadConnections asks for a key until the driver has found all connections that are dead.
func (cr caller) findsDeadConnections() {
	for range 5 {
		_ = cr.ask(aClaim("of dead connections"))
		time.Sleep(2 * time.Second)
	}
}

// amnesia lists the events that make a node forget its votes.
var amnesia = map[string]disturb{
	"restarted empty":                         func(v *server) { v.Restart(false) },
	"restarted with what it had written down": func(v *server) { v.Mini.Del("k"); v.Restart(true) },
	"flushed": func(v *server) { v.Mini.FlushAll() },
}

// A holds with the votes of two of three nodes. One of the two forgets, and the other
// cannot be reached. With the vote of the first, B would also hold the key.
func TestNoSecondHolderByANodeThatHasForgotten(t *testing.T) {
	await.Crowd(t)
	t.Parallel()
	for name, forget := range amnesia {
		for _, kind := range kinds {
			for _, known := range []bool{true, false} { // B has known the nodes before, or not
				t.Run(fmt.Sprint(name, ", fenced ", kind("k").Fenced, ", known ", known), func(t *testing.T) {
					three(t, func(tr trial) {
						b := tr.another()
						if known {
							b.meet(kind)
						}
						tr.each("2", hang)
						c := kind("k")
						c.TTL = longTerm
						tr.acquire(c)
						tr.want(c, "xx-") // A
						tr.each("2", flow)
						time.Sleep(2 * time.Second)
						tr.lose("2", "k") // it had been held up, and would not have voted so
						tr.want(c, "xx-") // A

						forget(tr.vs[1])
						tr.each("0", down)
						end := b.abstains(kind, "1", absence) // at once
						time.Sleep(absence / 2)
						b.abstains(kind, "1", time.Until(end)) // half a term later
						time.Sleep(time.Until(end) - 20*time.Millisecond)
						b.abstains(kind, "1", time.Until(end)) // a moment before the end
						time.Sleep(21 * time.Millisecond)      // a mark that is written at the end itself may cost a vote
						b.acquire(kind("k"))
					})
				})
			}
		}
	}
}

// If one driver uses longer terms, a node waits longer before it votes for any
// driver. That holds whether the node has kept its mark or only other nodes have.
func TestTheLongestMaxTTLCounts(t *testing.T) {
	for _, data := range []bool{true, false} {
		three(t, func(tr trial) {
			long := drives(tr.T, tr.vs.Clients(), &Options{MaxTTL: 10 * time.Minute})
			long.warm(aClaim("w"))
			tr.vs[1].Restart(data)
			tr.warm(aClaim("w")) // which marks node 2
			tr.each("0", down)
			tr.Log("it has kept its mark: ", data)
			tr.abstains(aClaim, "1", 10*time.Minute+6*time.Second+2*time.Millisecond)
		})
	}
}

// A longer term counts as well if a driver learns of it only after it has marked a node,
// and while that node waits. Otherwise the node would vote although it may have forgotten
// a hold of that term.
func TestALongerMaxTTLThatIsLearnedDuringTheWaitCounts(t *testing.T) {
	t.Parallel()
	three(t, func(tr trial) {
		tr.each("2", down)
		c := aClaim("k")
		c.TTL = 10 * time.Minute
		drives(tr.T, tr.vs.Clients(), &Options{MaxTTL: c.TTL}).acquire(c)
		time.Sleep(2 * time.Second)
		tr.each("2", up)
		tr.want(c, "xx-") // the holder

		// Only nodes 1 and 2 know the longer term. Node 1 forgets it, and node 2 does not answer.
		tr.each("1", hang)
		tr.each("0", empty)
		tr.abstains(aClaim, "0", absence) // the shorter term

		tr.each("1", flow)
		for began := time.Now(); time.Since(began) < 9*time.Minute; time.Sleep(30 * time.Second) {
			if tr.ask(aClaim("k")) == nil {
				tr.Fatalf("a second holder after %v", time.Since(began))
			}
		}
		time.Sleep(2 * time.Minute)
		tr.acquire(aClaim("k"))
	})
}

// A new set is ready at once, even if several drivers first use it at the same moment.
func TestNewSetVotesAtOnce(t *testing.T) {
	for _, n := range []int{3, 5} {
		for _, slow := range []time.Duration{0, 30 * time.Millisecond, 300 * time.Millisecond} {
			fresh(t, n, nil, func(tr trial) {
				tr.vs[n-1].Proxy.Delay(slow)
				grant := func(cr caller, key string) {
					c := aClaim(key)
					c.Timeout = 10 * time.Second
					tr.wants(fmt.Sprintf("%d nodes, one %v slow, %s", n, slow, key), cr.ask(c), nil)
				}
				var wg sync.WaitGroup
				for i := range 8 {
					cr := tr.another()
					wg.Go(func() {
						time.Sleep(time.Duration(i) * slow / 20)
						grant(cr, fmt.Sprint("k", i))
					})
				}
				wg.Wait()
				time.Sleep(20 * time.Second)
				tr.each("01"[:n/2], hang) // now the slow one counts
				grant(tr.caller, "k")
			})
		}
	}
}

// A node whose mark another process writes meanwhile is not marked to wait.
func TestAMarkOfAnotherProcessIsAwaited(t *testing.T) {
	three(t, func(tr trial) {
		mini := tr.vs[2].Mini
		mark := await.Value(mini.Get(markKey))
		mini.Del(markKey)
		time.AfterFunc(newSetPause/2, func() {
			if !mini.Exists(markKey) {
				_ = mini.Set(markKey, mark)
			}
		})
		tr.another().warm(aClaim("k"))
		tr.each("0", down)
		tr.another().acquire(aClaim("k"))
	})
}

// away lists the ways in which a node may not answer.
var away = map[string]disturb{"hangs": hang, "is down": down}

// back ends both.
func back(v *server) { v.Proxy.Flow(); v.Proxy.Up() }

// A set without marks is new even if a minority of it is away. It is not known
// which data the minority has when it comes back, so the minority waits.
func TestNewSetWithoutAMinorityVotesAtOnce(t *testing.T) {
	for name, cut := range away {
		for minority, rest := range map[string]string{"2": "0", "34": "01"} {
			fresh(t, 2*len(minority)+1, nil, func(tr trial) {
				tr.each(minority, cut)
				c := aClaim("k")
				c.Timeout = 3 * time.Second
				tr.warm(c)
				tr.each(minority, back)
				time.Sleep(5 * time.Second)
				tr.each(rest, down)
				tr.Log(name)
				tr.another().abstains(aClaim, minority, absence)
			})
		}
	}
}

// If a majority is away, or a node that answers has a mark, the set does not count as new.
func TestSetWithoutAMajorityWaits(t *testing.T) {
	for name, cut := range away {
		for gone, mark := range map[string]string{"234": "", "4": "anotherRun 0 122002"} {
			t.Run(fmt.Sprint(gone, " ", name, ", node 3 has the mark ", mark), func(t *testing.T) {
				fresh(t, 5, nil, func(tr trial) {
					tr.each(gone, cut)
					if mark != "" {
						tr.vs[3].Mini.Set(markKey, mark)
					}
					c := aClaim("k")
					c.Timeout = 3 * time.Second
					tr.isUnclear(tr.ask(c)) // at once
					time.Sleep(time.Second) // the nodes have been asked a second time
					tr.each("01234", back)
					time.Sleep(absence / 2)
					err := tr.ask(c)
					synctest.Wait()
					if !waitsFor.MatchString(fmt.Sprint(err)) {
						tr.Errorf("half a term later: %v", err)
					}
					time.Sleep(absence + 5*time.Second)
					tr.findsDeadConnections()
					tr.acquire(aClaim("k"))
				})
			})
		}
	}
}

// A node votes without its mark, loses the record, and has a mark again when the driver
// reads it. The vote does not count.
func TestAVoteWhoseRecordIsLostDoesNotCount(t *testing.T) {
	for _, kind := range kinds {
		three(t, func(tr trial) {
			tr.warm(kind("w")) // so that the vote needs no new connection
			for _, v := range tr.vs {
				mark := await.Value(v.Mini.Get(markKey))
				v.Mini.Del(markKey)
				v.Proxy.Delay(100 * time.Millisecond)
				time.AfterFunc(50*time.Millisecond, func() {
					v.Mini.Del("k")
					v.Mini.Set(markKey, mark)
				})
			}
			err := tr.ask(kind("k"))
			tr.isUnclear(err) // no node has the key
			if !strings.Contains(fmt.Sprint(err), "has another mark than when it voted") {
				tr.Errorf("got %v", err)
			}
		})
	}
}

// A node that was emptied does not vote. It stores the record all the same, and releases it. If all
// nodes were emptied at once, the set counts as new, but votes from before the new marks do not
// count.
func TestNodesThatWereEmptied(t *testing.T) {
	for _, which := range []string{"2", "12", "012"} {
		three(t, func(tr trial) {
			tr.each(which, empty)
			c := aClaim("k")
			err := tr.ask(c)
			if which != "2" && err != nil {
				tr.isUnclear(err)
				time.Sleep(3 * time.Second)
				tr.want(c, "---")
				c = aClaim("k")
				err = tr.ask(c)
			}
			if which == "12" {
				tr.isUnclear(err)
				return
			}
			tr.wants("acquire", err, nil)
			tr.want(c, "xxx")
			tr.renews(c)
			tr.release(c)
			tr.want(c, "---")
		})
	}
}

// A has the votes of nodes 1 and 2. A replica of node 1 took over its address. The
// replica has a copy of the mark, but not yet A's lock.
func TestAReplicaDoesNotVoteByACopyOfTheMark(t *testing.T) {
	for _, kind := range kinds {
		three(t, func(tr trial) {
			at := slices.Clone(tr.vs)
			b, links := tr.named(at)
			tr.each("2", down)
			c := kind("k")
			c.TTL = longTerm
			tr.acquire(c)
			tr.want(c, "xx-") // A

			links[1].Down()
			mark, _ := at[0].Mini.Get(markKey)
			at[0] = redistest.Virtual(tr.T)
			at[0].Mini.Set(markKey, mark)
			links[0].Cut()
			for range 8 {
				tr.isUnclear(b.ask(kind("k"))) // B takes what A holds
				time.Sleep(time.Second)
			}
		})
	}
}

// The same with hasp's own connections, which ask once for the run of their server.
func TestAReplicaDoesNotVoteOverANewConnection(t *testing.T) {
	nodes := redistest.StartNodes(t, 3, nil)
	c := aClaim("w")
	c.TTL, c.Timeout = longTerm, 20*time.Second
	ctx := await.Timeout(t, c.Timeout)
	b := caller{t, await.Value(openConfig(ctx, hasp.Config{
		Nodes:  []string{nodes.URL()},
		Params: map[string]string{"max_ttl": longTerm.String()},
	})).(*driver)}
	t.Cleanup(func() { b.Close() })
	b.acquire(c)

	c.Key = "k"
	nodes.Proxies[2].Down()
	drives(t, nodes.Clients(), nil).acquire(c)
	nodes.Proxies[2].Up()
	nodes.Proxies[1].Down()
	replica := nodes.Servers[0] // which begins as the server of which it has the mark
	mark := replica.Client().Get(t.Context(), markKey).Val()
	replica.Kill()
	replica.Restart()
	await.Must(t, replica.Client().Set(t.Context(), markKey, mark, 0).Err())
	for range 8 {
		c.Token += "-"
		if b.ask(c) == nil {
			t.Fatal("B has what A holds")
		}
	}
}

// A node boots with its clock ahead, and the clock is corrected. Then the node votes for all
// drivers when one max_ttl has passed since a driver first asks it, or since the first wait was
// over.
func TestAClockThatWasAheadKeepsNoNodeAway(t *testing.T) {
	for _, gone := range []bool{false, true} {
		three(t, func(tr trial) {
			tr.vs[1].Skew(365 * 24 * time.Hour)
			tr.vs[1].Restart(true)
			for range 6 {
				tr.warm(aClaim("w"))
				time.Sleep(time.Second)
			}
			tr.vs[1].Skew(0)
			tr.each("0", down)
			b := tr.another()
			end := time.Now().Add(2 * absence) // after the first wait, the mark gets the right time
			if gone {
				tr.Close()
				time.Sleep(time.Hour)
				end = b.abstains(aClaim, "1", absence) // the first to ask
			}
			time.Sleep(time.Until(end) + time.Second) // a mark that is written at the end itself may cost a vote
			b.acquire(aClaim("k"))
		})
	}
}

// All nodes are restarted empty, one after another, during one hold that is renewed, and no other
// driver asks for a vote. The nodes must not forget the fence, which the next one must exceed. Then
// the leader's link to node 3 hangs until its record there has ended, node 2 is restarted, and node
// 1 cannot be reached. Nodes 2 and 3 must know that the set is not new.
func TestRenewalsKeepMarks(t *testing.T) {
	three(t, func(tr trial) {
		c := aFenced("k")
		c.TTL = longTerm
		renewals := func() {
			for range 4 {
				time.Sleep(40 * time.Second)
				_ = tr.renew(c) // over connections that may be dead
				tr.renews(c)
			}
			synctest.Wait()
		}
		tr.acquire(c)
		synctest.Wait() // until node 1 has the fence as well
		fence, _ := tr.vs[0].Mini.Get(counter)
		for _, v := range tr.vs {
			v.Restart(false)
			renewals()
			v.Mini.CheckGet(tr, counter, fence)
		}
		tr.want(c, "xxx") // restarted
		tr.each("2", hang)
		renewals()
		tr.want(c, "xx-") // the link to node 3 hangs
		tr.vs[1].Restart(false)
		clients := tr.vs.Clients()
		clients[1], clients[2] = tr.vs[1].Direct(), tr.vs[2].Direct()
		tr.each("0", down)
		tr.isUnclear(drives(tr.T, clients, nil).ask(aClaim("k"))) // a second holder
	})
}
