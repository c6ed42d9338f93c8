package pubsublock_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
	"github.com/hasplock/hasp/pubsublock"
)

// The tests of Wait run in virtual time, so their durations are exact.

// bubble runs f with two drivers on one Redis. The first uses the proxy.
func bubble(t *testing.T, f func(t *testing.T, v *redistest.VirtualServer, a, b rig)) {
	synctest.Test(t, func(t *testing.T) {
		v := redistest.Virtual(t)
		a, b := over(v.Client()), over(v.Direct())
		defer a.Driver.Close()
		defer b.Driver.Close()
		f(t, v, a, b)
	})
}

// over returns a driver over rdb.
func over(rdb *redis.Client) rig {
	return rig{strategytest.Rig[*pubsublock.Driver]{Redis: rdb, Driver: open(rdb)}}
}

// waiter is a Wait in progress.
type waiter struct {
	c     backend.Claim
	stop  context.CancelFunc
	done  chan struct{}
	grant backend.Grant // these after done
	err   error
	at    time.Time
}

// wait begins a Wait, and returns when the Wait sleeps.
func (r rig) wait(t *testing.T, ctx context.Context, c backend.Claim) *waiter {
	w := r.begin(ctx, c)
	t.Cleanup(w.stop)
	synctest.Wait()
	return w
}

func (r rig) begin(ctx context.Context, c backend.Claim) *waiter {
	ctx, stop := context.WithCancel(ctx)
	w := &waiter{c: c, stop: stop, done: make(chan struct{})}
	go func() {
		w.grant, w.err = r.Driver.Wait(ctx, c)
		w.at = time.Now()
		close(w.done)
	}()
	return w
}

// granted fails the test unless the wait was granted between from and to after
// the moment since.
func (w *waiter) granted(t *testing.T, since time.Time, from, to time.Duration) {
	t.Helper()
	<-w.done
	if w.err != nil {
		t.Fatalf("wait: %v", w.err)
	}
	if d := w.at.Sub(since); d < from || d > to {
		t.Errorf("granted after %v, want %v to %v", d, from, to)
	}
	if want := w.at.Add(w.c.TTL - backend.Drift(w.c.TTL)); !w.grant.Until.Equal(want) {
		t.Errorf("until %v, want %v", w.grant.Until, want)
	}
}

func (w *waiter) waits(t *testing.T) {
	t.Helper()
	synctest.Wait()
	if w.ended() {
		t.Fatalf("the wait has ended: %v", w.err)
	}
}

func (w *waiter) ended() bool {
	select {
	case <-w.done:
		return true
	default:
		return false
	}
}

// failed waits until w has ended with an outage, and returns when that began.
func (w *waiter) failed(t *testing.T) time.Time {
	t.Helper()
	<-w.done
	outage(t, "wait", w.err)
	var since *backend.UnavailableError
	if !errors.As(w.err, &since) {
		t.Fatalf("%v does not say since when", w.err)
	}
	return since.Since
}

// The holder's term ends in a minute. A release with KeepUntil makes that shorter, and the
// waiter learns of it at once, and not at its next attempt.
func TestReleaseThatKeepsTheKeyWakesToSleepLess(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		c := claim("k")
		b.Acquire(t, c)
		w := a.wait(t, t.Context(), claim("k"))
		const keep = 300 * time.Millisecond
		time.Sleep(2300 * time.Millisecond)
		b.Release(t, strategytest.Kept(c, keep))
		released := time.Now()
		w.waits(t)
		w.granted(t, released, keep, keep+30*time.Millisecond)
	})
}

// A key may become free without a message: by another program, or when a term ends.
func TestReleaseThatIsNotToldIsNoticedWithinASecond(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		for i := range 20 {
			b.Redis.Set(t.Context(), "k", "somebody's", 0)
			w := a.wait(t, t.Context(), claim("k"))
			time.Sleep(3*time.Second + time.Duration(i)*100*time.Millisecond)
			w.waits(t)
			b.Redis.Del(t.Context(), "k")
			w.granted(t, time.Now(), 0, time.Second)
			a.Release(t, w.c)
		}
	})
}

// The longest term counts, if several readers hold the key.
func TestEndOfTheHoldersTermIsNoticed(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		for _, term := range []time.Duration{100 * time.Millisecond, 999 * time.Millisecond, time.Second, 7777 * time.Millisecond} {
			for _, alone := range []bool{true, false} {
				dead := strategytest.SharedFor("k", term)
				dead.Shared = !alone
				b.Acquire(t, dead)
				if !alone {
					b.Acquire(t, strategytest.SharedFor("k", term/2))
				}
				began := time.Now()
				a.wait(t, t.Context(), claim("k")).granted(t, began, term, term+100*time.Millisecond)
				b.Redis.Del(t.Context(), "k")
			}
		}
	})
}

// A waiter sends an attempt and a PING each second.
func TestWaitingCostsLittle(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		b.Redis.Set(t.Context(), "k", "somebody's", 0)
		v.Proxy.Commands()
		var all []*waiter
		for range 3 {
			all = append(all, a.wait(t, t.Context(), claim("k")))
		}
		time.Sleep(time.Minute)
		n := map[string]int{}
		for _, c := range v.Proxy.Commands() {
			word, _, _ := strings.Cut(c, " ")
			n[word]++
		}
		if n["subscribe"] != 1 || n["eval"] > len(all) || n["evalsha"] > len(all)*70 || n["ping"] > 62 || len(n) > 4 {
			t.Errorf("in a minute, %d waiters sent %v", len(all), n)
		}
		for _, w := range all {
			w.waits(t)
			w.stop()
		}
	})
}

// Before its end a wait makes one more attempt.
func TestLastLookBeforeTheEnd(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		for end := 50 * time.Millisecond; end < 3*time.Second; end += 171 * time.Millisecond {
			b.Redis.Set(t.Context(), "k", "somebody's", 0)
			ctx, cancel := context.WithTimeout(t.Context(), end)
			w := a.wait(t, ctx, claim("k"))
			time.Sleep(end - 5*time.Millisecond)
			w.waits(t)
			b.Redis.Del(t.Context(), "k")
			w.granted(t, time.Now(), 0, 5*time.Millisecond)
			a.Release(t, w.c)
			cancel()
		}
	})
}

// A Client that has just had a key leaves it to those that waited meanwhile. If they have
// left, its delay is short, and ends before its wait does.
func TestDelayOfAClientThatHadTheKey(t *testing.T) {
	for _, left := range []time.Duration{time.Minute, 5 * time.Millisecond} {
		bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
			first := claim("k")
			a.Acquire(t, first)
			second := b.wait(t, t.Context(), claim("k"))
			var others []*waiter
			for range 2 {
				r := over(v.Direct())
				defer r.Driver.Close()
				others = append(others, r.wait(t, t.Context(), claim("k")))
			}

			// One of three takes the key, and the other two leave.
			a.Release(t, first)
			all := append(others, second)
			holder := slices.IndexFunc(all, func(w *waiter) bool {
				time.Sleep(time.Millisecond)
				return w.ended()
			})
			ctx, cancel := context.WithTimeout(t.Context(), time.Second+left)
			defer cancel()
			w := a.wait(t, ctx, claim("k"))
			for i, o := range all {
				if i != holder {
					o.stop()
					<-o.done
				}
			}
			time.Sleep(time.Second)
			began := time.Now()
			b.Release(t, all[holder].c)
			w.granted(t, began, min(left, 10*time.Millisecond)-2*time.Millisecond, min(left, 30*time.Millisecond))
		})
	}
}

func TestCancelledWaitSaysHeldAndLeavesNothing(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		first := claim("k")
		b.Acquire(t, first)
		w, deadline := a.wait(t, t.Context(), claim("k")), time.Now().Add(1500*time.Millisecond)
		ctx, cancel := context.WithDeadline(t.Context(), deadline)
		defer cancel()
		late := a.wait(t, ctx, claim("k"))
		time.Sleep(time.Second)
		stopped := time.Now()
		w.stop()
		<-w.done
		<-late.done
		if !w.at.Equal(stopped) || !late.at.Equal(deadline) {
			t.Errorf("ended %v after the cancel and %v after the deadline", w.at.Sub(stopped), late.at.Sub(deadline))
		}
		for _, w := range []*waiter{w, late} {
			var held *backend.HeldError
			if !errors.As(w.err, &held) || held.Owner != first.Owner || held.RetryAfter <= 8*time.Second || w.grant != (backend.Grant{}) {
				t.Errorf("got %v, %+v", w.err, w.grant)
			}
		}
		time.Sleep(5 * time.Second) // a channel is kept for a moment
		if all := v.Mini.PubSubChannels(""); len(all) != 0 {
			t.Errorf("subscribed to %q", all)
		}
		b.Release(t, first)
		if keys := v.Mini.Keys(); len(keys) != 0 {
			t.Errorf("left %q", keys)
		}
	})
}

// When a waiter gives up, the engine releases its token at once and again a
// Timeout later. That must be enough, whenever the waiter's last attempt lands.
func TestAttemptThatLandsLateIsReleased(t *testing.T) {
	for name, land := range map[string]struct {
		fault faultproxy.Fault
		after time.Duration // 0: the call is still under way
	}{
		"while the call is under way": {faultproxy.HoldRequest, time.Second},
		"after the call's end":        {faultproxy.HoldRequest, 2 * time.Second},
		"at once, unanswered":         {faultproxy.HangReply, 0},
		"at once, cut off":            {faultproxy.LoseReply, 0},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
				a.Release(t, mustAcquire(t, a, claim("k"))) // the scripts are known from here on
				c := claim("k")
				v.Proxy.Fail(c.Token, land.fault)
				w := a.wait(t, t.Context(), c)
				stopped := time.Now()
				w.stop()
				<-w.done
				if w.err == nil || errors.Is(w.err, backend.ErrHeld) || w.at.After(stopped) {
					t.Errorf("got %v, %v after the cancel", w.err, w.at.Sub(stopped))
				}

				_ = b.Driver.Release(t.Context(), c)
				time.Sleep(land.after)
				v.Proxy.Release()
				time.Sleep(c.Timeout - land.after)
				_ = b.Driver.Release(t.Context(), c)
				time.Sleep(c.Timeout)
				if keys := v.Mini.Keys(); len(keys) != 0 || v.Proxy.Pending() != 0 {
					t.Errorf("left %q, %d faults to come", keys, v.Proxy.Pending())
				}
			})
		})
	}
}

// A client that ignores deadlines may send a command long after the engine's releases.
func TestAttemptThatOutlastsTheReleasesIsReleased(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		o := *a.Redis.Options()
		o.ReadTimeout, o.WriteTimeout, o.ContextTimeoutEnabled = time.Minute, time.Minute, false
		a.Redis = redis.NewClient(&o)
		defer a.Redis.Close()
		a.Driver = pubsublock.New(a.Redis, nil)
		defer a.Driver.Close()
		a.Release(t, mustAcquire(t, a, claim("k"))) // the scripts are known from here on
		c := claim("k")
		v.Proxy.Fail(c.Token, faultproxy.HoldRequest)
		began := time.Now()
		w := a.wait(t, t.Context(), c)
		<-w.done
		outage(t, "wait", w.err)
		if took := w.at.Sub(began); took < c.Timeout || took > c.Timeout+100*time.Millisecond {
			t.Errorf("the attempt was bounded by %v, want %v", took, c.Timeout)
		}

		time.Sleep(10 * time.Second)
		v.Proxy.Release()
		synctest.Wait()
		if keys := v.Mini.Keys(); len(keys) != 0 || v.Proxy.Pending() != 0 {
			t.Errorf("left %q, %d faults to come", keys, v.Proxy.Pending())
		}
	})
}

// If a cancellation meets an attempt in flight, the outcome is unknown, although
// the last answer was that the key is held.
func TestCancelDuringAnAttemptIsOfUnknownOutcome(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		first := claim("k")
		b.Acquire(t, first)
		c := claim("k")
		w := a.wait(t, t.Context(), c)
		v.Proxy.Fail(c.Token, faultproxy.HoldRequest)
		for v.Proxy.Pending() > 0 {
			time.Sleep(time.Millisecond)
		}
		w.stop()
		<-w.done
		var held *backend.HeldError
		if !errors.As(w.err, &held) || held.Owner != first.Owner || !errors.Is(w.err, context.Canceled) {
			t.Errorf("got %v", w.err)
		}
	})
}

func mustAcquire(t *testing.T, r rig, c backend.Claim) backend.Claim {
	t.Helper()
	r.Acquire(t, c)
	return c
}

// An unknown outcome ends a Wait, since only the engine may ask with another
// token; the error says since when.
func TestOutageEndsAWaitAndSaysSinceWhen(t *testing.T) {
	for name, c := range map[string]struct {
		out  func(p *faultproxy.Proxy)
		took time.Duration
	}{
		"down":    {(*faultproxy.Proxy).Down, 0},
		"stalled": {(*faultproxy.Proxy).Stall, 3 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
				b.Redis.Set(t.Context(), "k", "somebody's", 0)
				for _, before := range []bool{true, false} {
					if before {
						c.out(v.Proxy)
					}
					w := a.wait(t, t.Context(), claim("k"))
					began := time.Now()
					if !before {
						c.out(v.Proxy)
					}
					since := w.failed(t)
					quiet := w.at.Sub(since)
					if took := since.Sub(began); took < 0 || took > time.Second || before && took > 0 {
						t.Errorf("before %v: an outage noticed %v after it began", before, took)
					}
					if quiet < c.took || quiet > c.took+100*time.Millisecond {
						t.Errorf("before %v: ridden out for %v, want %v", before, quiet, c.took)
					}
					v.Proxy.Up()
					v.Proxy.Flow()
					time.Sleep(10 * time.Second)
				}
			})
		})
	}
}

// The store hangs for longer than a third of Timeout until ctx ends the wait. Then its last
// answer, which was that the key is held, says nothing about the present.
func TestSilenceAtTheEndOfAWaitIsAnOutage(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		b.Acquire(t, claim("k"))
		ctx, cancel := context.WithCancel(t.Context())
		c := claim("k")
		c.Timeout = 9 * time.Second
		w := a.wait(t, ctx, c)
		time.Sleep(1900 * time.Millisecond)
		w.waits(t)
		v.Proxy.Stall()
		stalled := time.Now()
		time.Sleep(time.Second + c.Timeout/3 + 100*time.Millisecond) // an attempt begins within a second
		cancel()
		if since := w.failed(t); since.Before(stalled) {
			t.Errorf("%v, since %v before the outage", w.err, stalled.Sub(since))
		}
		v.Proxy.Flow()
		time.Sleep(10 * time.Second)
	})
}

// The store answers all but the last attempt, which begins just before the deadline. That is
// no outage, although the deadline of the connection may pass a moment before that of ctx.
func TestDeadlineDuringAnAttemptIsNoOutage(t *testing.T) {
	for range 40 {
		bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
			b.Acquire(t, claim("k"))
			ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
			defer cancel()
			c := claim("k")
			w := a.wait(t, ctx, c)
			time.Sleep(1400 * time.Millisecond)
			v.Proxy.Delay(200 * time.Millisecond)
			<-w.done
			v.Proxy.Delay(0)
			if !errors.Is(w.err, backend.ErrHeld) || !errors.Is(w.err, context.DeadlineExceeded) {
				t.Errorf("got %v, want that it is held, and the end of ctx", w.err)
			}
			time.Sleep(10 * time.Second)
		})
	}
}

// A failed subscription alone is no outage.
func TestOutageIsCountedFromTheLastAnswer(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		b.Acquire(t, claim("k"))
		for range 40 {
			v.Proxy.Fail("subscribe", faultproxy.LoseRequest)
		}
		w := a.wait(t, t.Context(), claim("k"))
		time.Sleep(1900 * time.Millisecond) // of which one second is a try to listen
		w.waits(t)
		v.Proxy.Stall()
		stalled := time.Now()
		if since := w.failed(t); since.Before(stalled) {
			t.Errorf("%v, since %v before the outage", w.err, stalled.Sub(since))
		}
		v.Proxy.Flow()
		time.Sleep(10 * time.Second)
	})
}

// Without a subscription a waiter polls, and subscribes as soon as it can.
func TestWithoutASubscriptionWaitingIsAsking(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		first := claim("k")
		first.TTL = time.Hour
		b.Acquire(t, first)
		for range 40 { // seconds of tries
			v.Proxy.Fail("subscribe", faultproxy.LoseRequest)
		}
		w := a.wait(t, t.Context(), claim("k"))
		time.Sleep(1100 * time.Millisecond) // a third of the Timeout is given to it
		w.waits(t)
		if v.Proxy.Pending() == 0 {
			t.Fatal("subscribed already")
		}
		b.Release(t, first)
		w.granted(t, time.Now(), 0, 110*time.Millisecond)
		a.Release(t, w.c)

		b.Acquire(t, first)
		w = a.wait(t, t.Context(), claim("k"))
		time.Sleep(time.Minute)
		w.waits(t)
		b.Release(t, first)
		w.granted(t, time.Now(), 0, 0)
	})
}

func TestWaitOnAClosedDriver(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		b.Acquire(t, claim("k"))
		a.Driver.Close()
		w := a.wait(t, t.Context(), claim("k"))
		<-w.done
		if w.err == nil || errors.Is(w.err, backend.ErrHeld) {
			t.Errorf("got %v", w.err)
		}
		if err := a.Driver.Close(); err != nil {
			t.Errorf("close again: %v", err)
		}
	})
}

// Redis wakes the Clients that wait for a key in the same order each time, as these links
// do: one is slower than the other. The Clients take turns nevertheless.
func TestClientsOfACrowdTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const clients, turns = 6, 120
		v := redistest.Virtual(t)
		first := strategytest.Claim("k")
		var rivals []rig
		all := make([]*waiter, clients)
		granted := make(chan int, clients)
		wait := func(i int) *waiter {
			w := rivals[i].begin(t.Context(), strategytest.Claim("k"))
			go func() { <-w.done; granted <- i }()
			return w
		}
		for i := range clients {
			rdb, link := v.Link()
			link.Delay(time.Duration(i+1) * 100 * time.Microsecond)
			r := over(rdb)
			defer r.Driver.Close()
			rivals = append(rivals, r)
		}
		rivals[0].Acquire(t, first)
		for i := range rivals[1:] {
			all[i+1] = wait(i + 1)
		}

		// The last holder wants the key again when the next one has it.
		wins, holder := make([]int, clients), 0
		for range turns {
			time.Sleep(20 * time.Millisecond)
			rivals[holder].Release(t, first)
			last := holder
			holder = <-granted
			all[last] = wait(last)
			if err := all[holder].err; err != nil {
				t.Fatal(err)
			}
			wins[holder]++
			first = all[holder].c
		}
		for _, w := range all {
			w.stop()
			<-w.done
		}
		t.Logf("turns of each Client: %v", wins)
		for i, n := range wins {
			if n < turns/clients/2 {
				t.Errorf("Client %d got %d of %d turns", i, n, turns)
			}
		}
	})
}

// On a cluster of Redis 7 a release is published on a sharded channel. Subscribers
// of unsharded channels, such as Redisson before 3.22, receive it if PublishBoth
// is set.
func TestReleasesOnAClusterArePublishedBothWaysIfAsked(t *testing.T) {
	t.Parallel()
	set := redistest.StartCluster(t, &redistest.Options{Bare: true})
	const key, name = "orders", "free:{orders}"
	var addrs []string
	for _, srv := range set.Servers {
		addrs = append(addrs, srv.Addr)
	}
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
	defer rdb.Close()
	open := func(params hasp.Params) backend.Driver {
		params["channel"] = "free"
		d, err := hasp.Config{Strategy: "pubsublock", Nodes: []string{set.URL()}, Params: params}.Driver(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		return d
	}

	// There are listeners of both kinds. The unsharded one is at a node of another slot,
	// which gets the message over the bus of the cluster.
	sharded := rdb.SSubscribe(t.Context(), name)
	defer sharded.Close()
	elsewhere := set.Servers[0]
	if elsewhere == set.Master(key) {
		elsewhere = set.Servers[1]
	}
	plain := elsewhere.Client().Subscribe(t.Context(), name)
	defer plain.Close()
	for _, sub := range []*redis.PubSub{sharded, plain} {
		if _, err := sub.Receive(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	gets := func(sub *redis.PubSub, want string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if m, err := sub.ReceiveMessage(ctx); err != nil || m.Channel != name || m.Payload != want {
			t.Errorf("got %v, %v, want %q", m, err, want)
		}
	}

	for what, d := range map[string]backend.Driver{
		"by URL": open(hasp.Params{"publish": "both"}), "handed in": pubsublock.New(rdb, &pubsublock.Options{Channel: "free", PublishBoth: true}), "not asked": open(hasp.Params{}),
	} {
		both := what != "not asked"
		for _, free := range []func(backend.Claim) error{
			func(c backend.Claim) error { return d.Release(t.Context(), c) },
			func(c backend.Claim) error { return d.(backend.Inspector).Break(t.Context(), c.Key) },
		} {
			c := claim(key)
			if _, err := d.Acquire(t.Context(), c); err != nil {
				t.Fatal(what, err)
			}
			if err := free(c); err != nil {
				t.Fatal(what, err)
			}
			gets(sharded, "0")
			if both {
				gets(plain, "0")
			}
			// Messages of one node arrive in order, so there was no other message.
			if err := set.Master(key).Client().Publish(t.Context(), name, "end").Err(); err != nil {
				t.Fatal(err)
			}
			gets(plain, "end")
		}
	}
}
