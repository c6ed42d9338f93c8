package fairlock_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
)

// shared returns a claim for a shared hold of "k".
func shared() backend.Claim { c := claim("k"); c.Shared = true; return c }

func sharedFenced() backend.Claim { c := fenced("k"); c.Shared = true; return c }

// onServer returns a rig on a real server, whose scripts cannot use undefined globals.
func onServer(t *testing.T) rig { return setup(t, &redistest.Options{Own: true, Real: true}) }

// refused fails the test unless c is refused, by readers or not.
func (r rig) refused(t *testing.T, c backend.Claim, byReaders bool) {
	t.Helper()
	_, err := r.Driver.Acquire(t.Context(), c)
	var held *backend.HeldError
	if !errors.As(err, &held) || held.Shared != byReaders || held.RetryAfter <= 0 || held.Owner == "" {
		t.Errorf("acquire shared %v: got %#v, want a refusal by readers %v", c.Shared, err, byReaders)
	}
}

// holds fails the test unless the members of the shared record of "k" are those of cs.
func (r rig) holds(t *testing.T, cs ...backend.Claim) {
	t.Helper()
	var members []string
	for _, c := range cs {
		members = append(members, c.Token+"#"+c.Owner)
	}
	slices.Sort(members)
	got := r.Redis.ZRange(t.Context(), "k", 0, -1).Val()
	slices.Sort(got)
	if !slices.Equal(got, members) {
		t.Errorf("the members are %q, want %q", got, members)
	}
	if len(cs) > 0 && r.Left(t, "k") <= 0 {
		t.Error("the shared record has no end")
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

// Callers of both kinds stand in one queue. Readers at its head get the key together.
func TestOrderOfReadersAndWriters(t *testing.T) {
	r := onServer(t)
	holder := r.hold(t)
	ds := []Driver{r.another(t), r.another(t)}
	var xs []*waiting
	for i, c := range []backend.Claim{sharedFenced(), sharedFenced(), fenced("k"), sharedFenced(), sharedFenced(), sharedFenced(), fenced("k")} {
		xs = append(xs, r.wait(t, ds[i%2], c, i+1))
	}
	r.refused(t, shared(), false)
	r.Release(t, holder)
	last := uint64(0)
	grow := func(x *waiting) {
		t.Helper()
		if f := x.got(t).Fence; f <= last {
			t.Errorf("fence %d after %d", f, last)
		} else {
			last = f
		}
	}
	grow(xs[0])
	grow(xs[1])
	r.holds(t, xs[0].c, xs[1].c)
	// A reader does not pass the writer.
	r.refused(t, shared(), true)
	late := r.wait(t, ds[0], shared(), 6)
	late.waits(t)
	xs[0].release(t)
	xs[2].waits(t)
	xs[1].release(t)
	grow(xs[2])
	xs[3].waits(t)
	xs[2].release(t)
	for _, x := range xs[3:6] {
		grow(x)
	}
	r.holds(t, xs[3].c, xs[4].c, xs[5].c)
	for _, x := range xs[3:6] {
		xs[6].waits(t)
		x.release(t)
	}
	grow(xs[6])
	late.waits(t)
	xs[6].release(t)
	late.served(t)
	if left := r.left(t); !slices.Equal(left, []string{counter}) {
		t.Errorf("left %q, want the counter", left)
	}
}

// One script grants the key to 500 readers at most. A message makes the client of the next
// one poll, 20 s before it would.
func TestManyReadersAtTheHead(t *testing.T) {
	const n = 501
	r := onServer(t)
	holder := r.hold(t)
	var xs []*waiting
	var cs []backend.Claim
	d := r.another(t)
	for range n {
		x := &waiting{c: shared(), d: d, done: make(chan error, 1)}
		xs, cs = append(xs, x), append(cs, x.c)
		go func() { x.done <- errOf(d.Wait(t.Context(), x.c)) }()
	}
	r.queued(t, "k", n)
	last := r.wait(t, d, claim("k"), n+1)
	r.Release(t, holder)
	for _, x := range xs {
		x.got(t)
	}
	r.holds(t, cs...)
	for _, x := range xs {
		x.release(t)
	}
	last.served(t)
}

// The readers behind a writer that gives up need no poll.
func TestWriterThatGivesUpWakesReaders(t *testing.T) {
	inWorld(t, func(w *world) {
		ps := []*proc{w.proc(), w.proc(), w.proc()}
		c := claim("k")
		c.Shared, c.TTL = true, time.Hour
		want(w.T, "acquire", errOf(ps[0].Acquire(w.Context(), c)), nil)
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

// A reader joins a shared record immediately if no waiter before it has a subscriber.
func TestReaderQueuesBehindTheDead(t *testing.T) {
	for _, kind := range []string{"0", "2"} {
		inWorld(t, func(w *world) {
			p := w.proc()
			c := claim("k")
			c.Shared, c.TTL = true, time.Hour
			want(w.T, "acquire", errOf(p.Acquire(w.Context(), c)), nil)
			till := float64(time.Now().Add(time.Hour).UnixMilli())
			w.rdb.RPush(w.Context(), queueKey, "dead PUBLISH hasp:grant:dead 1 60000 "+kind+" a dead one")
			w.rdb.ZAdd(w.Context(), timeoutsKey, redis.Z{Score: till, Member: "dead"})
			p.wait(toShared).servedAtOnce()
		})
	}
}

// A waiter without a subscriber keeps its place. The others get the key. A user that may
// not ask for subscribers learns from PUBLISH that a client is gone.
func TestWaitersWithoutASubscriber(t *testing.T) {
	for flags, next := range map[string]func() backend.Claim{"0": func() backend.Claim { return claim("k") }, "2": shared} {
		for _, forbidden := range []string{"", "-pubsub"} {
			r := onServer(t)
			c := r.hold(t)
			r.deadOf(t, 3, "PUBLISH", flags, time.Hour)
			x := r.wait(t, r.another(t), next(), 4)
			y := r.wait(t, r.another(t), claim("k"), 5)
			if forbidden != "" {
				r.Forbid(t, forbidden)
			}
			r.Release(t, c)
			x.got(t)
			if x.c.Shared {
				r.holds(t, x.c)
			}
			r.queued(t, "k", 4)
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
	x := r.wait(t, r.another(t), shared(), 2)
	y := r.wait(t, r.another(t), claim("k"), 3)
	r.Release(t, c)
	x.got(t)
	x.release(t)
	y.waits(t)
	s, err := r.Driver.Inspect(t.Context(), "k")
	if err != nil || !slices.Equal(s.Shared, []string{"a dead one"}) || s.TTL < 110*time.Second {
		t.Errorf("inspect: %+v, %v", s, err)
	}
}

func toShared(c *backend.Claim) { c.Shared = true }

// Messages about shared holds are lost or late. The next poll finds all the holds.
func TestLostMessagesToReaders(t *testing.T) {
	inWorld(t, func(w *world) {
		holder, ps := w.procs(2)
		x := ps[1].wait(toShared, func(c *backend.Claim) { c.Fenced = true })
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
