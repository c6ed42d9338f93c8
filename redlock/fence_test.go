package redlock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
)

// fencing is a run of holders, one after another, whose fences are to grow.
type fencing struct {
	t       *testing.T
	rnd     *rand.Rand
	vs      redistest.VirtualServers
	drivers []*Driver
	away    []bool
	last    uint64
	holds   int
	refused int
}

const fenceTTL = 10 * time.Second // and max_ttl

func newFencing(t *testing.T, seed uint64, n, clients int, maxTTL time.Duration) *fencing {
	f := &fencing{t: t, rnd: rand.New(rand.NewPCG(seed, 1)), vs: redistest.VirtualNodes(t, n), away: make([]bool, n)}
	for range clients {
		d := New(f.vs.Clients(), &Options{MaxTTL: maxTTL})
		t.Cleanup(func() { d.Close() })
		f.drivers = append(f.drivers, d)
	}
	return f
}

// hold has a client take the key, if the nodes let it, and give it back.
func (f *fencing) hold(d *Driver) bool {
	f.t.Helper()
	f.holds++
	c := backend.Claim{Key: "k", Token: fmt.Sprint("token", f.holds), TTL: time.Second, Timeout: time.Second, Fenced: true}
	ctx, cancel := context.WithTimeout(f.t.Context(), c.Timeout)
	defer cancel()
	g, err := d.Acquire(ctx, c)
	if err != nil {
		f.refused++
		if errors.Is(err, backend.ErrHeld) {
			time.Sleep(c.TTL) // what is left of an earlier one
		}
		return false
	}
	if g.Fence <= f.last {
		f.t.Errorf("hold %d has fence %d after %d", f.holds, g.Fence, f.last)
	}
	f.last = g.Fence
	_ = d.Release(f.t.Context(), c)
	return true
}

// shuffle has a random minority be away, and all others be there.
func (f *fencing) shuffle() {
	n := len(f.vs)
	minority := f.rnd.IntN(n/2 + 1)
	gone := f.rnd.Perm(n)[:minority]
	next := make([]bool, n)
	for _, i := range gone {
		next[i] = true
	}
	for i, v := range f.vs {
		switch {
		case next[i] && !f.away[i]:
			v.Proxy.Down()
		case !next[i] && f.away[i]:
			v.Proxy.Up()
		}
	}
	f.away = next
}

// another is a driver that has used no node yet.
func (f *fencing) another() *Driver {
	d := New(f.vs.Clients(), &Options{MaxTTL: fenceTTL})
	f.t.Cleanup(func() { d.Close() })
	return d
}

func (f *fencing) any() *Driver { return f.drivers[f.rnd.IntN(len(f.drivers))] }

// round has some holders in a row.
func (f *fencing) round() {
	for range 1 + f.rnd.IntN(4) {
		f.hold(f.any())
		time.Sleep(time.Duration(f.rnd.IntN(2000)) * time.Microsecond)
	}
}

func TestFencesGrowOverAnyMajoritiesThroughClocksThatDiffer(t *testing.T) {
	t.Parallel()
	for seed := range uint64(4) {
		synctest.Test(t, func(t *testing.T) {
			f := newFencing(t, seed, []int{3, 5}[seed%2], 3, fenceTTL)
			f.hold(f.drivers[0])
			for range 40 {
				f.shuffle()
				if i := f.rnd.IntN(len(f.vs)); f.rnd.IntN(2) == 0 {
					f.vs[i].Skew(time.Duration(f.rnd.Int64N(int64(20*time.Minute))) - 10*time.Minute)
				}
				f.round()
			}
			if got := f.holds - f.refused; got < 40 {
				t.Errorf("seed %d: %d holds of %d tries are too few to tell", seed, got, f.holds)
			}
			t.Logf("seed %d: %d holds, %d refused", seed, f.holds-f.refused, f.refused)
		})
	}
}

func TestFencesGrowThroughMinoritiesThatAreRestarted(t *testing.T) {
	t.Parallel()
	for seed := range uint64(4) {
		synctest.Test(t, func(t *testing.T) {
			f := newFencing(t, seed, []int{3, 5}[seed%2], 3, fenceTTL)
			f.hold(f.drivers[0])
			for range 16 {
				f.shuffle()
				f.round()
				emptied := f.rnd.IntN(len(f.vs)/2 + 1)
				for _, i := range f.rnd.Perm(len(f.vs))[:emptied] {
					f.vs[i].Restart(f.rnd.IntN(2) == 0)
					f.away[i] = false
				}
				f.round()
				// Those that were restarted are found out, and vote again.
				for i, v := range f.vs {
					v.Proxy.Up()
					f.away[i] = false
				}
				for _, d := range f.drivers {
					f.hold(d)
				}
				time.Sleep(fenceTTL + time.Second)
			}
			if got := f.holds - f.refused; got < 40 {
				t.Errorf("seed %d: %d holds of %d tries are too few to tell", seed, got, f.holds)
			}
			t.Logf("seed %d: %d holds, %d refused", seed, f.holds-f.refused, f.refused)
		})
	}
}

// Two majorities, of one node with a clock that is fast and of one with a clock
// that is slow, have but the third in common.
func TestAFenceIsRaisedWhereTheNextHolderHearsOfIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFencing(t, 0, 3, 1, fenceTTL)
		f.hold(f.drivers[0])
		f.vs[0].Skew(time.Hour)
		f.vs[2].Skew(-time.Hour)
		for range 3 {
			for _, out := range []int{2, 0} {
				f.vs[out].Proxy.Down()
				if !f.hold(f.another()) {
					t.Error("a majority does not do")
				}
				f.vs[out].Proxy.Up()
				time.Sleep(2 * time.Second) // the release has reached all
			}
		}
	})
}

func TestAFenceThatIsNoneIsToldAndLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFencing(t, 0, 3, 1, fenceTTL)
		d := f.drivers[0]
		f.hold(d)
		const counter = "hasp:{k}:fence:k"
		for _, v := range f.vs[:2] {
			v.Mini.Set(counter, "somebody's")
		}
		c := backend.Claim{Key: "k", Token: "t", TTL: time.Second, Timeout: time.Second, Fenced: true}
		_, err := d.Acquire(t.Context(), c)
		if err == nil || errors.Is(err, backend.ErrHeld) {
			t.Errorf("got %v, want an outage", err)
		}
		for _, v := range f.vs[:2] {
			if got, _ := v.Mini.Get(counter); got != "somebody's" {
				t.Errorf("it is %q now", got)
			}
		}
		f.vs[0].Mini.Del(counter)
		time.Sleep(2 * time.Second)
		if !f.hold(d) {
			t.Error("one node whose fence is none is in the way")
		}
	})
}
