package redlock

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
)

// absence is how long a node does not vote that has forgotten its votes: the
// longest term, and a drift.
const absence = DefaultMaxTTL + DefaultMaxTTL/100 + 2*time.Millisecond

// abstains asks for keys until an error says of all the nodes that which lists
// that they do not vote, and fails the test unless it is an outage and the time
// left is about that. It returns when it ends.
func (tr trial) abstains(t *testing.T, what string, d *Driver, claim func(string) backend.Claim, which string, left time.Duration) (end time.Time) {
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
	if definite(err) {
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

// What makes a node forget for whom it voted, and whether the driver may trust
// what it has kept.
var amnesia = map[string]struct {
	durable bool
	forget  func(v *redistest.VirtualServer)
}{
	"restarted empty":                         {false, func(v *redistest.VirtualServer) { v.Restart(false) }},
	"restarted empty though durable":          {true, func(v *redistest.VirtualServer) { v.Restart(false) }},
	"restarted with what it had written down": {false, func(v *redistest.VirtualServer) { v.Mini.Del("k"); v.Restart(true) }},
	"flushed":                {false, func(v *redistest.VirtualServer) { v.Mini.FlushAll() }},
	"flushed though durable": {true, func(v *redistest.VirtualServer) { v.Mini.FlushAll() }},
}

// A holds with the votes of two of three nodes. One of the two forgets, and
// the other cannot be reached: with the vote of the first, B would hold, too.
func TestNoSecondHolderByANodeThatHasForgotten(t *testing.T) {
	for name, am := range amnesia {
		for _, kind := range []func(string) backend.Claim{aClaim, aFenced} {
			for _, fresh := range []bool{false, true} { // B has known the nodes before, or not
				t.Run(fmt.Sprint(name, ", fenced ", kind("k").Fenced, ", fresh ", fresh), func(t *testing.T) {
					try(t, 3, &Options{Durable: am.durable}, func(t *testing.T, tr trial) {
						b := New(tr.vs.Clients(), &Options{Durable: am.durable})
						defer b.Close()
						if !fresh {
							for range 2 {
								w := kind("w")
								tr.acquire(t, b, w)
								synctest.Wait()
								_ = b.Release(t.Context(), w)
								synctest.Wait()
							}
						}
						tr.vs[2].Proxy.Stall()
						c := kind("k")
						c.TTL = DefaultMaxTTL
						tr.acquire(t, tr.d, c)
						tr.want(t, "A", c, "xx-")
						tr.vs[2].Proxy.Flow()
						time.Sleep(2 * time.Second)
						if got := tr.holds(c); got != "xx-" && got != "xxx" {
							t.Fatalf("A holds on %s", got)
						}
						tr.vs[2].Mini.Del("k") // it had been held up, and would not have voted so

						am.forget(tr.vs[1])
						tr.vs[0].Proxy.Down()
						end := tr.abstains(t, "at once", b, kind, "1", absence)
						time.Sleep(absence / 2)
						tr.abstains(t, "half a term later", b, kind, "1", time.Until(end))
						time.Sleep(time.Until(end) - 20*time.Millisecond)
						tr.abstains(t, "a moment before the end", b, kind, "1", time.Until(end))
						time.Sleep(20 * time.Millisecond)
						if _, err := b.Acquire(t.Context(), kind("k")); err != nil {
							t.Errorf("afterwards: %v", err)
						}
					})
				})
			}
		}
	}
}

// Nodes that write everything down before they answer vote at once when they
// are restarted with that.
func TestDurableNodeVotesAtOnce(t *testing.T) {
	try(t, 3, &Options{Durable: true}, func(t *testing.T, tr trial) {
		tr.vs[2].Proxy.Stall()
		c := aClaim("k")
		tr.acquire(t, tr.d, c)
		tr.vs[1].Restart(true)
		tr.vs[2].Proxy.Flow()
		b := New(tr.vs.Clients(), &Options{Durable: true})
		defer b.Close()
		if _, err := b.Acquire(t.Context(), aClaim("k")); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("what A holds: got %v, want ErrHeld", err)
		}
		tr.vs[0].Proxy.Down()
		j := aClaim("j")
		tr.acquire(t, b, j)
		tr.want(t, "a free key", j, "-xx")
	})
}

// A term that is longer than what nodes wait for is refused.
func TestNoTermIsLongerThanWhatNodesWaitFor(t *testing.T) {
	try(t, 3, &Options{MaxTTL: 20 * time.Second}, func(t *testing.T, tr trial) {
		c := hasp.New(tr.d, nil)
		defer c.Close()
		if _, err := c.TryLock(t.Context(), "k", hasp.WithTTL(20*time.Second+time.Millisecond)); !errors.Is(err, hasp.ErrInvalid) {
			t.Errorf("TryLock: got %v, want ErrInvalid", err)
		}
		if _, err := c.Lock(t.Context(), "k", hasp.WithTTL(time.Minute)); !errors.Is(err, hasp.ErrInvalid) {
			t.Errorf("Lock: got %v, want ErrInvalid", err)
		}
		lease, err := c.Lock(t.Context(), "k", hasp.WithTTL(20*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		if err := lease.Extend(t.Context(), 21*time.Second); !errors.Is(err, hasp.ErrInvalid) {
			t.Errorf("Extend: got %v, want ErrInvalid", err)
		}
		if err := lease.Unlock(t.Context()); err != nil {
			t.Errorf("the lease has not outlived that: %v", err)
		}
	})
}

// Whoever asks for longer terms has a node wait for longer, for all.
func TestTheLongestMaxTTLCounts(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		long := New(tr.vs.Clients(), &Options{MaxTTL: 10 * time.Minute})
		defer long.Close()
		w := aClaim("w")
		tr.acquire(t, long, w)
		synctest.Wait()
		_ = long.Release(t.Context(), w)
		synctest.Wait()
		tr.vs[1].Restart(true)
		tr.vs[0].Proxy.Down()
		tr.abstains(t, "what it has kept", tr.d, aClaim, "1", 10*time.Minute+6*time.Second+2*time.Millisecond)
	})
}

// A set that nobody has used is ready at once, also for many who come to it at
// the same moment.
func TestNewSetVotesAtOnce(t *testing.T) {
	for _, durable := range []bool{false, true} {
		for _, n := range []int{3, 5} {
			for _, slow := range []time.Duration{0, 30 * time.Millisecond, 300 * time.Millisecond} {
				synctest.Test(t, func(t *testing.T) {
					vs := redistest.VirtualNodes(t, n)
					vs[n-1].Proxy.Delay(slow)
					var wg sync.WaitGroup
					for i := range 8 {
						d := New(vs.Clients(), &Options{Durable: durable})
						defer d.Close()
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
					d := New(vs.Clients(), &Options{Durable: durable})
					defer d.Close()
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
}

// Where a node is silent, it may be the one that knows: then a set without
// marks is not known to be new.
func TestSetWithASilentNodeWaits(t *testing.T) {
	for name, cut := range map[string]func(*redistest.Proxy){"hangs": (*redistest.Proxy).Stall, "is down": (*redistest.Proxy).Down} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				vs := redistest.VirtualNodes(t, 3)
				d := New(vs.Clients(), nil)
				defer d.Close()
				cut(vs[2].Proxy)
				c := aClaim("k")
				c.Timeout = 3 * time.Second
				_, err := d.Acquire(t.Context(), c)
				if err == nil || definite(err) {
					t.Fatalf("got %v, want an outage", err)
				}
				synctest.Wait()
				began := time.Now()
				time.Sleep(absence / 2)
				_, err = d.Acquire(t.Context(), c)
				synctest.Wait()
				if err == nil || strings.Count(err.Error(), "does not vote for another ") < 1 {
					t.Errorf("half a term later: %v", err)
				}
				vs[2].Proxy.Flow()
				vs[2].Proxy.Up()
				time.Sleep(absence - time.Since(began) + 5*time.Second)
				vs[2].Proxy.Down()
				c = aClaim("k")
				if _, err := d.Acquire(t.Context(), c); err != nil {
					t.Errorf("a term later: %v", err)
				}
			})
		})
	}
}

// All nodes were emptied at once: there is nobody left to be wronged.
func TestSetThatWasEmptiedIsNew(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		tr.acquire(t, tr.d, aClaim("k"))
		synctest.Wait()
		for _, v := range tr.vs {
			v.Mini.FlushAll()
		}
		c := aClaim("k")
		tr.acquire(t, tr.d, c)
		tr.want(t, "anew", c, "xxx")
	})
}

// A node is restarted between the moment when its standing was asked for and
// that of its vote. Whoever has a standing in mind learns of it by the
// connection, which cannot be the same.
func TestRestartBetweenMarkAndVote(t *testing.T) {
	for _, kind := range []func(string) backend.Claim{aClaim, aFenced} {
		try(t, 3, nil, func(t *testing.T, tr trial) {
			// The vote is on its way to the old run, which dies before it comes.
			for _, v := range tr.vs[1:] {
				v.Proxy.Stall()
			}
			done := make(chan error)
			go func() {
				_, err := tr.d.Acquire(t.Context(), kind("k"))
				done <- err
			}()
			synctest.Wait()
			for _, v := range tr.vs[1:] {
				v.Restart(true)
				v.Proxy.Flow()
			}
			if err := <-done; err == nil {
				t.Error("granted by nodes that have just been restarted")
			}
			// The next ones go to the new run, whose mark looks like that of the old.
			tr.abstains(t, "over new connections", tr.d, kind, "12", absence)
			tr.abstains(t, "again", tr.d, kind, "12", absence)
		})

		// The mark is lost between the vote and the next.
		try(t, 3, nil, func(t *testing.T, tr trial) {
			for _, v := range tr.vs[1:] {
				v.Mini.Del(markKey)
			}
			tr.abstains(t, "without a mark", tr.d, kind, "12", absence)
		})

		// Somebody else has given it a new mark meanwhile.
		try(t, 3, nil, func(t *testing.T, tr trial) {
			other := New(tr.vs.Clients(), nil)
			defer other.Close()
			tr.vs[1].Mini.FlushAll()
			tr.vs[2].Mini.FlushAll()
			end := tr.abstains(t, "flushed", other, kind, "12", absence)
			time.Sleep(time.Minute)
			tr.abstains(t, "told by the mark", tr.d, kind, "12", time.Until(end))
		})
	}
}

// A node votes without its mark, loses the vote, and bears its mark again when
// it is asked for that.
func TestAVoteThatIsLostBeforeItCountsIsNone(t *testing.T) {
	for _, kind := range []func(string) backend.Claim{aClaim, aFenced} {
		try(t, 3, nil, func(t *testing.T, tr trial) {
			for _, v := range tr.vs {
				mark, err := v.Mini.Get(markKey)
				if err != nil {
					t.Fatal(err)
				}
				v.Mini.Del(markKey)
				v.Proxy.Delay(100 * time.Millisecond)
				time.AfterFunc(50*time.Millisecond, func() {
					v.Mini.Del("k")
					v.Mini.Set(markKey, mark)
				})
			}
			if _, err := tr.d.Acquire(t.Context(), kind("k")); err == nil || definite(err) || !strings.Contains(err.Error(), "loses its data") {
				t.Errorf("no node has the key: %v", err)
			}
		})
	}
}

// A node that does not vote keeps what it was given all the same, and gives it
// back.
func TestNodeThatDoesNotVoteIsLeftClean(t *testing.T) {
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
		if err := renewOne(tr.d, c, 3*time.Second); err != nil {
			t.Errorf("renew: %v", err)
		}
		if err := tr.d.Release(t.Context(), c); err != nil {
			t.Errorf("release: %v", err)
		}
		tr.want(t, "released", c, "---")
	})
}

// The same with servers that are really killed.
func TestKilledNodeWaits(t *testing.T) {
	for name, data := range map[string]bool{"empty": false, "with its data": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const term = 6 * time.Second
			nodes := redistest.StartNodes(t, 3, &redistest.Options{Keep: true})
			open := func() *hasp.Client {
				return hasp.New(New(nodes.Clients(), &Options{MaxTTL: term}), &hasp.Options{TTL: term, Timeout: 20 * time.Second})
			}
			a, b := open(), open()
			defer a.Close()
			defer b.Close()
			for _, c := range []*hasp.Client{a, b} {
				lease, err := c.Lock(t.Context(), "warm")
				if err != nil {
					t.Fatal(err)
				}
				if err := lease.Unlock(t.Context()); err != nil {
					t.Fatal(err)
				}
			}

			nodes.Proxies[2].Down()
			if _, err := a.Lock(t.Context(), "k", hasp.WithoutRenewal()); err != nil {
				t.Fatal(err)
			}
			killed := nodes.Servers[1]
			if err := killed.Stop(); err != nil {
				t.Fatal(err)
			}
			dead := time.Now()
			if err := killed.Start(data); err != nil {
				t.Fatal(err)
			}
			if !data {
				if keys := killed.Client().Keys(t.Context(), "*").Val(); len(keys) > 0 {
					t.Fatalf("it has kept %q", keys)
				}
			} else if err := killed.Client().Del(t.Context(), "k").Err(); err != nil { // as if it had not been written down yet
				t.Fatal(err)
			}
			nodes.Proxies[2].Up()
			nodes.Proxies[0].Down()
			told := ""
			for {
				lease, err := b.TryLock(t.Context(), "k")
				after := time.Since(dead)
				if err == nil {
					if after < term {
						t.Errorf("a second holder %v after the node was killed", after)
					}
					if err := lease.Unlock(t.Context()); err != nil {
						t.Errorf("unlock: %v", err)
					}
					break
				}
				if strings.Contains(err.Error(), "does not vote for another") {
					told = err.Error()
				}
				if after > time.Minute {
					t.Fatalf("it never votes again: %v", err)
				}
				time.Sleep(50 * time.Millisecond)
			}
			if name := nodes.Proxies[1].Addr(); !strings.Contains(told, name) {
				t.Errorf("%q does not name %s", told, name)
			}
		})
	}
}
