package fairlock_test

import (
	"errors"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/strategytest"
)

// The waiters poll every 20 s, and learned of a term of half a minute or more. A message
// tells the first one of the new end. Waiters without a subscription are passed over.
func TestReleaseThatKeepsTheKeyTellsTheHead(t *testing.T) {
	const keep = 500 * time.Millisecond
	for _, dead := range []int{0, 1} {
		r := setup(t, nil)
		c := r.hold(t)
		r.dead(t, dead, 100*time.Millisecond)
		first := r.wait(t, r.another(t), claim("k"), dead+1)
		second := r.wait(t, r.another(t), claim("k"), dead+2)
		r.Release(t, strategytest.Kept(c, keep))
		released := time.Now()
		if got := recordOf(t, r.Redis, "k"); got.token != "kept-"+c.Token || got.owner != c.Owner || got.mark != "+" {
			t.Errorf("the record is %+v", got)
		}
		want(t, "TryLock", errOf(r.Driver.Acquire(t.Context(), claim("k"))), backend.ErrHeld)
		first.got(t)
		if took := time.Since(released); took < keep-50*time.Millisecond || took > 5*time.Second {
			t.Errorf("the first waiter got the key after %v, want %v", took, keep)
		}
		first.release(t)
		second.served(t)
	}
}

// An enqueue was not answered, so the driver repeats the release of its token. The release
// was lost, so the repeat is the first to arrive. It keeps the key as the release would.
func TestRepeatOfAReleaseThatKeepsTheKey(t *testing.T) {
	inWorld(t, func(w *world) {
		holder, ps := w.procs(2)
		ps[1].wait().stop() // the scripts are known from here on
		w.settle()
		c := claim("k")
		ps[1].proxy.Fail(c.Token, faultproxy.LoseReply)
		x := ps[1].wait(func(was *backend.Claim) { was.Token, was.TTL = c.Token, time.Minute })
		ps[0].release(holder)
		x.got()

		ps[1].proxy.Fail(c.Token, faultproxy.LoseRequest)
		kept := strategytest.Kept(x.c, 20*time.Second)
		end := kept.KeepUntil
		if err := ps[1].Release(w.Context(), kept); err == nil || errors.Is(err, backend.ErrLost) {
			w.Fatalf("release: %v, want an unknown outcome", err)
		}
		time.Sleep(x.c.Timeout + time.Second)
		w.settle()
		if got := recordOf(w.T, w.rdb, "k"); got.token != "kept-"+x.c.Token {
			w.Errorf("the record is %+v", got)
		}
		y := ps[0].wait()
		y.got()
		if late := y.at.Sub(end); late < 0 || late > time.Second {
			w.Errorf("the next waiter got the key %v after the end of the keep", late)
		}
	})
}
