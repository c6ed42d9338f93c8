package fairlock_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
)

// The reply to an enqueue is lost, and the repeats do not arrive until the hold that it led to
// has ended. The message about that hold arrives later still. It does not count.
func TestLateMessageAfterAnUnansweredEnqueue(t *testing.T) {
	inWorld(t, func(w *world) {
		holder, ps := w.procs(3)
		ps[1].wait().stop() // the scripts are known from here on
		w.settle()
		c := claim("k")
		ps[1].proxy.Fail(c.Token, faultproxy.LoseReply)
		for range 12 {
			ps[1].proxy.Fail(c.Token, faultproxy.LoseRequest)
		}
		x := ps[1].wait(func(was *backend.Claim) { was.Token, was.TTL = c.Token, 500*time.Millisecond })
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
		first := ps[1].wait()
		polls := func() (n int) {
			for _, cmd := range ps[1].proxy.Commands() {
				// window, position and the entry before it: only a poll has these
				if strings.HasPrefix(cmd, "eval") && strings.Contains(cmd, fmt.Sprint(" ", window.Milliseconds(), " 0  ")) {
					n++
				}
			}
			return n
		}
		polls()
		ps[1].proxy.Delay(5 * time.Millisecond)
		for _, queue := range []bool{false, true} {
			began := time.Now()
			for range 10 {
				// until shortly before the next poll
				time.Sleep(window/3 - time.Since(start)%(window/3) - 20*time.Millisecond)
				for range 20 {
					if queue {
						x := claim("k")
						ctx, cancel := context.WithTimeout(w.Context(), 200*time.Millisecond)
						go func() { defer cancel(); ps[1].Wait(ctx, x); ps[1].Release(w.Context(), x) }()
					}
					time.Sleep(3 * time.Millisecond)
				}
			}
			time.Sleep(time.Second)
			if n := polls(); n > 12 {
				w.Errorf("with waiters that queue %v: %d polls in %v", queue, n, time.Since(began))
			}
		}
		first.stop()
	})
}
