package redlock

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
)

// aWait is a Wait in progress.
type aWait struct {
	done chan struct{} // closed when it has returned
	err  error
}

func startWait(ctx context.Context, d *driver, c backend.Claim) *aWait {
	w := &aWait{done: make(chan struct{})}
	go func() {
		defer close(w.done)
		_, w.err = d.Wait(ctx, c)
	}()
	return w
}

// The nodes hang for longer than a third of Timeout until ctx ends the wait. Then the last
// answer, which was that the key is held, says nothing about the present.
func TestSilenceAtTheEndOfAWaitIsAnOutage(t *testing.T) {
	for _, hung := range []string{"012", "12"} { // the lead may still answer
		try(t, 3, nil, func(t *testing.T, tr trial) {
			holder := aClaim("k")
			holder.TTL = time.Minute
			tr.acquire(t, tr.d, holder)
			ctx, cancel := context.WithCancel(t.Context())
			c := aClaim("k")
			c.Timeout = 9 * time.Second
			w := startWait(ctx, tr.d, c)
			time.Sleep(3 * time.Second)
			for _, i := range hung {
				tr.vs[i-'0'].Proxy.Stall()
			}
			stalled := time.Now()
			time.Sleep(2*lookEvery + c.Timeout/3) // all nodes are asked within 2*lookEvery
			cancel()
			<-w.done
			var dated *backend.UnavailableError
			if backend.Definite(w.err) || !errors.As(w.err, &dated) || dated.Since.Before(stalled) {
				t.Errorf("%s hang: got %v, want an outage since then", hung, w.err)
			}
			for _, v := range tr.vs {
				v.Proxy.Flow()
			}
		})
	}
}

// A look that no quorum answers ends a Wait, and the engine counts the outage from that look on.
func TestAnOutageEndsAWait(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		holder := aClaim("k")
		holder.TTL = time.Minute
		tr.acquire(t, tr.d, holder)
		w := startWait(t.Context(), tr.d, aClaim("k"))
		time.Sleep(3 * time.Second)
		down := time.Now()
		tr.each("012", func(v *redistest.VirtualServer) { v.Proxy.Down() })
		<-w.done
		var dated *backend.UnavailableError
		if !errors.As(w.err, &dated) || dated.Since.Before(down) || time.Since(down) > lookEvery {
			t.Errorf("after %v: got %v, want an outage since then", time.Since(down), w.err)
		}
	})
}

// Each Break wakes the waiters, although no release came between. Now and then, waiters that
// wake at the same moment split the votes, and look again later.
func TestEachBreakWakesTheWaiters(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		holder := aClaim("k")
		holder.TTL = time.Minute
		tr.acquire(t, tr.d, holder)
		waits := map[*aWait]bool{}
		for range 8 {
			c := aClaim("k")
			c.TTL = time.Minute
			waits[startWait(t.Context(), tr.direct(t, nil), c)] = true
		}
		breaks, late := 0, 0
		for ; len(waits) > 0; breaks++ {
			time.Sleep(4 * time.Second) // a waiter looks several times
			if err := tr.d.Break(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			time.Sleep(100 * time.Millisecond)
			before := len(waits)
			for w := range waits {
				select {
				case <-w.done:
					delete(waits, w)
				default:
				}
			}
			if len(waits) == before {
				late++
			}
		}
		if late > 2 {
			t.Errorf("after %d of %d Breaks no waiter had the key soon", late, breaks)
		}
	})
}
