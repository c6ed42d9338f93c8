package fairlock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/strategytest"
)

// These tests make the Redis unreachable for a while, in virtual time.

// An unanswered enqueue is repeated with the same token, which gets one place, even if the first
// one arrives later.
func TestReplyToEnqueueIsLost(t *testing.T) {
	for _, fault := range []faultproxy.Fault{faultproxy.LoseReply, faultproxy.LoseRequest, faultproxy.HoldRequest} {
		inWorld(t, func(w *world) {
			holder, ps := w.procs(3)
			x := ps[1].wait(ps[1].failing(fault))
			if fault == faultproxy.HoldRequest {
				ps[1].move()
			}
			next := ps[2].wait()
			if n := ps[1].proxy.Pending(); n != 0 {
				w.Errorf("fault %d did not happen", fault)
			}
			time.Sleep(time.Second)
			ps[1].proxy.Release()
			w.settle()
			order := []*wait{x, next}
			if fault != faultproxy.LoseReply {
				order = []*wait{next, x} // the first enqueue did not arrive
			}
			w.queued(order[0].c.Owner, order[1].c.Owner)
			ps[0].release(holder)
			for _, x := range order {
				// After an unanswered enqueue, a message makes the client poll.
				x.gotWithin(time.Now(), time.Millisecond)
				x.release()
			}
			time.Sleep(2 * x.c.Timeout)
			w.empty("both were served")
		})
	}
}

// The reply that grants a free key is lost, or the reply to a reader beside another. The
// repeat finds the hold, also if others wait by then.
func TestReplyToAnEnqueueThatGrantsTheKeyIsLost(t *testing.T) {
	for _, shared := range []bool{false, true} {
		inWorld(t, func(w *world) {
			kind := func(c *backend.Claim) { c.Shared = shared }
			p := w.proc()
			p.wait(kind).release()
			readers := 0
			if shared {
				p.wait(kind).got()
				readers = 2
			}
			x := p.wait(kind, fence, func(c *backend.Claim) { p.proxy.Fail(c.Token, faultproxy.LoseReply) })
			writer := p.wait() // comes before the repeat
			x.gotWithin(x.asked, time.Second)
			writer.stop()
			if s, err := p.Inspect(w.Context(), "k"); err != nil || s.Fence == 0 || s.Fence != x.grant.Fence || len(s.Shared) != readers {
				w.Errorf("fence %d, %+v, %v", x.grant.Fence, s, err)
			}
			want(w.T, "renew", p.renew(x.c), nil)
			x.release()
			time.Sleep(max(x.c.Timeout, x.c.TTL) + time.Second)
			w.empty("released")
		})
	}
}

// If an enqueue arrives after its Wait has ended, nothing remains of it. If it
// arrives more than a Timeout later, it blocks the key for a window.
func TestLateEnqueue(t *testing.T) {
	for _, given := range []bool{false, true} {
		for _, after := range []time.Duration{0, 2 * time.Second, 20 * time.Second} {
			t.Run(fmt.Sprint("given up: ", given, ", after ", after), func(t *testing.T) {
				inWorld(t, func(w *world) {
					holder, ps := w.procs(3)
					x := ps[1].wait(ps[1].failing(faultproxy.HoldRequest))
					ps[1].move()
					time.Sleep(100 * time.Millisecond) // it repeats the enqueue
					if ps[1].proxy.Pending() > 0 {
						w.Fatal("no command was kept back")
					}
					x.waits()
					if given {
						x.stop()
						<-x.done
					}
					ps[0].release(holder)
					if !given {
						x.got()
						x.release()
					}
					// This one is of the same client, which therefore stays subscribed.
					rest := ps[1].wait()
					rest.got()
					want(w.T, "renew", ps[1].renew(rest.c), nil)
					time.Sleep(after)
					ps[1].proxy.Release()
					w.settle()
					rest.release()
					time.Sleep(x.c.Timeout + 100*time.Millisecond)
					w.settle()
					if after < 10*time.Second {
						w.empty("the late enqueue has arrived")
					}
					time.Sleep(window)
					w.empty("a window after the late enqueue has arrived")
				})
			})
		}
	}
}

func TestWaitSurvivesAShortOutage(t *testing.T) {
	for name, fault := range strategytest.Outages {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				holder, ps := w.procs(3)
				x, next := ps[1].wait(), ps[2].wait()
				for range 4 {
					mend := fault(ps[1].proxy)
					time.Sleep(2500 * time.Millisecond)
					mend()
					time.Sleep(2500 * time.Millisecond)
				}
				x.waits()
				ps[0].release(holder)
				x.servedAtOnce()
				next.got()
			})
		})
	}
}

func TestWaitReportsAnOutage(t *testing.T) {
	inWorld(t, func(w *world) {
		holder, ps := w.procs(3)
		x := ps[1].wait()
		down := time.Now()
		ps[1].proxy.Down()
		x.failsSince(down, window/3)
		if took := time.Since(down); took < x.c.Timeout || took > window/3+2*x.c.Timeout {
			w.Errorf("reported after %v", took)
		}
		// So does a wait that begins during the outage.
		began := time.Now()
		y := ps[1].wait()
		y.failsSince(began, 0)
		if took := time.Since(began); took < y.c.Timeout || took > 2*y.c.Timeout {
			w.Errorf("got %v after %v", y.err, took)
		}
		ps[1].proxy.Up()
		time.Sleep(window)
		ps[0].release(holder)
		w.empty("the outage is over")
	})
}

// A caller that gives up while the store hangs returns at once, with the store's
// last answer. Its place is removed when the store answers again.
func TestGivingUpWhileTheStoreHangs(t *testing.T) {
	inWorld(t, func(w *world) {
		_, ps := w.procs(3)
		x, other := ps[1].wait(), ps[1].wait()
		ps[1].proxy.Stall()
		x.stop()
		began := time.Now()
		<-x.done
		if took := time.Since(began); !errors.Is(x.err, backend.ErrHeld) || !errors.Is(x.err, context.Canceled) || took > 0 {
			w.Errorf("%v after %v", x.err, took)
		}
		time.Sleep(time.Second)
		ps[1].proxy.Flow()
		time.Sleep(time.Second)
		w.queued(other.c.Owner)
	})
}

// A wait that ends while the store is out reports the outage, although the store
// said before that the key was held.
func TestWaitThatEndsInAnOutage(t *testing.T) {
	for _, fault := range strategytest.Outages {
		inWorld(t, func(w *world) {
			_, ps := w.procs(2)
			x := ps[1].wait()
			mend := fault(ps[1].proxy)
			down := time.Now()
			time.Sleep(window/3 + x.c.Timeout/3) // a poll has failed, or has been unanswered for a third of Timeout
			x.stop()
			x.failsSince(down, window/3)
			mend()
		})
	}
}

// The same if the waiter has lost its place, and the store hangs while it queues again.
func TestWaitThatEndsWhileItQueuesAgain(t *testing.T) {
	inWorld(t, func(w *world) {
		_, ps := w.procs(2)
		x := ps[1].wait()
		w.v.Mini.Del(queueKey)
		ps[1].proxy.Fail(fmt.Sprint(" 2 ", window.Milliseconds(), " 0 ", x.c.Owner), faultproxy.HoldRequest) // the entry of the second round
		for ps[1].proxy.Pending() > 0 {
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(x.c.Timeout / 2)
		x.stop()
		x.fails()
		ps[1].proxy.Release()
	})
}

// If one connection hangs, and the store answers on others, the wait goes on and keeps its place.
func TestPollThatHangs(t *testing.T) {
	inWorld(t, func(w *world) {
		holder, ps := w.procs(3)
		x, next := ps[1].wait(), ps[2].wait()
		ps[1].proxy.Fail(x.c.Token, faultproxy.HoldRequest)
		time.Sleep(window + time.Second)
		if n := ps[1].proxy.Pending(); n != 0 {
			w.Error("no poll hangs")
		}
		x.waits()
		ps[0].release(holder)
		x.servedAtOnce()
		next.got()
		ps[1].proxy.Release()
	})
}

// Close ends every Wait. Entries that remain in the queue expire.
func TestCloseEndsWaiting(t *testing.T) {
	inWorld(t, func(w *world) {
		_, ps := w.procs(3)
		x, other := ps[1].wait(), ps[2].wait()
		want(w.T, "close", ps[1].Close(), nil)
		x.fails()
		if late := time.Since(x.at); late > 0 {
			w.Errorf("it ended %v ago", late)
		}
		time.Sleep(window)
		w.queued(other.c.Owner)
		if _, err := ps[1].Wait(w.Context(), claim("k")); err == nil || errors.Is(err, backend.ErrHeld) {
			w.Errorf("wait after close: %v", err)
		}
	})
}

// The reply to an enqueue is lost, and the repeats do not arrive until the hold that it led to
// has ended. The message about that hold arrives later still. It does not count.
func TestLateMessageAfterAnUnansweredEnqueue(t *testing.T) {
	inWorld(t, func(w *world) {
		holder, ps := w.procs(3)
		x := ps[1].wait(ps[1].failing(faultproxy.LoseReply), func(c *backend.Claim) {
			c.TTL = 500 * time.Millisecond
			for range 12 {
				ps[1].proxy.Fail(c.Token, faultproxy.LoseRequest)
			}
		})
		w.queued(x.c.Owner)
		other := ps[2].wait()
		deliver := ps[1].delayMessages()
		ps[0].release(holder)
		released := time.Now()
		if got := recordOf(w.T, w.rdb, "k").token; got != x.c.Token {
			w.Fatalf("%q has the key", got)
		}
		other.gotWithin(released, window/3)
		for n := 0; len(w.owners()) == 0 || ps[1].proxy.Pending() > 0; n++ {
			if n > 300 {
				w.Fatalf("not queued again, %d faults pending", ps[1].proxy.Pending())
			}
			time.Sleep(10 * time.Millisecond)
		}
		w.settle()
		deliver()
		w.settle()
		select {
		case <-x.done:
			w.Errorf("%v: x returned %+v, %v, while the record is %+v", time.Since(released), x.grant, x.err, recordOf(w.T, w.rdb, "k"))
		default:
			other.release()
			x.gotWithin(time.Now(), time.Second)
		}
	})
}

// Waiters that queue while a poll is in flight cause no second poll.
func TestEnqueueBesideAPollCostsNoPoll(t *testing.T) {
	inWorld(t, func(w *world) {
		_, ps := w.procs(2)
		start := time.Now()
		time.Sleep(90 * time.Millisecond)
		ps[1].wait()
		ps[1].proxy.Commands()
		ps[1].proxy.Delay(5 * time.Millisecond)
		for range 10 {
			// until shortly before the next poll
			time.Sleep(window/3 - time.Since(start)%(window/3) - 20*time.Millisecond)
			for range 20 {
				ctx, cancel := context.WithTimeout(w.Context(), 200*time.Millisecond)
				go func() {
					defer cancel()
					x := claim("k")
					ps[1].Wait(ctx, x)
					ps[1].Release(w.Context(), x)
				}()
				time.Sleep(3 * time.Millisecond)
			}
		}
		time.Sleep(time.Second)
		polls := 0
		for _, cmd := range ps[1].proxy.Commands() {
			// Only in a poll does a token follow the window.
			if strings.HasPrefix(cmd, "eval") && strings.Contains(cmd, fmt.Sprint(" ", window.Milliseconds(), " token-")) {
				polls++
			}
		}
		if polls < 10 || polls > 12 {
			w.Errorf("%d polls in %v", polls, time.Since(start))
		}
	})
}
