package main

import (
	"math/rand/v2"
	"slices"
	"time"
)

// faults injects some faults, one after another, and heals each fault.
func (w *World) faults(r *rand.Rand, stay []*client) {
	upTo := func(d time.Duration) time.Duration { return time.Duration(r.Int64N(int64(d))) }
	for range r.IntN(12) {
		time.Sleep(upTo(300 * time.Millisecond))
		if w.suspends && r.IntN(4) == 0 {
			w.suspend(r)
			continue
		}
		if s, ok := w.Store.(Quorum); ok && r.IntN(8) == 0 {
			w.majority(s, r, 4*time.Second)
			continue
		}
		if r.IntN(4) == 0 {
			heal := w.silence(stay[r.IntN(len(stay))])
			most := 800 * time.Millisecond
			if r.IntN(3) == 0 {
				// long enough that the store's earlier answers no longer count
				most = 6 * time.Second
			}
			time.Sleep(upTo(most))
			heal()
			continue
		}

		w.mu.Lock() // no link is added meanwhile
		heal := w.Store.Strike(r, w.forget)
		w.mu.Unlock()
		if heal != nil {
			time.Sleep(upTo(500 * time.Millisecond))
			heal()
		}
	}
}

// hurry makes the store's clock faster than the clock of the Clients by the given part, until the
// channel over is closed.
func (w *World) hurry(fast float64, over chan struct{}) {
	const step = 20 * time.Millisecond
	for fast > 0 {
		select {
		case <-over:
			return
		case <-time.After(step):
			w.Store.Skip(time.Duration(fast * float64(step)))
		}
	}
}

// suspend lets the host of all Clients sleep. Meanwhile its goroutines and Go's clock stand still.
// Only the store's clock and the count of suspended time advance.
func (w *World) suspend(r *rand.Rand) {
	// about as long as a short term
	least := time.Duration(0)
	most := 500 * time.Millisecond
	switch r.IntN(3) {
	case 0:
		// all terms end
		least = LongTerm
		most = 2 * LongTerm
	case 1:
		if w.real { // the model does not shorten longer terms
			most = LongTerm
		}
	}

	d := least + time.Duration(r.Int64N(int64(most)))
	w.slept()
	w.Store.Skip(d)
	w.asleep.Add(int64(d))
}

// silence stops everything on the link of c until heal is called.
func (w *World) silence(c *client) (heal func()) { return w.silent(c, c.link.Silence()) }

// majority stops a majority of the servers for a while.
func (w *World) majority(s Quorum, r *rand.Rand, most time.Duration) {
	heal := w.silent(nil, s.Majority(r))
	time.Sleep(time.Duration(r.Int64N(int64(most))))
	heal()
}

// silent notes a silent span of the link of c, or of all links if c is nil. The span ends when the
// function heal is called, which also calls end.
func (w *World) silent(c *client, end func()) (heal func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.quiet[c] = append(w.quiet[c], span{from: time.Now()})
	return func() {
		w.mu.Lock()
		spans := w.quiet[c]
		spans[len(spans)-1].to = time.Now()
		w.mu.Unlock()
		end() // only after the span has ended: an answer may come in the same instant
	}
}

// unheard reports whether the store cannot have sent anything to c after the time since, because
// the link of c is silent or a majority of the servers answers no Client.
func (w *World) unheard(c *client, since time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(slices.Concat(w.quiet[c], w.quiet[nil]), func(s span) bool {
		return s.from.Before(since) && (s.to.IsZero() || time.Now().Before(s.to))
	})
}
