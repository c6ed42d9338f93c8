package fairlock_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

// These tests wait in virtual time. The real go-redis talks to miniredis within a
// bubble, so durations are exact, however slow the machine is.

// world is a Redis in a bubble.
type world struct {
	*testing.T
	v   *redistest.VirtualServer
	rdb *redis.Client
}

const window = 6 * time.Second // of all drivers in a world

func inWorld(t *testing.T, f func(w *world)) {
	synctest.Test(t, func(t *testing.T) { v := redistest.Virtual(t); f(&world{t, v, v.Direct()}) })
}

// proc is a driver with connections of its own to the Redis, as in a process of its own.
type proc struct {
	Driver
	w     *world
	proxy *faultproxy.Proxy

	mu    sync.Mutex // guards conns
	conns []*conn
}

// conn is a connection whose replies can be delayed.
type conn struct {
	net.Conn
	subscribed atomic.Bool                   // it carries messages
	delay      atomic.Pointer[chan struct{}] // if set, reads block until it is closed
}

func (c *conn) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte("\r\nsubscribe\r\n")) {
		c.subscribed.Store(true)
	}
	return c.Conn.Write(b)
}

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if delay := c.delay.Load(); delay != nil {
		<-*delay
	}
	return n, err
}

// scripts returns how many scripts p has sent since the caller last asked for its commands.
func (p *proc) scripts() (n int) {
	for _, cmd := range p.proxy.Commands() {
		if strings.HasPrefix(cmd, "eval") {
			n++
		}
	}
	return n
}

// move closes the connections of the commands, so that new ones go to the server
// that the address leads to now. The connection of the messages stays on the old
// server. A request that the proxy holds arrives when the proxy releases it.
func (p *proc) move() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		if !c.subscribed.Load() {
			c.Close()
		}
	}
}

// delayMessages blocks the connection of the messages until the caller calls deliver, or the test
// ends.
func (p *proc) delayMessages() (deliver func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	flow := make(chan struct{})
	for _, c := range p.conns {
		if c.subscribed.Load() {
			c.delay.Store(&flow)
		}
	}
	deliver = sync.OnceFunc(func() { close(flow) })
	p.w.Cleanup(deliver)
	return deliver
}

// failing returns a change for p.wait. The first call of that Wait meets the fault.
func (p *proc) failing(fault faultproxy.Fault) func(c *backend.Claim) {
	p.wait().stop() // the scripts are known from here on
	p.w.settle()
	return func(c *backend.Claim) { p.proxy.Fail(c.Token, fault) }
}

func (p *proc) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := p.proxy.Dialer()(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns = append(p.conns, &conn{Conn: c})
	return p.conns[len(p.conns)-1], nil
}

func (w *world) proc() *proc {
	p := &proc{w: w, proxy: faultproxy.New(func() (net.Conn, error) { return w.v.Mini.Dial() })}
	w.Cleanup(p.proxy.Close)
	rdb := redis.NewClient(&redis.Options{
		Addr: "virtual:6379", Dialer: p.dial, ContextTimeoutEnabled: true, ReadTimeout: -1, WriteTimeout: -1,
		DialerRetries: 1, MaxRetries: -1, DisableIdentity: true,
		// One pool, as for a URL. go-redis cannot see that an idle connection without a
		// socket is dead. So a connection that a poll has found dead must not be used.
		PipelinePoolSize:         -1,
		PoolSize:                 10_000, // no caller may wait for a connection: see redistest.VirtualServer
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	w.Cleanup(func() { rdb.Close() })
	p.Driver = await.Value(fairlock.NewDriver(rdb, &fairlock.Options{Window: window})).(Driver)
	w.Cleanup(func() { p.Close() })
	return p
}

// procs returns n processes. The first holds the key "k" for longer than the test lasts.
func (w *world) procs(n int) (backend.Claim, []*proc) {
	w.Helper()
	var ps []*proc
	for range n {
		ps = append(ps, w.proc())
	}
	c := claim("k")
	c.TTL = time.Hour
	want(w.T, "acquire", errOf(ps[0].Acquire(w.Context(), c)), nil)
	return c, ps
}

// wait is one Wait.
type wait struct {
	c     backend.Claim
	p     *proc
	stop  context.CancelFunc
	done  chan struct{}
	grant backend.Grant
	err   error
	asked time.Time
	at    time.Time // when it ended
}

// wait begins a Wait, and returns when it is in the queue or cannot get there.
func (p *proc) wait(change ...func(c *backend.Claim)) *wait {
	c := claim("k")
	c.Renewed = true
	for _, f := range change {
		f(&c)
	}
	ctx, stop := context.WithCancel(p.w.Context())
	x := &wait{c: c, p: p, stop: stop, done: make(chan struct{}), asked: time.Now()}
	go func() {
		x.grant, x.err = p.Wait(ctx, c)
		x.at = time.Now()
		x.c.Handle = x.grant.Handle
		close(x.done)
		p.cleanUp(ctx, x)
	}()
	p.w.settle()
	p.w.Cleanup(stop)
	return x
}

// cleanUp does what the engine does after a Wait of unknown outcome: it releases
// the token, at once and again after Timeout.
func (p *proc) cleanUp(ctx context.Context, x *wait) {
	if x.err == nil {
		return
	}
	if errors.Is(x.err, backend.ErrHeld) && ctx.Err() == nil {
		p.w.Errorf("held, although the wait was not ended: %v", x.err)
	}
	for times := 2; times > 0; {
		within, cancel := context.WithTimeout(p.w.Context(), x.c.Timeout)
		err := p.Release(within, x.c)
		cancel()
		pause := 50 * time.Millisecond
		if err == nil || errors.Is(err, backend.ErrLost) {
			times--
			pause = x.c.Timeout
		}
		select {
		case <-time.After(pause):
		case <-p.w.Context().Done():
			return
		}
	}
}

// settle waits until all goroutines are blocked, also after those that wait for
// the network had a moment to continue.
func (w *world) settle() {
	synctest.Wait()
	time.Sleep(time.Millisecond)
	synctest.Wait()
}

// got waits until x has the key.
func (x *wait) got() {
	x.p.w.Helper()
	<-x.done
	if x.err != nil {
		x.p.w.Fatalf("wait: %v", x.err)
	}
}

// gotWithin fails unless x had the key at most d after began.
func (x *wait) gotWithin(began time.Time, d time.Duration) {
	x.p.w.Helper()
	x.got()
	if took := x.at.Sub(began); took > d {
		x.p.w.Errorf("took %v, want at most %v", took, d)
	}
}

// servedAtOnce fails unless x has the key by now. It releases it.
func (x *wait) servedAtOnce() {
	x.p.w.Helper()
	x.gotWithin(time.Now(), 0)
	x.release()
}

// fails waits until x has ended, and fails unless that was an outage.
func (x *wait) fails() {
	x.p.w.Helper()
	<-x.done
	if !strategytest.IsOutage(x.err) {
		x.p.w.Errorf("got %v, want an outage", x.err)
	}
}

// failsSince fails unless x has ended in an outage that was noticed at most d after began.
func (x *wait) failsSince(began time.Time, d time.Duration) {
	x.p.w.Helper()
	x.fails()
	var dated *backend.UnavailableError
	if !errors.As(x.err, &dated) || dated.Since.Before(began) || dated.Since.Sub(began) > d {
		x.p.w.Errorf("%v says since %v, it was %v", x.err, dated, began)
	}
}

// waits fails unless x still waits.
func (x *wait) waits() {
	x.p.w.Helper()
	synctest.Wait()
	select {
	case <-x.done:
		x.p.w.Fatalf("the wait has ended: %+v, %v", x.grant, x.err)
	default:
	}
}

func (x *wait) release() {
	x.p.w.Helper()
	x.p.release(x.c)
}

func (p *proc) release(c backend.Claim) {
	p.w.Helper()
	want(p.w.T, "release", p.Release(p.w.Context(), c), nil)
}

func (p *proc) renew(c backend.Claim) error {
	err := errors.New("not answered")
	p.Renew(p.w.Context(), []backend.Claim{c}, func(_ int, _ backend.Grant, e error) { err = e })
	return err
}

// owners returns the owners of the waiters for "k".
func (w *world) owners() []string {
	d := open(w.rdb)
	defer d.Close()
	return await.Value(d.Inspect(w.Context(), "k")).Waiters
}

// queued fails unless these are the owners of the waiters for "k".
func (w *world) queued(owners ...string) {
	w.Helper()
	if got := w.owners(); !slices.Equal(got, owners) {
		w.Errorf("%q wait, want %q", got, owners)
	}
}

// empty fails unless nothing but fence counters is left.
func (w *world) empty(what string) {
	w.Helper()
	var left []string
	for _, key := range w.v.Mini.Keys() {
		if !strings.Contains(key, "}:fence:") {
			left = append(left, key)
		}
	}
	if len(left) > 0 {
		w.Errorf("%s: left %q", what, left)
	}
}

func fence(c *backend.Claim) { c.Fenced = true }

// One poll asks about 500 waiters of a client. Waiters that subscribe at the same time share one
// subscription. When all have left, the driver has no group, no waiter and no subscription, and the
// server has no channel.
func TestManyWaitersOfOneClient(t *testing.T) {
	for _, c := range []struct{ waiters, polls int }{{8, 1}, {501, 2}} {
		inWorld(t, func(w *world) {
			_, ps := w.procs(2)
			ps[1].proxy.Delay(10 * time.Millisecond) // all subscribe before the first one is confirmed
			ctx, stop := context.WithCancel(w.Context())
			var all sync.WaitGroup
			for range c.waiters {
				all.Go(func() { want(w.T, "wait", errOf(ps[1].Wait(ctx, claim("k"))), backend.ErrHeld) })
			}
			time.Sleep(window)
			ps[1].scripts()
			const windows = 5
			time.Sleep(windows * window)
			times := ps[1].scripts() / c.polls
			if n := len(w.owners()); n != c.waiters || times < 3*windows-1 || times > 3*windows+1 {
				w.Errorf("%d of %d wait, with %d polls in %d windows", n, c.waiters, times, windows)
			}
			stop()
			all.Wait()

			if groups, tokens, channels := fairlock.Left(ps[1].Driver); groups+tokens+channels > 0 {
				w.Errorf("left %d groups, %d waiters, %d subscriptions", groups, tokens, channels)
			}
			time.Sleep(5 * time.Second)
			if left := w.v.Mini.PubSubChannels("*"); len(left) > 0 {
				w.Errorf("the channels %q are left", left)
			}
		})
	}
}

// The longest term counts, if several readers hold the key.
func TestNextWaiterGetsTheKeyWhenADeadHoldersTermEnds(t *testing.T) {
	for _, terms := range [][]time.Duration{{20 * time.Second}, {time.Second, 20500 * time.Millisecond}} {
		inWorld(t, func(w *world) {
			p, q := w.proc(), w.proc()
			began := time.Now()
			c := claim("k")
			for _, c.TTL = range terms {
				c.Token, c.Shared = claim("k").Token, len(terms) > 1
				want(w.T, "acquire", errOf(p.Acquire(w.Context(), c)), nil)
			}
			x := q.wait()
			x.gotWithin(began, c.TTL+20*time.Millisecond)
			if took := x.at.Sub(began); took < c.TTL {
				w.Errorf("it got the key after %v, before the term had ended", took)
			}
			// That waiter dies without a renewal, so the term is that of a hand-over.
			next := p.wait()
			next.gotWithin(x.at, window+10*time.Millisecond)
		})
	}
}

// A hold that a Client learns of between its polls may end before the next poll.
func TestShortTermThatEndsBeforeTheNextPoll(t *testing.T) {
	inWorld(t, func(w *world) {
		c, ps := w.procs(3)
		dies := ps[1].wait(func(c *backend.Claim) { c.TTL = time.Second })
		x := ps[2].wait()
		time.Sleep(100 * time.Millisecond)
		ps[0].release(c)
		released := time.Now()
		dies.gotWithin(released, 0)
		ps[2].wait() // learns the term
		x.gotWithin(released, time.Second+10*time.Millisecond)
	})
}

// A waiter that connects again before its window has passed is still the first.
func TestWaiterThatWasCutOffKeepsItsPlace(t *testing.T) {
	inWorld(t, func(w *world) {
		c, ps := w.procs(3)
		first, second, third := ps[1].wait(), ps[2].wait(), ps[2].wait()
		ps[1].proxy.Down()
		w.settle()
		ps[0].release(c)
		second.gotWithin(time.Now(), 0)
		ps[1].proxy.Up()
		time.Sleep(window / 3) // it connects again
		second.release()
		first.servedAtOnce()
		third.gotWithin(time.Now(), 0)
	})
}

// The connections of a stopped process still accept data, so it looks alive. If terms are below the
// window, each stopped waiter costs its term at most. All of them together cost a window.
func TestStoppedWaitersCostOneWindowTogether(t *testing.T) {
	for _, ttl := range []time.Duration{time.Minute, time.Second} {
		inWorld(t, func(w *world) {
			c, ps := w.procs(7)
			var stopped []*wait
			for _, p := range ps[1:6] {
				stopped = append(stopped, p.wait(func(c *backend.Claim) { c.TTL = ttl }))
			}
			living := ps[6].wait()
			for _, p := range ps[1:6] {
				p.proxy.Stall()
			}
			ps[0].release(c)
			began := time.Now()
			time.Sleep(window / 2)
			living.waits()
			living.gotWithin(began, window+10*time.Millisecond)
			// For those that were stopped it was an outage of more than their Timeout.
			for i, x := range stopped {
				x.fails()
				ps[1+i].proxy.Flow()
			}
			living.release()
			time.Sleep(window)
			w.empty("all have ended")
		})
	}
}

func TestKeyIsHandedOnIfItsReceiverGivesUp(t *testing.T) {
	inWorld(t, func(w *world) {
		for _, at := range []time.Duration{0, 5 * time.Millisecond, 10 * time.Millisecond} {
			c, ps := w.procs(3)
			x, next := ps[1].wait(fence), ps[2].wait(fence)
			ps[1].proxy.Delay(10 * time.Millisecond) // so the message is still in flight
			ps[0].release(c)
			began := time.Now()
			time.AfterFunc(at, x.stop)
			<-x.done
			if x.err == nil { // it got the key in the same moment
				x.release()
			} else if !errors.Is(x.err, backend.ErrHeld) {
				w.Errorf("stopped after %v: %v", at, x.err)
			}
			next.gotWithin(began, 30*time.Millisecond)
			next.release()
			w.settle()
			time.Sleep(20 * time.Millisecond)
			w.empty("a waiter gave up")
		}
	})
}

// The message is lost with its connection. The waiter finds the grant when it has subscribed again.
func TestMessageLostWithItsConnection(t *testing.T) {
	inWorld(t, func(w *world) {
		c, ps := w.procs(3)
		x, next := ps[1].wait(), ps[2].wait()
		ps[1].proxy.Stall()
		ps[0].release(c)
		began := time.Now()
		w.settle()
		ps[1].proxy.Cut()
		ps[1].proxy.Flow()
		x.gotWithin(began, 1300*time.Millisecond)
		next.waits()
		x.release()
		next.gotWithin(time.Now(), 0)
	})
}

// Only the connection of the messages is half-open. The next poll finds the grant.
func TestMessageLostInAHalfOpenConnection(t *testing.T) {
	inWorld(t, func(w *world) {
		c, ps := w.procs(2)
		x := ps[1].wait()
		ps[1].delayMessages()
		ps[0].release(c)
		x.gotWithin(time.Now(), window/3+10*time.Millisecond)
		// The client subscribes again, so the next message arrives.
		x.release()
		time.Sleep(window / 2)
		c.Token += "-again"
		want(w.T, "acquire", errOf(ps[0].Acquire(w.Context(), c)), nil)
		x = ps[1].wait()
		ps[0].release(c)
		x.gotWithin(time.Now(), 0)
	})
}

// A message comes before the reply to the enqueue, whose place no poll asks about yet. A poll after
// the reply finds the key free.
func TestMessageBeforeTheReply(t *testing.T) {
	inWorld(t, func(w *world) {
		_, ps := w.procs(2)
		ps[1].failing(0) // the scripts are known, and the client is subscribed
		ps[1].proxy.Delay(20 * time.Millisecond)
		x := ps[1].wait()
		ps[1].proxy.Delay(0)
		w.rdb.Del(w.Context(), "k")
		w.v.Mini.Publish(w.v.Mini.PubSubChannels("*")[0], x.c.Token+" look")
		x.gotWithin(x.asked, 20*time.Millisecond)
	})
}

// The address leads to a new server. Only the connection of the messages still
// leads to the old server.
func TestSubscriptionFollowsTheAddress(t *testing.T) {
	inWorld(t, func(w *world) {
		_, ps := w.procs(2)
		old := ps[1].wait()
		time.Sleep(time.Second)

		w.v = redistest.Virtual(w.T)
		ps[1].move()
		c, others := w.procs(2)
		time.Sleep(window / 2) // the old waiter finds that its place is gone, and takes a new one
		fresh, more := others[1].wait(), ps[1].wait()
		time.Sleep(window / 2)

		others[0].release(c)
		for _, x := range []*wait{old, fresh, more} {
			x.servedAtOnce()
		}
	})
}

// A holder of another strategy sends no message when it releases the key.
func TestReleaseByAnotherStrategyIsNoticed(t *testing.T) {
	for kind, put := range map[string][]any{
		"string, without end": {"set", "k", "token-of-a-holder#owner"},
		"hash":                {"hset", "k", "token-of-a-holder#owner", 1},
		// spinlock and pubsublock have the same record
		"shared": {"zadd", "k", 9999999999999, "token-of-a-holder#owner"},
	} {
		t.Run(kind, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.rdb.Do(w.Context(), put...)
				if put[0] != "set" {
					w.rdb.PExpire(w.Context(), "k", time.Hour)
				}
				p := w.proc()
				p.proxy.Commands()
				x, next := p.wait(), p.wait()
				time.Sleep(2*window + 300*time.Millisecond)
				x.waits()
				w.rdb.Del(w.Context(), "k")
				x.gotWithin(time.Now(), time.Second+10*time.Millisecond)
				next.waits()
				time.Sleep(time.Second)
				x.release()
				next.got()
				if n := strings.Count(strings.Join(p.proxy.Commands(), "\n"), "subscribe "); n != 1 {
					w.Errorf("subscribed %d times", n)
				}
			})
		})
	}
}

// The term of a hand-over is a window at most. It counts from the last call that
// found the waiter in the queue. A renewal raises it.
func TestTermOfAHandOver(t *testing.T) {
	for _, c := range []struct {
		name     string
		ttl      time.Duration
		renewed  bool
		waited   time.Duration
		confirms int           // commands after the release
		least    time.Duration // what must be left of the term, as far as the holder knows
	}{
		{"long", time.Minute, true, 0, 0, window * 9 / 10},
		{"long, after a poll", time.Minute, true, window/3 + time.Second, 0, window*9/10 - time.Second},
		{"long, not renewed", time.Minute, false, 0, 1, 59 * time.Second},
		{"short", 3 * time.Second, true, time.Second, 0, 1900 * time.Millisecond},
		{"short, not renewed", 3 * time.Second, false, time.Second, 0, 1900 * time.Millisecond},
		{"short, half of it gone", 3 * time.Second, true, 1600 * time.Millisecond, 1, 2900 * time.Millisecond},
		{"short, all of it gone", time.Second, false, 1500 * time.Millisecond, 1, 900 * time.Millisecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				holder, ps := w.procs(2)
				x := ps[1].wait(func(cl *backend.Claim) { cl.TTL, cl.Renewed = c.ttl, c.renewed })
				time.Sleep(c.waited)
				synctest.Wait()
				ps[1].proxy.Commands()
				released := time.Now()
				ps[0].release(holder)
				x.gotWithin(released, 0)
				if n := len(ps[1].proxy.Commands()); n != c.confirms {
					w.Errorf("%d commands, want %d", n, c.confirms)
				}
				if left := time.Until(x.grant.Until); left < c.least {
					w.Errorf("%v left, want %v", left, c.least)
				}
				// The holder never trusts the hold for longer than the record lasts.
				if pttl := w.rdb.PTTL(w.Context(), "k").Val(); time.Until(x.grant.Until) > pttl || pttl > max(window, c.ttl) {
					w.Errorf("trusted for %v, of %v", time.Until(x.grant.Until), pttl)
				}
				want(w.T, "renew", ps[1].renew(x.c), nil)
				if pttl := w.rdb.PTTL(w.Context(), "k").Val(); pttl != c.ttl {
					w.Errorf("renewed to %v, want %v", pttl, c.ttl)
				}

				// The same holds for a waiter that finds the key free.
				x.release()
				x = ps[1].wait(func(cl *backend.Claim) { cl.TTL, cl.Renewed = c.ttl, c.renewed })
				if x.got(); time.Until(x.grant.Until) > w.rdb.PTTL(w.Context(), "k").Val() {
					w.Errorf("the key was free: trusted for %v", time.Until(x.grant.Until))
				}
			})
		})
	}
}

// Drivers send no times of their own clocks, and compare no reply with them. Here
// the server's clock is 30 s ahead, or behind.
func TestClocksApart(t *testing.T) {
	for _, apart := range []time.Duration{30 * time.Second, -30 * time.Second} {
		inWorld(t, func(w *world) {
			ctx, stop := context.WithCancel(w.Context())
			var clock sync.WaitGroup
			w.v.Mini.SetTime(time.Now().Add(apart))
			clock.Go(func() {
				for ; ctx.Err() == nil; time.Sleep(5 * time.Millisecond) {
					w.v.Mini.SetTime(time.Now().Add(apart))
				}
			})
			defer func() { stop(); clock.Wait() }()
			c, ps := w.procs(4)
			first, dead, last := ps[1].wait(fence), ps[2].wait(fence), ps[3].wait(fence)
			time.Sleep(2 * window)
			ps[2].proxy.Stall()
			ps[0].release(c)
			first.gotWithin(time.Now(), 0)
			if left := time.Until(first.grant.Until); left > window || left < window/2 {
				w.Errorf("%v left", left)
			}
			first.release()
			last.gotWithin(time.Now(), window+20*time.Millisecond)
			dead.stop()
			ps[2].proxy.Flow()
		})
	}
}
