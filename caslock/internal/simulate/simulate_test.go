// Package simulate runs drivers of caslock over a store in memory with faults, in virtual time. Its
// tests find planted bugs that the conformance suite has missed.
package simulate

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/memkv"
	"github.com/hasplock/hasp/internal/await"
)

var (
	seeds = flag.Uint64("seeds", 100, "how many seeds TestSimulation runs")
	first = flag.Uint64("first", 0, "the first seed")
)

const (
	key = "key"
	ttl = time.Second
)

// world is one seed: a store, some drivers and callers, and what must be true of them.
type world struct {
	t       *testing.T
	store   *memkv.Store
	drivers []backend.Driver
	faults  bool // the store has faults
	quick   bool // most calls take no time
	twice   bool // calls are repeated
	stale   bool // reads are stale, so only the driver of a hold renews and releases it

	mu    sync.Mutex // guards the fields below
	r     *rand.Rand
	holds map[string]hold   // by token, of callers that trust a hold
	gone  map[string]string // tokens that hold nothing, and which answer has said so
	ever  map[string]bool   // tokens that were in a record, and values that were written
	fence uint64            // the largest in a record so far
	count int               // grants
}

type hold struct {
	until  time.Time
	shared bool
}

func (w *world) failf(format string, args ...any) { w.t.Errorf("broken: "+format, args...) }

// n returns a random number below most.
func (w *world) n(most int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.r.IntN(most)
}

// pause returns a random time below most.
func (w *world) pause(most time.Duration) time.Duration { return time.Duration(w.n(int(most))) }

// fault is the Fault of the store.
func (w *world) fault(op string) (f memkv.Fault) {
	if !w.faults {
		return f
	}
	if !w.quick {
		f.Request, f.Reply = w.pause(2*time.Millisecond), w.pause(2*time.Millisecond)
	}
	switch w.n(16) {
	case 0:
		f.Request += w.pause(5 * ttl / 2) // may arrive when its caller has left, and its hold has ended
	case 1:
		f.Reply += w.pause(5 * ttl / 2) // the caller may be a process that was stopped
	case 2:
		f.Lost = true
	case 3, 4:
		f.Twice = w.twice && op == "put"
		f.Stale = w.stale && op == "get"
	}
	if f.Twice && w.n(2) == 0 {
		f.Reply += w.pause(ttl / 2)
	}
	return f
}

// written checks each record. The store calls it when it writes the record.
func (w *world) written(_ string, value []byte) {
	var r struct {
		Items []struct {
			Kind, Token string
			N           uint64 // of a new hold, it is the fence
		}
	}
	_ = json.Unmarshal(value, &r)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ever[string(value)] {
		w.failf("%s is written twice", value)
	}
	w.ever[string(value)] = true
	for _, it := range r.Items {
		if it.Kind != "exclusive" && it.Kind != "shared" {
			continue
		}
		if answer := w.gone[it.Token]; answer != "" {
			w.failf("%s holds the key after %s", it.Token, answer)
		}
		if !w.ever[it.Token] {
			w.ever[it.Token] = true
			if it.N <= w.fence {
				w.failf("%s has fence %d after %d", it.Token, it.N, w.fence)
			}
			w.fence = it.N
		}
	}
}

// begin checks that a caller that is granted the key is alone, and reports whether it came in time.
func (w *world) begin(c backend.Claim, g backend.Grant) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	if !now.Before(g.Until) {
		return false // the engine releases a grant that comes too late
	}
	for token, h := range w.holds {
		if now.Before(h.until) && !(h.shared && c.Shared) {
			w.failf("%s is granted the key %v before the end of %s", c.Token, h.until.Sub(now), token)
		}
	}
	w.holds[c.Token] = hold{g.Until, c.Shared}
	w.count++
	return true
}

// trusted returns how long token may trust its hold. It is not positive when the hold has ended.
func (w *world) trusted(token string) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Until(w.holds[token].until)
}

// ended notes that token holds nothing, after this answer; "" that it may hold the key again.
func (w *world) ended(token, answer string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gone[token] = answer
}

// any returns a driver for a call about a hold of d.
func (w *world) any(d backend.Driver) backend.Driver {
	if w.stale || w.n(4) > 0 {
		return d
	}
	return w.drivers[w.n(len(w.drivers))]
}

// within calls f with a context that ends after a random time.
func (w *world) within(f func(ctx context.Context) error) error {
	most := []time.Duration{50 * time.Millisecond, ttl / 2, 3 * ttl}[w.n(3)]
	ctx, cancel := context.WithTimeout(context.Background(), most)
	defer cancel()
	return f(ctx)
}

// caller takes the key, renews it and gives it back or dies, until end.
func (w *world) caller(name string, d backend.Driver, end time.Time) {
	c := backend.Claim{Key: key, TTL: ttl, Timeout: ttl, Fenced: true}
	for i := 0; time.Now().Before(end); i++ {
		if c.Token == "" || w.n(2) == 0 {
			c.Token, c.Shared, c.WillRetry = fmt.Sprint(name, "-", i), w.n(5) == 0, w.n(2) == 0
		}
		w.ended(c.Token, "")
		var g backend.Grant
		err := w.within(func(ctx context.Context) (err error) { g, err = d.Acquire(ctx, c); return err })
		switch {
		case errors.Is(err, backend.ErrHeld):
			w.ended(c.Token, "ErrHeld")
			time.Sleep(w.pause(ttl / 4))
			continue // perhaps with the same token, as a driver that waits
		case err == nil && w.begin(c, g):
			w.work(c, w.any(d))
		}
		token, unknown := c.Token, err != nil
		c.Token = ""
		if w.n(5) == 0 {
			time.Sleep(w.pause(3 * ttl))
			continue // it has died, and another process comes
		}
		w.mu.Lock()
		delete(w.holds, token) // the caller stops before it releases
		w.mu.Unlock()
		for released := false; !released; {
			again := c
			again.Token = token
			if w.n(8) == 0 {
				again.KeepUntil = time.Now().Add(w.pause(ttl))
			}
			by := d // if the outcome is unknown, only its own driver knows that a request may be late
			if !unknown {
				by = w.any(d)
			}
			err := w.within(func(ctx context.Context) error { return by.Release(ctx, again) })
			if released = err == nil || errors.Is(err, backend.ErrLost); released {
				w.ended(token, fmt.Sprintf("a release that returned %v", err))
			}
		}
		time.Sleep(w.pause(ttl / 4))
	}
}

// work renews a hold some times, and returns when the work is done or the hold has ended.
func (w *world) work(c backend.Claim, d backend.Driver) {
	for range w.n(6) {
		if w.n(3) > 0 { // otherwise at once, as the next try of a renewal
			time.Sleep(w.pause(ttl / 2))
		}
		if w.trusted(c.Token) <= 0 {
			return
		}
		var g backend.Grant
		err := errors.New("no answer")
		_ = w.within(func(ctx context.Context) error {
			d.Renew(ctx, []backend.Claim{c}, func(_ int, got backend.Grant, e error) { g, err = got, e })
			return nil
		})
		rest := w.trusted(c.Token)
		if errors.Is(err, backend.ErrLost) && rest > 0 {
			w.failf("%s is lost %v before its end", c.Token, rest)
		}
		if rest <= 0 || errors.Is(err, backend.ErrLost) {
			return
		}
		w.mu.Lock()
		if h := w.holds[c.Token]; err == nil && g.Until.After(h.until) {
			h.until = g.Until
			w.holds[c.Token] = h
		}
		w.mu.Unlock()
	}
}

// run runs one seed and returns how many grants it had.
func run(t *testing.T, seed uint64) int {
	defer func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	}()
	w := &world{t: t, store: memkv.New(), r: rand.New(rand.NewPCG(seed, 0)), holds: map[string]hold{}, gone: map[string]string{}, ever: map[string]bool{}}
	w.quick, w.twice, w.stale, w.store.Hash = seed%3 == 0, seed%4 == 1, seed%4 == 2, seed%2 == 0
	w.store.Fault, w.store.Written = w.fault, w.written
	open := func() backend.Driver {
		d, err := caslock.NewDriver(context.Background(), w.store)
		await.Must(t, err)
		return d
	}
	for range 4 {
		w.drivers = append(w.drivers, open())
	}
	w.faults = true
	var wg sync.WaitGroup
	for i := range 6 {
		d := w.drivers[i%len(w.drivers)]
		wg.Go(func() { w.caller(fmt.Sprint("caller", i), d, time.Now().Add(40*ttl)) })
	}
	wg.Wait()

	// Without faults a new driver gets the key, whatever the others have left: a dead hold ends a
	// term after the driver has seen it, and late requests have arrived.
	time.Sleep(5 * ttl)
	for _, d := range w.drivers {
		await.Must(t, d.Close()) // ends the renewals in flight
	}
	w.faults = false
	d, began := open(), time.Now()
	for i := 0; ; i++ {
		if _, err := d.Acquire(context.Background(), backend.Claim{Key: key, Token: fmt.Sprint("last", i), TTL: ttl, Timeout: ttl}); err == nil {
			break
		} else if time.Since(began) > 2*ttl {
			w.failf("a new driver does not get the key in two terms: %v", err)
			break
		}
		time.Sleep(ttl / 10)
	}
	return w.count
}

// TestSimulation also checks that the seeds are no empty ones.
func TestSimulation(t *testing.T) {
	grants := 0
	for seed := *first; seed < *first+*seeds && !t.Failed(); seed++ {
		synctest.Test(t, func(t *testing.T) { grants += run(t, seed) })
	}
	if grants < int(*seeds)*20 {
		t.Errorf("%d grants in %d seeds", grants, *seeds)
	}
	t.Logf("%d grants", grants)
}
