package redlock

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

// kept is want, and the records that were kept end in left.
func (tr trial) kept(t *testing.T, what string, c backend.Claim, on string, left time.Duration) {
	t.Helper()
	tr.want(t, what, c, on)
	for i, v := range tr.vs {
		if ttl := v.Mini.TTL(c.Key); on[i] == 'k' && (ttl < left-time.Millisecond || ttl > left+10*time.Millisecond) {
			t.Errorf("%s: node %d keeps the key for %v, want %v", what, i, ttl, left)
		}
	}
}

// A minority that misses the release keeps the old record, which no late call prolongs to
// a hold, and which blocks no caller at the end of the keep. The release reaches it when it is
// back, with what is left then.
func TestKeepThatAMinorityMisses(t *testing.T) {
	for _, back := range []time.Duration{2 * time.Second, 7 * time.Second} {
		held(t, 5, func(t *testing.T, tr trial, c backend.Claim) {
			other := tr.direct(t, nil)
			tr.each("13", func(v *redistest.VirtualServer) { v.Proxy.Down() })
			c = strategytest.Kept(c, 5*time.Second)
			tr.release(t, tr.d, c)
			tr.kept(t, "released", c, "kxkxk", 5*time.Second)
			for _, d := range []*driver{tr.d, other} {
				strategytest.Want(t, "late renewal", renewOne(d, c, time.Second), backend.ErrLost)
			}
			tr.kept(t, "after a late renewal", c, "kxkxk", time.Until(c.KeepUntil))

			var refused *backend.HeldError
			if _, err := other.Acquire(t.Context(), aClaim("k")); !errors.As(err, &refused) || refused.Owner != c.Owner {
				t.Errorf("acquire: got %+v (%v)", refused, err)
			}

			// The next caller gets the key at the end of the keep, although the minority has the
			// old record for longer.
			next := aClaim("k")
			w := startWait(t.Context(), other, next)
			time.Sleep(back)
			if back > 5*time.Second {
				select {
				case <-w.done:
					tr.release(t, other, next)
				default:
					t.Errorf("%v after the release the next caller still waits", back)
				}
			}
			tr.each("13", func(v *redistest.VirtualServer) { v.Proxy.Up() })
			time.Sleep(2 * time.Second)
			if back < 5*time.Second {
				tr.kept(t, "when they are back", c, "kkkkk", time.Until(c.KeepUntil))
			} else {
				tr.kept(t, "when they are back after the keep", c, "-----", 0)
			}
			<-w.done
			if w.err != nil {
				t.Errorf("the next caller: %v", w.err)
			}
		})
	}
}

// A repair that is on its way when the hold is released writes the old record after the
// release. The driver waits for the repair, and then writes the record that keeps the key.
func TestKeepAfterARepairOnItsWay(t *testing.T) {
	held(t, 3, func(t *testing.T, tr trial, c backend.Claim) {
		tr.lose("0", "k")
		holdNext(tr.vs[0].Proxy, c.Token+"#"+c.Owner, 300*time.Millisecond)
		tr.renews(t, "with two of three", c)
		synctest.Wait()
		c = strategytest.Kept(c, 5*time.Second)
		tr.release(t, tr.d, c)
		time.Sleep(time.Second)
		tr.kept(t, "afterwards", c, "kkk", 4*time.Second)
		time.Sleep(5 * time.Second)
		tr.kept(t, "in the end", c, "---", 0)
	})
}

// MaxTTL bounds the terms of holds. A key may be kept for longer after its release.
func TestKeepAboveMaxTTL(t *testing.T) {
	const keep = 12 * time.Hour
	try(t, 3, &Options{MaxTTL: time.Minute}, func(t *testing.T, tr trial) {
		c := await.Value(hasp.New(tr.direct(t, &Options{MaxTTL: time.Minute}), nil))
		defer c.Close()
		await.Must(t, strategytest.Lock(t, c, hasp.WithMinHold(keep)).Unlock(t.Context()))
		time.Sleep(keep - time.Second)
		var refused *backend.HeldError
		if _, err := tr.d.Acquire(t.Context(), aClaim("k")); !errors.As(err, &refused) || refused.RetryAfter > time.Second {
			t.Errorf("a second before the end: got %+v (%v)", refused, err)
		}
		time.Sleep(time.Second + 10*time.Millisecond)
		tr.acquire(t, tr.d, aClaim("k"))
	})
}
