package redlock

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/strategytest"
)

// kept is want, and the records that were kept end at c.KeepUntil.
func (tr trial) kept(t *testing.T, what string, c backend.Claim, on string) {
	t.Helper()
	tr.want(t, what, c, on)
	end := time.Until(c.KeepUntil)
	for i, v := range tr.vs {
		if ttl := v.Mini.TTL("k"); on[i] == 'k' && (ttl < end-time.Millisecond || ttl > end+10*time.Millisecond) {
			t.Errorf("%s: node %d keeps the key for %v, want %v", what, i, ttl, end)
		}
	}
}

// keeps fails the test unless another caller learns who had the key, and for how long it is kept.
func (tr trial) keeps(t *testing.T, d *driver, c backend.Claim) {
	t.Helper()
	var refused *backend.HeldError
	err := ask(t, d, aClaim("k"))
	if !errors.As(err, &refused) || refused.Owner != c.Owner || refused.RetryAfter > time.Until(c.KeepUntil)+10*time.Millisecond {
		t.Errorf("acquire: got %+v (%v)", refused, err)
	}
}

// A minority that misses the release keeps the old record, which no late call prolongs to
// a hold, and which blocks no caller at the end of the keep. The release reaches it when it is
// back, with what is left then.
func TestKeepThatAMinorityMisses(t *testing.T) {
	for back, then := range map[time.Duration]string{2 * time.Second: "kkkkk", 7 * time.Second: "-----"} {
		held(t, 5, func(t *testing.T, tr trial, c backend.Claim) {
			other := tr.direct(t)
			tr.each("13", down)
			c = strategytest.Kept(c, 5*time.Second)
			tr.release(t, tr.d, c)
			tr.kept(t, "released", c, "kxkxk")
			for _, d := range []*driver{tr.d, other} {
				wants(t, "late renewal", renewOne(d, c), backend.ErrLost)
			}
			tr.kept(t, "after a late renewal", c, "kxkxk")
			tr.keeps(t, other, c)

			// The next caller gets the key at the end of the keep, although the minority has the
			// old record for longer.
			next := aClaim("k")
			w := startWait(t.Context(), other, next)
			time.Sleep(back)
			if then == "-----" {
				synctest.Wait()
				select {
				case <-w.done:
					tr.release(t, other, next)
				default:
					t.Errorf("%v after the release the next caller still waits", back)
				}
			}
			tr.each("13", up)
			time.Sleep(2 * time.Second)
			tr.kept(t, fmt.Sprint("back after ", back), c, then)
			w.took(t)
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
		tr.kept(t, "afterwards", c, "kkk")
		time.Sleep(5 * time.Second)
		tr.kept(t, "in the end", c, "---")
	})
}

// MaxTTL bounds the terms of holds. A key may be kept for longer after its release.
func TestKeepAboveMaxTTL(t *testing.T) {
	const keep = 12 * time.Hour
	fresh(t, 3, &Options{MaxTTL: time.Minute}, func(t *testing.T, tr trial) {
		c := aClaim("k")
		tr.acquire(t, tr.d, c)
		c = strategytest.Kept(c, keep)
		tr.release(t, tr.d, c)
		time.Sleep(keep - time.Second)
		tr.keeps(t, tr.d, c)
		time.Sleep(time.Second + 10*time.Millisecond)
		tr.acquire(t, tr.d, aClaim("k"))
	})
}
