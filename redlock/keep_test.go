package redlock

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/strategytest"
)

// kept is want, and the records that were kept end at c.KeepUntil.
func (tr trial) kept(c backend.Claim, on string) {
	tr.Helper()
	tr.want(c, on)
	end := time.Until(c.KeepUntil)
	for i, v := range tr.vs {
		if ttl := v.Mini.TTL("k"); on[i] == 'k' && (ttl < end-time.Millisecond || ttl > end+10*time.Millisecond) {
			tr.Errorf("node %d keeps the key for %v, want %v", i, ttl, end)
		}
	}
}

// keeps fails the test unless another caller learns who had the key, and for how long it is kept.
func (cr caller) keeps(c backend.Claim) {
	cr.Helper()
	var refused *backend.HeldError
	err := cr.ask(aClaim("k"))
	if !errors.As(err, &refused) || refused.Owner != c.Owner || refused.RetryAfter > time.Until(c.KeepUntil)+10*time.Millisecond {
		cr.Errorf("acquire: got %+v (%v)", refused, err)
	}
}

// A minority that misses the release keeps the old record, which no late call prolongs to
// a hold, and which blocks no caller at the end of the keep. The release reaches it when it is
// back, with what is left then.
func TestKeepThatAMinorityMisses(t *testing.T) {
	for back, then := range map[time.Duration]string{2 * time.Second: "kkkkk", 7 * time.Second: "-----"} {
		held(t, 5, func(tr trial, c backend.Claim) {
			other := tr.direct()
			tr.each("13", down)
			c = strategytest.Kept(c, 5*time.Second)
			tr.release(c)
			tr.kept(c, "kxkxk") // released
			tr.lost(c)          // as a late renewal says
			other.lost(c)
			tr.kept(c, "kxkxk")
			other.keeps(c)

			// The next caller gets the key at the end of the keep, although the minority has the
			// old record for longer.
			next := aClaim("k")
			w := other.startWait(tr.Context(), next)
			time.Sleep(back)
			if then == "-----" {
				synctest.Wait()
				select {
				case <-w.done:
					other.release(next)
				default:
					tr.Errorf("%v after the release the next caller still waits", back)
				}
			}
			tr.each("13", up)
			time.Sleep(2 * time.Second)
			tr.kept(c, then)
			w.took()
		})
	}
}
