package fairlock_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// shared returns a claim for a shared hold of "k".
func shared() backend.Claim { c := claim("k"); c.Shared = true; return c }

func sharedFenced() backend.Claim { c := fenced("k"); c.Shared = true; return c }

// onServer returns a rig on a real server, whose scripts cannot use undefined globals.
func onServer(t *testing.T) rig { return setup(t, redistest.Real) }

// refused fails the test unless c is refused, by readers or not.
func (r rig) refused(t *testing.T, c backend.Claim, byReaders bool) {
	t.Helper()
	_, err := r.Driver.Acquire(t.Context(), c)
	var held *backend.HeldError
	if !errors.As(err, &held) || held.Shared != byReaders || held.RetryAfter <= 0 || held.Owner == "" {
		t.Errorf("acquire shared %v: got %#v, want a refusal by readers %v", c.Shared, err, byReaders)
	}
}

// waits fails the test if x does not wait.
func (x *waiting) waits(t *testing.T) {
	t.Helper()
	select {
	case err := <-x.done:
		t.Fatalf("the wait has ended: %+v, %v", x.grant, err)
	case <-time.After(50 * time.Millisecond):
	}
}

// One script grants the key to 500 readers at most. A message makes the client of the next
// one poll, long before it would.
func TestManyReadersAtTheHead(t *testing.T) {
	const n = 501
	r := onServer(t)
	holder := r.hold(t)
	var xs []*waiting
	d := r.another(t)
	for range n {
		xs = append(xs, r.waitOn(t, d, shared()))
	}
	last := r.waitOn(t, d, claim("k"))
	r.Release(t, holder)
	for _, x := range xs {
		x.got(t)
	}
	if got := r.Redis.ZCard(t.Context(), "k").Val(); got != n {
		t.Errorf("%d readers hold the key", got)
	}
	for _, x := range xs {
		x.release(t)
	}
	last.served(t)
}

// The readers behind a writer that gives up need no poll.
func TestWriterThatGivesUpWakesReaders(t *testing.T) {
	inWorld(t, func(w *world) {
		ps := []*proc{w.proc(), w.proc(), w.proc()}
		c := ps[0].wait(toShared).c
		writer := ps[1].wait()
		x := ps[2].wait(toShared)
		x.waits()
		writer.stop()
		<-writer.done
		var held *backend.HeldError
		if !errors.As(writer.err, &held) || !held.Shared || held.Owner != c.Owner {
			w.Errorf("the writer got %#v, want a refusal by readers", writer.err)
		}
		w.settle()
		x.gotWithin(time.Now(), 0)
	})
}

// A caller gets the key immediately if no waiter before it has a subscriber. So does a reader beside
// another.
func TestCallersQueueBehindTheDead(t *testing.T) {
	for _, flags := range []string{"0", "2"} {
		inWorld(t, func(w *world) {
			w.place("dead", "PUBLISH hasp:grant:dead 1 60000 "+flags+" a dead one", time.Hour)
			p := w.proc()
			p.wait().servedAtOnce()
			first := p.wait(toShared)
			p.wait(toShared).servedAtOnce()
			first.servedAtOnce()
		})
	}
}

// A waiter without a subscriber keeps its place. The others get the key. A client that subscribes to
// all channels by pattern does not count as a subscriber. A user that may not ask for subscribers
// learns from PUBLISH that a client is gone.
func TestWaitersWithoutASubscriber(t *testing.T) {
	for flags, next := range map[string]func() backend.Claim{"0": func() backend.Claim { return claim("k") }, "2": shared} {
		for _, forbidden := range []string{"", "-pubsub"} {
			r := onServer(t)
			c := r.hold(t)
			r.deadOf(t, 3, "PUBLISH", flags, time.Hour)
			x := r.wait(t, next())
			y := r.wait(t, claim("k"))
			if forbidden != "" {
				r.Forbid(t, forbidden)
			} else {
				watch := r.Redis.PSubscribe(t.Context(), "*")
				defer watch.Close()
				await.Value(watch.Receive(t.Context()))
			}
			r.Release(t, c)
			x.got(t)
			if n := r.Redis.ZCard(t.Context(), "k").Val(); x.c.Shared && n != 1 {
				t.Errorf("%d readers hold the key", n)
			}
			r.queued(t, 4)
			x.release(t)
			y.served(t)
		}
	}
}

// A reader that cannot be told has a hold until it would poll, and others hold the key beside it.
func TestReaderWithoutACommand(t *testing.T) {
	r := onServer(t)
	c := r.hold(t)
	r.deadOf(t, 1, "-", "2", 2*time.Minute)
	x := r.wait(t, shared())
	y := r.wait(t, claim("k"))
	r.Release(t, c)
	x.got(t)
	x.release(t)
	y.waits(t)
	s := r.status(t)
	if !slices.Equal(s.Shared, []string{"a dead one"}) || s.TTL < 110*time.Second {
		t.Errorf("inspect: %+v", s)
	}
}

func toShared(c *backend.Claim) { c.Shared = true }

// Messages about shared holds are lost or late. The next poll finds all the holds.
func TestLostMessagesToReaders(t *testing.T) {
	inWorld(t, func(w *world) {
		holder, ps := w.procs(2)
		x := ps[1].wait(toShared, fence)
		y := ps[1].wait(toShared)
		deliver := ps[1].delayMessages()
		ps[0].release(holder)
		released := time.Now()
		x.gotWithin(released, window/3)
		y.gotWithin(released, window/3)
		deliver()
		w.settle()
		for _, x := range []*wait{x, y} {
			want(w.T, "renew", ps[1].renew(x.c), nil)
			x.release()
		}
		w.empty("released")
	})
}
