package redlock

import (
	"context"
	"fmt"
	"net"
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
	"github.com/hasplock/hasp/internal/strategytest"
)

// absence is how long a node that has forgotten its votes does not vote: the longest
// term, and a drift.
const absence = longTerm + longTerm/100 + 2*time.Millisecond

// abstains asks for keys until an error reports that all nodes that which lists do not
// vote. It fails the test unless the error is an outage and the reported time is about
// left. It returns when that time ends.
func (tr trial) abstains(t *testing.T, what string, d *driver, claim func(string) backend.Claim, which string, left time.Duration) (end time.Time) {
	t.Helper()
	var err error
	for range 12 { // first over connections that are dead
		if _, err = d.Acquire(t.Context(), claim("k")); err == nil {
			t.Fatalf("%s: granted", what)
		}
		synctest.Wait()
		if strings.Count(err.Error(), "does not vote for another ") == len(which) {
			break
		}
		time.Sleep(min(left/20, time.Second)) // what was left behind is cleaned up
	}
	if backend.Definite(err) {
		t.Fatalf("%s: got %v, want an outage", what, err)
	}
	for _, c := range which {
		_, why, _ := strings.Cut(err.Error(), fmt.Sprintf("node%c:6379: ", c+1))
		_, after, _ := strings.Cut(why, "does not vote for another ")
		text, _, _ := strings.Cut(after, " ")
		got, e := time.ParseDuration(text)
		if e != nil || got < left*8/10 || got > left+2*time.Millisecond {
			t.Fatalf("%s: %v, want node%c to be away for %v", what, err, c+1, left)
		}
		end = time.Now().Add(got)
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
		for _, kind := range []func(string) backend.Claim{aClaim, aFenced} {
			for _, fresh := range []bool{false, true} { // B has known the nodes before, or not
				t.Run(fmt.Sprint(name, ", fenced ", kind("k").Fenced, ", fresh ", fresh), func(t *testing.T) {
					try(t, 3, nil, func(t *testing.T, tr trial) {
						b := drives(t, tr.vs.Clients(), nil)
						if !fresh {
							for range 2 {
								tr.warm(t, b, kind("w"))
							}
						}
						tr.vs[2].Proxy.Stall()
						c := kind("k")
						c.TTL = longTerm
						tr.acquire(t, tr.d, c)
						tr.want(t, "A", c, "xx-")
						tr.vs[2].Proxy.Flow()
						time.Sleep(2 * time.Second)
						if got := tr.holds(c); got != "xx-" && got != "xxx" {
							t.Fatalf("A holds on %s", got)
						}
						tr.vs[2].Mini.Del("k") // it had been held up, and would not have voted so

						forget(tr.vs[1])
						tr.vs[0].Proxy.Down()
						end := tr.abstains(t, "at once", b, kind, "1", absence)
						time.Sleep(absence / 2)
						tr.abstains(t, "half a term later", b, kind, "1", time.Until(end))
						time.Sleep(time.Until(end) - 20*time.Millisecond)
						tr.abstains(t, "a moment before the end", b, kind, "1", time.Until(end))
						time.Sleep(21 * time.Millisecond) // a mark that is written at the end itself may cost a vote
						strategytest.Want(t, "afterwards", strategytest.ErrOf(b.Acquire(t.Context(), kind("k"))), nil)
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
		try(t, 3, nil, func(t *testing.T, tr trial) {
			long := drives(t, tr.vs.Clients(), &Options{MaxTTL: 10 * time.Minute})
			tr.warm(t, long, aClaim("w"))
			tr.vs[1].Restart(data)
			tr.warm(t, tr.d, aClaim("w")) // which marks node 2
			tr.vs[0].Proxy.Down()
			tr.abstains(t, fmt.Sprint("it has kept its mark: ", data), tr.d, aClaim, "1", 10*time.Minute+6*time.Second+2*time.Millisecond)
		})
	}
}

// A longer term counts as well if a driver learns of it only after it has marked a node,
// and while that node waits. Otherwise the node would vote although it may have forgotten
// a hold of that term.
func TestALongerMaxTTLThatIsLearnedDuringTheWaitCounts(t *testing.T) {
	t.Parallel()
	try(t, 3, nil, func(t *testing.T, tr trial) {
		tr.vs[2].Proxy.Down()
		long := drives(t, tr.vs.Clients(), &Options{MaxTTL: 10 * time.Minute})
		c := aClaim("k")
		c.TTL = 10 * time.Minute
		tr.acquire(t, long, c)
		time.Sleep(2 * time.Second)
		tr.vs[2].Proxy.Up()
		tr.want(t, "the holder", c, "xx-")

		// Only nodes 1 and 2 know the longer term. Node 1 forgets it, and node 2 does not answer.
		tr.vs[1].Proxy.Stall()
		tr.vs[0].Mini.FlushAll()
		for range 3 {
			if _, err := tr.d.Acquire(t.Context(), aClaim("k")); err == nil || backend.Definite(err) {
				t.Fatalf("without node 2: got %v, want an outage", err)
			}
			time.Sleep(time.Second)
		}
		mark, _ := tr.vs[0].Mini.Get(markKey)
		if _, longest, _ := timesOf(mark); longest > absence.Milliseconds() {
			t.Fatalf("node 1 has the mark %q, which names the longer term already", mark)
		}

		tr.vs[1].Proxy.Flow()
		for began := time.Now(); time.Since(began) < 9*time.Minute; time.Sleep(30 * time.Second) {
			if _, err := tr.d.Acquire(t.Context(), aClaim("k")); err == nil {
				t.Fatalf("a second holder after %v", time.Since(began))
			}
		}
		time.Sleep(2 * time.Minute)
		strategytest.Want(t, "after the longer term", strategytest.ErrOf(tr.d.Acquire(t.Context(), aClaim("k"))), nil)
	})
}

// A new set is ready at once, even if several drivers first use it at the same moment.
func TestNewSetVotesAtOnce(t *testing.T) {
	for _, n := range []int{3, 5} {
		for _, slow := range []time.Duration{0, 30 * time.Millisecond, 300 * time.Millisecond} {
			synctest.Test(t, func(t *testing.T) {
				vs := redistest.VirtualNodes(t, n)
				vs[n-1].Proxy.Delay(slow)
				var wg sync.WaitGroup
				for i := range 8 {
					d := drives(t, vs.Clients(), nil)
					wg.Go(func() {
						c := aClaim(fmt.Sprint("k", i))
						c.Timeout = 10 * time.Second
						time.Sleep(time.Duration(i) * slow / 20)
						if _, err := d.Acquire(t.Context(), c); err != nil {
							t.Errorf("%d nodes, one %v slow: %v", n, slow, err)
						}
					})
				}
				wg.Wait()
				time.Sleep(20 * time.Second)
				d := drives(t, vs.Clients(), nil)
				for i := range n / 2 {
					vs[i].Proxy.Stall() // now the slow one counts
				}
				c := aClaim("k")
				c.Timeout = 10 * time.Second
				if _, err := d.Acquire(t.Context(), c); err != nil {
					t.Errorf("%d nodes, one %v slow, without %d: %v", n, slow, n/2, err)
				}
			})
		}
	}
}

// away lists the ways in which a node may not answer.
var away = map[string]func(*faultproxy.Proxy){"hangs": (*faultproxy.Proxy).Stall, "is down": (*faultproxy.Proxy).Down}

// A set without marks is new even if a minority of it is away. It is not known
// which data the minority has when it comes back, so the minority waits.
func TestNewSetWithoutAMinorityVotesAtOnce(t *testing.T) {
	for name, cut := range away {
		for _, n := range []int{3, 5} {
			t.Run(fmt.Sprint(n, " nodes, a minority ", name), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					vs := redistest.VirtualNodes(t, n)
					d := drives(t, vs.Clients(), nil)
					tr := trial{vs, d}
					for _, v := range vs[n/2+1:] {
						cut(v.Proxy)
					}
					c := aClaim("k")
					c.Timeout = 3 * time.Second
					tr.warm(t, d, c)
					for _, v := range vs[n/2+1:] {
						v.Proxy.Flow()
						v.Proxy.Up()
					}
					time.Sleep(5 * time.Second)
					other := drives(t, vs.Clients(), nil)
					for _, v := range vs[:n/2] {
						v.Proxy.Down()
					}
					tr.abstains(t, "the minority", other, aClaim, map[int]string{3: "2", 5: "34"}[n], absence)
				})
			})
		}
	}
}

// If a majority is away, or a node that answers has a mark, the set does not count as new.
func TestSetWithoutAMajorityWaits(t *testing.T) {
	for name, cut := range away {
		for _, marked := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", one bears a mark ", marked), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					vs := redistest.VirtualNodes(t, 5)
					d := drives(t, vs.Clients(), nil)
					if marked {
						cut(vs[4].Proxy)
						vs[3].Mini.Set(markKey, "anotherRun 0 122002")
					} else {
						cut(vs[2].Proxy)
						cut(vs[3].Proxy)
						cut(vs[4].Proxy)
					}
					c := aClaim("k")
					c.Timeout = 3 * time.Second
					_, err := d.Acquire(t.Context(), c)
					if err == nil || backend.Definite(err) {
						t.Fatalf("got %v, want an outage", err)
					}
					time.Sleep(time.Second) // the nodes have been asked a second time
					for _, v := range vs {
						v.Proxy.Flow()
						v.Proxy.Up()
					}
					time.Sleep(absence / 2)
					_, err = d.Acquire(t.Context(), c)
					synctest.Wait()
					if err == nil || strings.Count(err.Error(), "does not vote for another ") < 1 {
						t.Errorf("half a term later: %v", err)
					}
					time.Sleep(absence + 5*time.Second)
					for range 5 { // first over connections that are dead
						if _, err = d.Acquire(t.Context(), aClaim("j")); err == nil {
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
	try(t, 3, nil, func(t *testing.T, tr trial) {
		tr.acquire(t, tr.d, aClaim("k"))
		synctest.Wait()
		for _, v := range tr.vs {
			v.Mini.FlushAll()
		}
		c := aClaim("k")
		if _, err := tr.d.Acquire(t.Context(), c); backend.Definite(err) {
			t.Errorf("got %v, want the key or an outage", err)
		} else if err != nil {
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
	for _, kind := range []func(string) backend.Claim{aClaim, aFenced} {
		try(t, 3, nil, func(t *testing.T, tr trial) {
			tr.warm(t, tr.d, kind("w")) // so that the vote needs no new connection
			for _, v := range tr.vs {
				mark, err := v.Mini.Get(markKey)
				await.Must(t, err)
				v.Mini.Del(markKey)
				v.Proxy.Delay(100 * time.Millisecond)
				time.AfterFunc(50*time.Millisecond, func() {
					v.Mini.Del("k")
					v.Mini.Set(markKey, mark)
				})
			}
			if _, err := tr.d.Acquire(t.Context(), kind("k")); err == nil || backend.Definite(err) || !strings.Contains(err.Error(), "has another mark than when it voted") {
				t.Errorf("no node has the key: %v", err)
			}
		})
	}
}

// A node that does not vote stores the record all the same, and releases it.
func TestNodeThatDoesNotVoteKeepsNoRecord(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		tr.vs[1].Mini.FlushAll()
		tr.vs[2].Mini.FlushAll()
		c := aClaim("k")
		if _, err := tr.d.Acquire(t.Context(), c); err == nil {
			t.Fatal("two that have lost their data vote")
		}
		time.Sleep(3 * time.Second)
		tr.want(t, "refused", c, "---")
	})
	try(t, 3, nil, func(t *testing.T, tr trial) {
		tr.vs[2].Mini.FlushAll()
		c := aClaim("k")
		tr.acquire(t, tr.d, c)
		strategytest.Want(t, "renew", renewOne(tr.d, c, 3*time.Second), nil)
		tr.release(t, tr.d, c)
		tr.want(t, "released", c, "---")
	})
}

// A has the votes of nodes 1 and 2. A replica of node 1 took over its address. The
// replica has a copy of the mark, but not yet A's lock.
func TestAReplicaDoesNotVoteByACopyOfTheMark(t *testing.T) {
	for _, kind := range []func(string) backend.Claim{aClaim, aFenced} {
		try(t, 3, nil, func(t *testing.T, tr trial) {
			var server atomic.Pointer[redistest.VirtualServer] // to which the address leads
			server.Store(tr.vs[0])
			clients := tr.vs.Clients()
			rdb, link := tr.vs[0].Named(server.Load)
			clients[0] = rdb
			b := drives(t, clients, nil)
			tr.warm(t, b, aClaim("w"))

			tr.vs[2].Proxy.Down()
			c := kind("k")
			c.TTL = longTerm
			tr.acquire(t, tr.d, c)
			tr.want(t, "A", c, "xx-")
			tr.vs[2].Proxy.Up()

			tr.vs[1].Proxy.Down()
			mark, _ := tr.vs[0].Mini.Get(markKey)
			server.Store(redistest.Virtual(t))
			server.Load().Mini.Set(markKey, mark)
			link.Cut()
			for range 8 {
				if _, err := b.Acquire(t.Context(), kind("k")); err == nil {
					t.Fatal("B has what A holds")
				}
				time.Sleep(time.Second)
			}
		})
	}
}

// The same with hasp's own connections, which ask once for the run of their server.
func TestAReplicaDoesNotVoteOverANewConnection(t *testing.T) {
	nodes := redistest.StartNodes(t, 3, nil)
	replica := redistest.Start(t, &redistest.Options{Own: true})
	var moved atomic.Bool
	first := await.Value(faultproxy.Listen(func() (net.Conn, error) {
		if moved.Load() {
			return net.Dial("tcp", replica.Addr)
		}
		return net.Dial("tcp", nodes.Servers[0].Addr)
	}))
	t.Cleanup(first.Close)
	open := func() *driver {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		url := fmt.Sprintf("redis://%s,%s,%s", first.Addr(), nodes.Proxies[1].Addr(), nodes.Proxies[2].Addr())
		d := await.Value(openConfig(ctx, hasp.Config{Nodes: []string{url}, Params: map[string]string{"max_ttl": longTerm.String()}})).(*driver)
		t.Cleanup(func() { d.Close() })
		return d
	}
	a, b := open(), open()
	c := aClaim("k")
	c.TTL, c.Timeout = longTerm, 20*time.Second
	for i, d := range []*driver{a, b} {
		w := aClaim(fmt.Sprint("w", i))
		w.Timeout = c.Timeout
		await.Value(d.Acquire(t.Context(), w))
	}
	nodes.Proxies[2].Down()
	await.Value(a.Acquire(t.Context(), c))
	nodes.Proxies[2].Up()
	nodes.Proxies[1].Down()

	mark := nodes.Servers[0].Client().Get(t.Context(), markKey).Val()
	replica.Client().Set(t.Context(), markKey, mark, 0)
	moved.Store(true)
	first.Cut()
	for range 8 {
		c.Token += "-"
		if _, err := b.Acquire(t.Context(), c); err == nil {
			t.Fatal("B has what A holds")
		}
	}
}

// A node boots with its clock ahead, and the clock is corrected. Then the node votes for
// all drivers when one max_ttl has passed.
func TestAClockThatWasAheadKeepsNoNodeAway(t *testing.T) {
	boot := func(t *testing.T, tr trial) {
		tr.vs[1].Skew(365 * 24 * time.Hour)
		tr.vs[1].Restart(true)
		for range 6 {
			tr.warm(t, tr.d, aClaim("w"))
			time.Sleep(time.Second)
		}
		tr.vs[1].Skew(0)
		tr.vs[0].Proxy.Down()
	}
	t.Run("somebody has waited", func(t *testing.T) {
		try(t, 3, nil, func(t *testing.T, tr trial) {
			boot(t, tr)
			time.Sleep(2*absence + time.Second) // after the first wait, the mark gets the right time
			b := drives(t, tr.vs.Clients(), nil)
			tr.acquire(t, b, aClaim("k"))
		})
	})
	t.Run("all have gone", func(t *testing.T) {
		try(t, 3, nil, func(t *testing.T, tr trial) {
			boot(t, tr)
			tr.d.Close()
			time.Sleep(time.Hour)
			b := drives(t, tr.vs.Clients(), nil)
			end := tr.abstains(t, "the first to ask", b, aClaim, "1", absence)
			time.Sleep(time.Until(end) + time.Second) // a mark that is written at the end itself may cost a vote
			tr.acquire(t, b, aClaim("k"))
		})
	})
}

// All nodes are restarted empty, one after another, during one hold that is renewed, and no other
// driver asks for a vote. The nodes must not forget the fence, which the next one must exceed. Then
// the leader's link to node 3 hangs until its record there has ended, node 2 is restarted, and node
// 1 cannot be reached. Nodes 2 and 3 must know that the set is not new.
func TestRenewalsKeepMarks(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		c := aFenced("k")
		c.TTL = longTerm
		renewals := func() {
			for range 4 {
				time.Sleep(40 * time.Second)
				_ = renewOne(tr.d, c, 3*time.Second) // over connections that may be dead
				await.Must(t, renewOne(tr.d, c, 3*time.Second))
			}
			synctest.Wait()
		}
		g, err := tr.d.Acquire(t.Context(), c)
		await.Must(t, err)
		for _, v := range tr.vs {
			v.Restart(false)
			renewals()
		}
		tr.want(t, "restarted", c, "xxx")
		for i, v := range tr.vs {
			if fence, _ := v.Mini.Get("hasp:{k}:fence:k"); fence != fmt.Sprint(g.Fence) {
				t.Errorf("node %d has the fence %q, want %d", i, fence, g.Fence)
			}
		}
		tr.vs[2].Proxy.Stall()
		renewals()
		tr.want(t, "the link to node 3 hangs", c, "xx-")
		tr.vs[1].Restart(false)
		clients := tr.vs.Clients()
		clients[1], clients[2] = tr.vs[1].Direct(), tr.vs[2].Direct()
		tr.vs[0].Proxy.Down()
		b := drives(t, clients, nil)
		if _, err := b.Acquire(t.Context(), aClaim("k")); err == nil {
			t.Error("a second holder")
		}
	})
}
