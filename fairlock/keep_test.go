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
		r.dead(t, dead, "PUBLISH", 100*time.Millisecond)
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

// The start of a hold that no script has read the clock for follows from its term. It is
// the same after a release that sets another term.
func TestStartOfAKeptHold(t *testing.T) {
	inWorld(t, func(w *world) {
		c, ps := w.procs(1)
		before, err := ps[0].Inspect(w.Context(), "k")
		want(w.T, "inspect", err, nil)
		time.Sleep(10 * time.Second)
		ps[0].release(strategytest.Kept(c, time.Minute))
		after, err := ps[0].Inspect(w.Context(), "k")
		if d := after.Since.Sub(before.Since).Abs(); err != nil || d > 10*time.Millisecond || after.TTL > time.Minute {
			w.Errorf("got %+v (%v), and %+v before", after, err, before)
		}
	})
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

// The release of a token that holds nothing removes its place, also with KeepUntil.
func TestPlaceOfATokenThatIsReleasedWithKeepUntil(t *testing.T) {
	inWorld(t, func(w *world) {
		holder, ps := w.procs(2)
		x := ps[1].wait()
		w.queued(x.c.Owner)
		want(w.T, "release", ps[0].Release(w.Context(), strategytest.Kept(x.c, time.Minute)), backend.ErrLost)
		if got := w.owners(); len(got) != 0 {
			w.Errorf("%q are in the queue", got)
		}
		x.stop()
		ps[0].release(holder)
	})
}
