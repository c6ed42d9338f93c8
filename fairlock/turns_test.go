package fairlock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/fairlock"
)

// holding is how long a caller of a test holds the key.
const holding = time.Millisecond

// crowd is callers of some processes that want "k", and the order in which they
// were served.
type crowd struct {
	w  *world
	wg sync.WaitGroup

	mu     sync.Mutex // guards all below
	served []string
	fences []uint64
}

// join starts a caller, which locks "k", notes its name and unlocks.
func (cr *crowd) join(name string, c *hasp.Client, opts ...hasp.Option) {
	cr.wg.Go(func() {
		lease, err := c.Lock(cr.w.Context(), "k", opts...)
		if err != nil {
			if !errors.Is(err, hasp.ErrHeld) {
				cr.w.Errorf("%s: %v", name, err)
			}
			return
		}
		cr.mu.Lock()
		cr.served = append(cr.served, name)
		if f := lease.Fence(); f != 0 {
			cr.fences = append(cr.fences, f)
		}
		cr.mu.Unlock()
		time.Sleep(holding)
		if err := lease.Unlock(cr.w.Context()); err != nil {
			cr.w.Errorf("%s: %v", name, err)
		}
	})
	cr.w.settle()
}

func (cr *crowd) want(served string) {
	cr.w.Helper()
	cr.wg.Wait()
	if got := strings.Join(cr.served, " "); got != served {
		cr.w.Errorf("served %s\n want %s", got, served)
	}
}

// clients returns Clients of processes that have that many turns each. Another
// process holds "k" until the caller calls free.
func (w *world) clients(turns ...int) (free func(), cs []*hasp.Client, ps []*proc) {
	c, holder := w.procs(1)
	for i, n := range turns {
		ps = append(ps, w.proc(func(o *fairlock.Options) { o.Turns = n }))
		cs = append(cs, hasp.New(ps[i].Driver, &hasp.Options{TTL: time.Minute, Owner: fmt.Sprint(i)}))
		w.Cleanup(func() { cs[i].Close() })
	}
	return func() { holder[0].release(c) }, cs, ps
}

// As many callers of a process as it has turns hold the key on one place. Then the
// process takes a new place at the end. A place costs two scripts.
func TestTurnsInARow(t *testing.T) {
	inWorld(t, func(w *world) {
		free, cs, ps := w.clients(4, 4, 0)
		cr := &crowd{w: w}
		for i := range 9 {
			cr.join(fmt.Sprint("a", i), cs[0])
			cr.join(fmt.Sprint("b", i), cs[1])
			if i < 2 {
				cr.join(fmt.Sprint("c", i), cs[2]) // each of its callers has a place
			}
		}
		w.queued("0", "1", "2", "2")
		for _, c := range cs[:2] {
			want(t, "TryLock", errOf(c.TryLock(w.Context(), "k")), hasp.ErrHeld)
		}
		time.Sleep(window / 2) // so that no Client remembers a refusal
		ps[0].proxy.Commands()
		free()
		cr.want("a0 a1 a2 a3 b0 b1 b2 b3 c0 c1 a4 a5 a6 a7 b4 b5 b6 b7 a8 b8")
		const want = 5 // the first enqueue was before
		if n := ps[0].scripts(); n != want {
			t.Errorf("%d scripts, want %d", n, want)
		}
		w.empty("all were served")
	})
}

// Without turns, and with one turn, every caller has a place of its own.
func TestOneTurnIsTheOrderOfArrival(t *testing.T) {
	for _, turns := range []int{0, 1} {
		inWorld(t, func(w *world) {
			free, cs, _ := w.clients(turns, turns)
			cr := &crowd{w: w}
			var want []string
			for i := range 12 {
				want = append(want, fmt.Sprint(i))
				cr.join(want[i], cs[i/3%2])
			}
			free()
			cr.want(strings.Join(want, " "))
		})
	}
}

// A fence belongs to a place, so a caller that asks for one uses the place alone.
func TestFencesGrowOverTurns(t *testing.T) {
	inWorld(t, func(w *world) {
		free, cs, _ := w.clients(8, 8)
		cr := &crowd{w: w}
		for i := range 5 {
			cr.join(fmt.Sprint("a", i), cs[0], hasp.WithFence())
			cr.join(fmt.Sprint("b", i), cs[1], hasp.WithFence())
		}
		cr.join("a5", cs[0])
		cr.join("a6", cs[0])
		free()
		cr.want("a0 b0 a1 b1 a2 b2 a3 b3 a4 b4 a5 a6")
		for i, f := range cr.fences {
			if i > 0 && f <= cr.fences[i-1] {
				t.Errorf("fences %d", cr.fences)
			}
		}
		w.empty("all were served")
	})
}

// If the caller that waits in the driver gives up, the next caller in line gets its
// place, without a command.
func TestPlaceIsLeftToTheNextInLine(t *testing.T) {
	for _, how := range []string{"max wait", "context"} {
		t.Run(how, func(t *testing.T) {
			inWorld(t, func(w *world) {
				free, cs, ps := w.clients(4, 4)
				cr := &crowd{w: w}
				ctx, cancel := context.WithCancel(w.Context())
				var quitter sync.WaitGroup
				quitter.Go(func() {
					var opts []hasp.Option
					if how == "max wait" {
						opts = append(opts, hasp.WithMaxWait(time.Second))
					}
					want(w.T, "the caller that gave up", errOf(cs[0].Lock(ctx, "k", opts...)), hasp.ErrHeld)
				})
				w.settle()
				cr.join("b0", cs[1])
				cr.join("a1", cs[0], hasp.WithMaxWait(time.Minute))
				ps[0].proxy.Commands()
				if how == "context" {
					cancel()
				}
				quitter.Wait()
				cancel()
				w.settle()
				if n := ps[0].scripts(); n > 0 {
					t.Errorf("it cost %d scripts", n)
				}
				w.queued("0", "1")
				cr.join("a2", cs[0])
				time.Sleep(3 * window) // the place is kept alive
				free()
				cr.want("a1 a2 b0")
				w.empty("all were served")
			})
		})
	}
}

// A caller that asks for something else than its predecessor takes a new place, and
// the old one is given up.
func TestPlaceIsNotLeftToAnotherKindOfCaller(t *testing.T) {
	inWorld(t, func(w *world) {
		free, cs, _ := w.clients(4, 4)
		cr := &crowd{w: w}
		cr.join("a0", cs[0], hasp.WithMaxWait(time.Second))
		cr.join("b0", cs[1])
		cr.join("a1", cs[0], hasp.WithTTL(2*time.Minute))
		time.Sleep(time.Second)
		w.settle()
		w.queued("1", "0")
		free()
		cr.want("b0 a1")
		w.empty("all were served")
	})
}

func TestNothingRemainsOfPlacesThatNoCallerWants(t *testing.T) {
	inWorld(t, func(w *world) {
		free, cs, _ := w.clients(4)
		cr := &crowd{w: w}
		for i := range 3 {
			cr.join(fmt.Sprint(i), cs[0], hasp.WithMaxWait(time.Duration(i+1)*time.Second))
		}
		cr.wg.Wait()
		w.settle()
		if got := w.owners(); len(got) > 0 {
			t.Errorf("places of %q", got)
		}
		free()
		cr.want("")
		w.empty("all gave up")
	})
}

// A place may be served while no Wait runs for it.
func TestPlaceThatStays(t *testing.T) {
	stays := func(c *backend.Claim) { c.Stays = true }
	for _, end := range []string{"waited for again", "released", "closed"} {
		t.Run(end, func(t *testing.T) {
			inWorld(t, func(w *world) {
				c, ps := w.procs(2)
				x := ps[1].wait(stays)
				x.stop()
				if <-x.done; !errors.Is(x.err, backend.ErrHeld) {
					t.Fatal(x.err)
				}
				time.Sleep(3 * window)
				if got := w.owners(); len(got) != 1 {
					t.Errorf("waiters %q, want the one that stays", got)
				}
				ps[0].release(c)
				w.settle()
				switch end {
				case "waited for again":
					g, err := ps[1].Wait(w.Context(), x.c)
					if err != nil || time.Until(g.Until) <= 0 {
						t.Fatalf("%+v, %v", g, err)
					}
					ps[1].release(x.c)
				case "released":
					ps[1].release(x.c)
				case "closed":
					ps[1].Close()
					time.Sleep(window)
				}
				w.settle()
				w.empty(end)
			})
		})
	}
}

// A short outage costs neither the place nor the wait.
func TestTurnsInAnOutage(t *testing.T) {
	inWorld(t, func(w *world) {
		free, cs, _ := w.clients(4)
		cr := &crowd{w: w}
		cr.join("a0", cs[0])
		cr.join("a1", cs[0])
		w.v.Mini.SetError("LOADING")
		time.Sleep(time.Second)
		w.v.Mini.SetError("")
		time.Sleep(window)
		free()
		cr.want("a0 a1")
		w.empty("the outage is over")
	})
}

// If a process dies within a row, the next waiter gets the key at the end of the
// term, and not before.
func TestProcessThatDiesInARow(t *testing.T) {
	inWorld(t, func(w *world) {
		free, cs, ps := w.clients(4, 4)
		var last time.Time // when the first process last held the key
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				lease, err := cs[0].Lock(w.Context(), "k")
				if err != nil {
					return // the process has died
				}
				time.Sleep(holding)
				ps[0].proxy.Down()
				last = time.Now()
				if lease.Unlock(w.Context()); lease.Err() == nil {
					t.Error("held after Unlock")
				}
			})
			w.settle()
		}
		cr := &crowd{w: w}
		cr.join("b0", cs[1])
		cr.join("b1", cs[1])
		free()
		began := time.Now()
		cr.want("b0 b1")
		if took := time.Since(began); took > window+10*holding {
			t.Errorf("served after %v", took)
		}
		wg.Wait()
		if took := last.Sub(began); took != 4*holding {
			t.Errorf("the row of the process that died lasted %v", took)
		}
	})
}

// All processes hold the key for the same number of turns, and so do their callers,
// however short the holds are.
func TestSharesOfTurns(t *testing.T) {
	inWorld(t, func(w *world) {
		const callers, rounds = 64, 8
		free, cs, _ := w.clients(8, 8, 8, 8)
		shared := w.share(cs, callers, rounds)
		free()
		_, shares := shared()
		synctest.Wait()
		if least, most := slices.Min(shares), slices.Max(shares); least < rounds-1 || most > rounds+1 {
			t.Errorf("shares from %d to %d: %v", least, most, shares)
		}
		w.empty("all have had their share")
	})
}
