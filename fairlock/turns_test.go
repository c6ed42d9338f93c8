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

// taking is what a caller of a test does: it has the key for a millisecond.
const taking = time.Millisecond

// crowd is callers of some processes for "k", in order of arrival.
type crowd struct {
	w  *world
	wg sync.WaitGroup

	mu     sync.Mutex // guards all below
	served []string
	fences []uint64
}

// comes has a caller ask for "k", note its name when it has it, and go.
func (cr *crowd) comes(name string, c *hasp.Client, opts ...hasp.Option) {
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
		time.Sleep(taking)
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

// clients are Clients of processes with so many turns each, and what has "k"
// freed that somebody else holds.
func (w *world) clients(turns ...int) (free func(), cs []*hasp.Client, ps []*proc) {
	c, holder := w.procs(1)
	for i, n := range turns {
		ps = append(ps, w.proc(func(o *fairlock.Options) { o.Turns = n }))
		cs = append(cs, hasp.New(ps[i].Driver, &hasp.Options{TTL: time.Minute, Owner: fmt.Sprint(i)}))
		w.Cleanup(func() { cs[i].Close() })
	}
	return func() { holder[0].release(c) }, cs, ps
}

// So many callers of a process have the key on one place, and then it has a
// new one, after all that were taken before. A place costs two scripts.
func TestTurnsInARow(t *testing.T) {
	inWorld(t, func(w *world) {
		free, cs, ps := w.clients(4, 4, 0)
		cr := &crowd{w: w}
		for i := range 9 {
			cr.comes(fmt.Sprint("a", i), cs[0])
			cr.comes(fmt.Sprint("b", i), cs[1])
			if i < 2 {
				cr.comes(fmt.Sprint("c", i), cs[2]) // whose callers have a place each
			}
		}
		if got := w.owners(); !slices.Equal(got, []string{"0", "1", "2", "2"}) {
			t.Errorf("places of %q", got)
		}
		for _, c := range cs[:2] {
			if _, err := c.TryLock(w.Context(), "k"); !errors.Is(err, hasp.ErrHeld) {
				t.Errorf("TryLock: %v", err)
			}
		}
		time.Sleep(window / 2) // so that nobody knows any more that the key was sought
		ps[0].proxy.Commands()
		free()
		cr.want("a0 a1 a2 a3 b0 b1 b2 b3 c0 c1 a4 a5 a6 a7 b4 b5 b6 b7 a8 b8")
		scripts := 0
		for _, cmd := range ps[0].proxy.Commands() {
			if strings.HasPrefix(cmd, "eval") {
				scripts++
			}
		}
		if want := 5; scripts != want { // the first place had been taken
			t.Errorf("%d scripts, want %d", scripts, want)
		}
		w.empty("all were served")
	})
}

// Without turns, and with one, every caller has its own place.
func TestOneTurnIsTheOrderOfArrival(t *testing.T) {
	for _, turns := range []int{0, 1} {
		inWorld(t, func(w *world) {
			free, cs, _ := w.clients(turns, turns)
			cr := &crowd{w: w}
			var want []string
			for i := range 12 {
				want = append(want, fmt.Sprint(i))
				cr.comes(want[i], cs[i/3%2])
			}
			free()
			cr.want(strings.Join(want, " "))
		})
	}
}

// A fence is a place's, so who asks for one has the key for one turn only.
func TestFencesRiseOverTurns(t *testing.T) {
	inWorld(t, func(w *world) {
		free, cs, _ := w.clients(8, 8)
		cr := &crowd{w: w}
		for i := range 5 {
			cr.comes(fmt.Sprint("a", i), cs[0], hasp.WithFence())
			cr.comes(fmt.Sprint("b", i), cs[1], hasp.WithFence())
		}
		cr.comes("a5", cs[0])
		cr.comes("a6", cs[0])
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

// Whoever waits in the driver and gives up leaves the place to the next in
// line, at no cost.
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
					if _, err := cs[0].Lock(ctx, "k", opts...); !errors.Is(err, hasp.ErrHeld) {
						w.Errorf("who gave up: %v", err)
					}
				})
				w.settle()
				cr.comes("b0", cs[1])
				cr.comes("a1", cs[0], hasp.WithMaxWait(time.Minute))
				ps[0].proxy.Commands()
				if how == "context" {
					cancel()
				}
				quitter.Wait()
				cancel()
				w.settle()
				for _, cmd := range ps[0].proxy.Commands() {
					if strings.HasPrefix(cmd, "eval") {
						t.Errorf("it cost %q", cmd)
					}
				}
				if got := w.owners(); !slices.Equal(got, []string{"0", "1"}) {
					t.Errorf("places of %q", got)
				}
				cr.comes("a2", cs[0])
				time.Sleep(3 * window) // the place is kept alive
				free()
				cr.want("a1 a2 b0")
				w.empty("all were served")
			})
		})
	}
}

// A place is for what it was taken for: who wants something else takes a new
// one, and the old one is given up.
func TestPlaceIsNotLeftToAnotherKindOfCaller(t *testing.T) {
	inWorld(t, func(w *world) {
		free, cs, _ := w.clients(4, 4)
		cr := &crowd{w: w}
		cr.comes("a0", cs[0], hasp.WithMaxWait(time.Second))
		cr.comes("b0", cs[1])
		cr.comes("a1", cs[0], hasp.WithTTL(2*time.Minute))
		time.Sleep(time.Second)
		w.settle()
		if got := w.owners(); !slices.Equal(got, []string{"1", "0"}) {
			t.Errorf("places of %q", got)
		}
		free()
		cr.want("b0 a1")
		w.empty("all were served")
	})
}

func TestNothingRemainsOfPlacesThatNobodyWants(t *testing.T) {
	inWorld(t, func(w *world) {
		free, cs, _ := w.clients(4)
		cr := &crowd{w: w}
		for i := range 3 {
			cr.comes(fmt.Sprint(i), cs[0], hasp.WithMaxWait(time.Duration(i+1)*time.Second))
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

// The grant of a place may come while nobody waits in it.
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

// An outage is not mistaken for a key that is held, and a place is not kept
// through one that was not ridden out.
func TestTurnsInAnOutage(t *testing.T) {
	inWorld(t, func(w *world) {
		free, cs, _ := w.clients(4)
		cr := &crowd{w: w}
		cr.comes("a0", cs[0])
		cr.comes("a1", cs[0])
		w.v.Mini.SetError("LOADING it is out")
		time.Sleep(time.Second)
		w.v.Mini.SetError("")
		time.Sleep(window)
		free()
		cr.want("a0 a1")
		w.empty("the outage was ridden out")
	})
}

// A process that dies in a row costs what is left of the term, as every
// holder that dies, and no two have the key at once.
func TestProcessThatDiesInARow(t *testing.T) {
	inWorld(t, func(w *world) {
		free, cs, ps := w.clients(4, 4)
		var last time.Time // when the first process had the key
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				lease, err := cs[0].Lock(w.Context(), "k")
				if err != nil {
					return // it takes no place any more
				}
				time.Sleep(taking)
				ps[0].proxy.Down()
				last = time.Now()
				if lease.Unlock(w.Context()); lease.Err() == nil {
					t.Error("held after Unlock")
				}
			})
			w.settle()
		}
		cr := &crowd{w: w}
		cr.comes("b0", cs[1])
		cr.comes("b1", cs[1])
		free()
		began := time.Now()
		cr.want("b0 b1")
		if took := time.Since(began); took > window+10*taking {
			t.Errorf("served after %v", took)
		}
		wg.Wait()
		if took := last.Sub(began); took != 4*taking {
			t.Errorf("the row of the dead lasted %v", took)
		}
	})
}

// However short the holds, the processes have the key for as many turns as
// the others, and so do their callers.
func TestSharesOfTurns(t *testing.T) {
	inWorld(t, func(w *world) {
		const callers, rounds = 64, 8
		free, cs, _ := w.clients(8, 8, 8, 8)
		shares := make([]int, callers)
		var mu sync.Mutex // guards total, shares
		total := 0
		var wg sync.WaitGroup
		for i := range callers {
			wg.Go(func() {
				for more := true; more; {
					lease, err := cs[i%len(cs)].Lock(w.Context(), "k")
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					total++
					more = total < callers*rounds
					shares[i]++
					mu.Unlock()
					time.Sleep(taking)
					if err := lease.Unlock(w.Context()); err != nil {
						t.Error(err)
					}
				}
			})
		}
		w.settle()
		free()
		wg.Wait()
		synctest.Wait()
		if least, most := slices.Min(shares), slices.Max(shares); least < rounds-1 || most > rounds+1 {
			t.Errorf("shares from %d to %d: %v", least, most, shares)
		}
		w.empty("all have had their share")
	})
}
