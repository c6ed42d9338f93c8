package redlock

import (
	"context"
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
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
func (tr trial) abstains(t *testing.T, what string, d *driver, claim func(string) backend.Claim, which string, left time.Duration) (end time.Time) {
	t.Helper()
	var err error
	var found [][]string
	for range 12 { // first over connections that are dead
		err = ask(t, d, claim("k"))
		isUnclear(t, what, err)
		synctest.Wait()
		if found = waitsFor.FindAllStringSubmatch(fmt.Sprint(err), -1); len(found) == len(which) {
			break
		}
		time.Sleep(min(left/20, time.Second)) // what was left behind is cleaned up
	}
	names := ""
	for _, node := range found {
		number, _ := strconv.Atoi(node[1])
		names += strconv.Itoa(number - 1)
		got, _ := time.ParseDuration(node[2])
		if got < left*8/10 || got > left+2*time.Millisecond {
			names += " for " + node[2]
		}
		end = time.Now().Add(got)
	}
	if names != which {
		t.Fatalf("%s: %v, want %s to be away for %v", what, err, which, left)
	}
	return end
}

// amnesia lists the events that make a node forget its votes.
var amnesia = map[string]func(v *redistest.VirtualServer){
	"restarted empty":                         func(v *redistest.VirtualServer) { v.Restart(false) },
	"restarted with what it had written down": func(v *redistest.VirtualServer) { v.Mini.Del("k"); v.Restart(true) },
	"flushed": func(v *redistest.VirtualServer) { v.Mini.FlushAll() },
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
					try(t, 3, func(t *testing.T, tr trial) {
						b := tr.another(t)
						if known {
							tr.meet(t, b, kind)
						}
						tr.each("2", hang)
						c := kind("k")
						c.TTL = longTerm
						tr.acquire(t, tr.d, c)
						tr.want(t, "A", c, "xx-")
						tr.each("2", flow)
						time.Sleep(2 * time.Second)
						tr.lose("2", "k") // it had been held up, and would not have voted so
						tr.want(t, "A", c, "xx-")

						forget(tr.vs[1])
						tr.each("0", down)
						end := tr.abstains(t, "at once", b, kind, "1", absence)
						time.Sleep(absence / 2)
						tr.abstains(t, "half a term later", b, kind, "1", time.Until(end))
						time.Sleep(time.Until(end) - 20*time.Millisecond)
						tr.abstains(t, "a moment before the end", b, kind, "1", time.Until(end))
						time.Sleep(21 * time.Millisecond) // a mark that is written at the end itself may cost a vote
						wants(t, "afterwards", ask(t, b, kind("k")), nil)
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
		try(t, 3, func(t *testing.T, tr trial) {
			long := drives(t, tr.vs.Clients(), &Options{MaxTTL: 10 * time.Minute})
			tr.warm(t, long, aClaim("w"))
			tr.vs[1].Restart(data)
			tr.warm(t, tr.d, aClaim("w")) // which marks node 2
			tr.each("0", down)
			tr.abstains(t, fmt.Sprint("it has kept its mark: ", data), tr.d, aClaim, "1", 10*time.Minute+6*time.Second+2*time.Millisecond)
		})
	}
}

// A longer term counts as well if a driver learns of it only after it has marked a node,
// and while that node waits. Otherwise the node would vote although it may have forgotten
// a hold of that term.
func TestALongerMaxTTLThatIsLearnedDuringTheWaitCounts(t *testing.T) {
	t.Parallel()
	try(t, 3, func(t *testing.T, tr trial) {
		tr.each("2", down)
		c := aClaim("k")
		c.TTL = 10 * time.Minute
		tr.acquire(t, drives(t, tr.vs.Clients(), &Options{MaxTTL: c.TTL}), c)
		time.Sleep(2 * time.Second)
		tr.each("2", up)
		tr.want(t, "the holder", c, "xx-")

		// Only nodes 1 and 2 know the longer term. Node 1 forgets it, and node 2 does not answer.
		tr.each("1", hang)
		tr.each("0", empty)
		tr.abstains(t, "the shorter term", tr.d, aClaim, "0", absence)

		tr.each("1", flow)
		for began := time.Now(); time.Since(began) < 9*time.Minute; time.Sleep(30 * time.Second) {
			if ask(t, tr.d, aClaim("k")) == nil {
				t.Fatalf("a second holder after %v", time.Since(began))
			}
		}
		time.Sleep(2 * time.Minute)
		wants(t, "after the longer term", ask(t, tr.d, aClaim("k")), nil)
	})
}

// A new set is ready at once, even if several drivers first use it at the same moment.
func TestNewSetVotesAtOnce(t *testing.T) {
	for _, n := range []int{3, 5} {
		for _, slow := range []time.Duration{0, 30 * time.Millisecond, 300 * time.Millisecond} {
			fresh(t, n, nil, func(t *testing.T, tr trial) {
				tr.vs[n-1].Proxy.Delay(slow)
				grant := func(d *driver, key string) {
					c := aClaim(key)
					c.Timeout = 10 * time.Second
					wants(t, fmt.Sprintf("%d nodes, one %v slow, %s", n, slow, key), ask(t, d, c), nil)
				}
				var wg sync.WaitGroup
				for i := range 8 {
					d := tr.another(t)
					wg.Go(func() {
						time.Sleep(time.Duration(i) * slow / 20)
						grant(d, fmt.Sprint("k", i))
					})
				}
				wg.Wait()
				time.Sleep(20 * time.Second)
				tr.each("01"[:n/2], hang) // now the slow one counts
				grant(tr.d, "k")
			})
		}
	}
}

// away lists the ways in which a node may not answer.
var away = map[string]func(*redistest.VirtualServer){"hangs": hang, "is down": down}

// back ends both.
func back(v *redistest.VirtualServer) { v.Proxy.Flow(); v.Proxy.Up() }

// A set without marks is new even if a minority of it is away. It is not known
// which data the minority has when it comes back, so the minority waits.
func TestNewSetWithoutAMinorityVotesAtOnce(t *testing.T) {
	for name, cut := range away {
		for minority, rest := range map[string]string{"2": "0", "34": "01"} {
			fresh(t, 2*len(minority)+1, nil, func(t *testing.T, tr trial) {
				tr.each(minority, cut)
				c := aClaim("k")
				c.Timeout = 3 * time.Second
				tr.warm(t, tr.d, c)
				tr.each(minority, back)
				time.Sleep(5 * time.Second)
				tr.each(rest, down)
				tr.abstains(t, minority+" "+name, tr.another(t), aClaim, minority, absence)
			})
		}
	}
}

// If a majority is away, or a node that answers has a mark, the set does not count as new.
func TestSetWithoutAMajorityWaits(t *testing.T) {
	for name, cut := range away {
		for gone, mark := range map[string]string{"234": "", "4": "anotherRun 0 122002"} {
			t.Run(fmt.Sprint(gone, " ", name, ", node 3 has the mark ", mark), func(t *testing.T) {
				fresh(t, 5, nil, func(t *testing.T, tr trial) {
					tr.each(gone, cut)
					if mark != "" {
						tr.vs[3].Mini.Set(markKey, mark)
					}
					c := aClaim("k")
					c.Timeout = 3 * time.Second
					isUnclear(t, "at once", ask(t, tr.d, c))
					time.Sleep(time.Second) // the nodes have been asked a second time
					tr.each("01234", back)
					time.Sleep(absence / 2)
					err := ask(t, tr.d, c)
					synctest.Wait()
					if !waitsFor.MatchString(fmt.Sprint(err)) {
						t.Errorf("half a term later: %v", err)
					}
					time.Sleep(absence + 5*time.Second)
					for range 5 { // first over connections that are dead
						err = ask(t, tr.d, aClaim("j"))
						if err == nil {
							return
						}
						time.Sleep(2 * time.Second)
					}
					t.Errorf("a term later: %v", err)
				})
			})
		}
	}
}

// If all nodes were emptied at once, the set counts as new. Votes from before the new marks do
// not count.
func TestSetThatWasEmptiedIsNew(t *testing.T) {
	try(t, 3, func(t *testing.T, tr trial) {
		tr.acquire(t, tr.d, aClaim("k"))
		synctest.Wait()
		tr.each("012", empty)
		c := aClaim("k")
		if err := ask(t, tr.d, c); err != nil {
			isUnclear(t, "at once", err)
			time.Sleep(3 * time.Second)
			c = aClaim("k")
			tr.acquire(t, tr.d, c)
		}
		tr.want(t, "anew", c, "xxx")
	})
}

// A node votes without its mark, loses the record, and has a mark again when the driver
// reads it. The vote does not count.
func TestAVoteWhoseRecordIsLostDoesNotCount(t *testing.T) {
	for _, kind := range kinds {
		try(t, 3, func(t *testing.T, tr trial) {
			tr.warm(t, tr.d, kind("w")) // so that the vote needs no new connection
			for _, v := range tr.vs {
				mark := await.Value(v.Mini.Get(markKey))
				v.Mini.Del(markKey)
				v.Proxy.Delay(100 * time.Millisecond)
				time.AfterFunc(50*time.Millisecond, func() {
					v.Mini.Del("k")
					v.Mini.Set(markKey, mark)
				})
			}
			err := ask(t, tr.d, kind("k"))
			isUnclear(t, "no node has the key", err)
			if !strings.Contains(fmt.Sprint(err), "has another mark than when it voted") {
				t.Errorf("got %v", err)
			}
		})
	}
}

// A node that does not vote stores the record all the same, and releases it.
func TestNodeThatDoesNotVoteKeepsNoRecord(t *testing.T) {
	for _, which := range []string{"12", "2"} {
		try(t, 3, func(t *testing.T, tr trial) {
			tr.each(which, empty)
			c := aClaim("k")
			if err := ask(t, tr.d, c); which == "12" {
				isUnclear(t, "two that have lost their data vote", err)
				time.Sleep(3 * time.Second)
			} else {
				wants(t, "acquire", err, nil)
				wants(t, "renew", renewOne(tr.d, c), nil)
				tr.release(t, tr.d, c)
			}
			tr.want(t, "released", c, "---")
		})
	}
}

// A has the votes of nodes 1 and 2. A replica of node 1 took over its address. The
// replica has a copy of the mark, but not yet A's lock.
func TestAReplicaDoesNotVoteByACopyOfTheMark(t *testing.T) {
	for _, kind := range kinds {
		try(t, 3, func(t *testing.T, tr trial) {
			var server atomic.Pointer[redistest.VirtualServer] // to which the address leads
			server.Store(tr.vs[0])
			clients := tr.vs.Clients()
			rdb, link := tr.vs[0].Named(server.Load)
			clients[0] = rdb
			b := drives(t, clients, nil)
			tr.warm(t, b, aClaim("w"))

			tr.each("2", down)
			c := kind("k")
			c.TTL = longTerm
			tr.acquire(t, tr.d, c)
			tr.want(t, "A", c, "xx-")
			tr.each("2", up)

			tr.each("1", down)
			mark, _ := tr.vs[0].Mini.Get(markKey)
			server.Store(redistest.Virtual(t))
			server.Load().Mini.Set(markKey, mark)
			link.Cut()
			for range 8 {
				isUnclear(t, "B takes what A holds", ask(t, b, kind("k")))
				time.Sleep(time.Second)
			}
		})
	}
}

// The same with hasp's own connections, which ask once for the run of their server.
func TestAReplicaDoesNotVoteOverANewConnection(t *testing.T) {
	nodes := redistest.StartNodes(t, 3, nil)
	replica := redistest.Start(t, &redistest.Options{Own: true})
	var server atomic.Pointer[redistest.Server] // to which the address leads
	server.Store(nodes.Servers[0])
	first := await.Value(faultproxy.Listen(func() (net.Conn, error) { return net.Dial("tcp", server.Load().Addr) }))
	t.Cleanup(first.Close)
	config := hasp.Config{
		Nodes:  []string{"redis://" + first.Addr(), "redis://" + nodes.Proxies[1].Addr(), "redis://" + nodes.Proxies[2].Addr()},
		Params: map[string]string{"max_ttl": longTerm.String()},
	}
	var drivers [2]*driver
	c := aClaim("k")
	c.TTL, c.Timeout = longTerm, 20*time.Second
	for i := range drivers {
		ctx, cancel := context.WithTimeout(t.Context(), c.Timeout)
		defer cancel()
		d := await.Value(openConfig(ctx, config)).(*driver)
		t.Cleanup(func() { d.Close() })
		w := c
		w.Key = fmt.Sprint("w", i)
		await.Must(t, ask(t, d, w))
		drivers[i] = d
	}
	nodes.Proxies[2].Down()
	await.Must(t, ask(t, drivers[0], c))
	nodes.Proxies[2].Up()
	nodes.Proxies[1].Down()

	mark := nodes.Servers[0].Client().Get(t.Context(), markKey).Val()
	replica.Client().Set(t.Context(), markKey, mark, 0)
	server.Store(replica)
	first.Cut()
	for range 8 {
		c.Token += "-"
		if ask(t, drivers[1], c) == nil {
			t.Fatal("B has what A holds")
		}
	}
}

// A node boots with its clock ahead, and the clock is corrected. Then the node votes for all drivers
// when one max_ttl has passed since a driver first asks it, or since the first wait was over.
func TestAClockThatWasAheadKeepsNoNodeAway(t *testing.T) {
	for _, gone := range []bool{false, true} {
		try(t, 3, func(t *testing.T, tr trial) {
			tr.vs[1].Skew(365 * 24 * time.Hour)
			tr.vs[1].Restart(true)
			for range 6 {
				tr.warm(t, tr.d, aClaim("w"))
				time.Sleep(time.Second)
			}
			tr.vs[1].Skew(0)
			tr.each("0", down)
			b := tr.another(t)
			end := time.Now().Add(2 * absence) // after the first wait, the mark gets the right time
			if gone {
				tr.d.Close()
				time.Sleep(time.Hour)
				end = tr.abstains(t, "the first to ask", b, aClaim, "1", absence)
			}
			time.Sleep(time.Until(end) + time.Second) // a mark that is written at the end itself may cost a vote
			tr.acquire(t, b, aClaim("k"))
		})
	}
}

// All nodes are restarted empty, one after another, during one hold that is renewed, and no other
// driver asks for a vote. The nodes must not forget the fence, which the next one must exceed. Then
// the leader's link to node 3 hangs until its record there has ended, node 2 is restarted, and node
// 1 cannot be reached. Nodes 2 and 3 must know that the set is not new.
func TestRenewalsKeepMarks(t *testing.T) {
	try(t, 3, func(t *testing.T, tr trial) {
		c := aFenced("k")
		c.TTL = longTerm
		renewals := func() {
			for range 4 {
				time.Sleep(40 * time.Second)
				_ = renewOne(tr.d, c) // over connections that may be dead
				await.Must(t, renewOne(tr.d, c))
			}
			synctest.Wait()
		}
		tr.acquire(t, tr.d, c)
		synctest.Wait() // until node 1 has the fence as well
		fence, _ := tr.vs[0].Mini.Get(counter)
		for _, v := range tr.vs {
			v.Restart(false)
			renewals()
			v.Mini.CheckGet(t, counter, fence)
		}
		tr.want(t, "restarted", c, "xxx")
		tr.each("2", hang)
		renewals()
		tr.want(t, "the link to node 3 hangs", c, "xx-")
		tr.vs[1].Restart(false)
		clients := tr.vs.Clients()
		clients[1], clients[2] = tr.vs[1].Direct(), tr.vs[2].Direct()
		tr.each("0", down)
		isUnclear(t, "a second holder", ask(t, drives(t, clients, nil), aClaim("k")))
	})
}
