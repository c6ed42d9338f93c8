package redlock

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/strategytest"
)

// keepsTerms is a term that no test outlasts: a record that is gone was released, and
// has not expired.
const keepsTerms = 90 * time.Second

// nothingLeft fails the test if a node has a record that no client holds any more.
func (tr trial) nothingLeft() {
	tr.Helper()
	for i, v := range tr.vs {
		for _, key := range v.Mini.Keys() {
			if key != markKey && !strings.Contains(key, "}:fence:") {
				tr.Errorf("%s on node %d", key, i)
			}
		}
	}
}

// A vote that arrives late does not outlast a Break by the driver that asked for it.
func TestBreakEndsVotesInFlight(t *testing.T) {
	three(t, func(tr trial) {
		cr := tr.another() // asks for the mark first, so its vote is requested late
		tr.each("2", delay(500*time.Millisecond))
		c := aClaim("k")
		c.TTL = keepsTerms
		cr.acquire(c)
		tr.each("2", delay(0))
		await.Must(tr, cr.Break(tr.Context(), "k"))
		time.Sleep(5 * time.Second)
		tr.nothingLeft()

		tr.each("2", delay(500*time.Millisecond))
		began := time.Now()
		await.Must(tr, cr.Break(tr.Context(), "k"))
		if time.Since(began) < 500*time.Millisecond {
			tr.Error("Break did not wait for the slow node, which could remove a later record")
		}
	})
}

// A program that ends right after its Unlock leaves no record, because Close waits
// for the votes of slow nodes and for their release.
func TestCloseLeavesNothing(t *testing.T) {
	for _, end := range []struct {
		key   string
		after time.Duration // when the caller leaves
		want  error
	}{
		{"k", time.Hour, nil},
		{"held", time.Hour, hasp.ErrHeld},
		{"k", 3 * time.Millisecond, context.DeadlineExceeded},
	} {
		for _, n := range []int{3, 5} {
			for _, slow := range []time.Duration{5 * time.Millisecond, 200 * time.Millisecond} {
				for _, fresh := range []bool{true, false} {
					t.Run(fmt.Sprintf("%v, %d nodes, %v, fresh %v", end.want, n, slow, fresh), func(t *testing.T) {
						t.Parallel()
						try(t, n, func(tr trial) {
							majority := "01234"[:n/2+1]
							tr.elsewhere(majority, "held")
							cr := tr.caller
							if fresh {
								cr = tr.another()
							}
							for i, v := range tr.vs {
								v.Proxy.Delay(time.Duration(i) * slow)
							}
							c := await.Value(hasp.New(cr.driver, nil))
							ctx, cancel := context.WithTimeout(tr.Context(), end.after)
							defer cancel()
							lease, err := c.TryLock(ctx, end.key)
							tr.wants("lock", err, end.want)
							if err == nil {
								strategytest.Unlock(tr.T, lease)
							}
							c.Close()
							tr.lose(majority, "held")
							tr.nothingLeft()
						})
					})
				}
			}
		}
	}
}

// An outage leaves a goroutine for each record that may be on a node, and none for the attempts that
// follow, because they do not ask the nodes. When the nodes answer again, the records are released.
func TestAnOutageLeavesFewGoroutines(t *testing.T) {
	three(t, func(tr trial) {
		tr.each("012", func(v *server) { v.Proxy.StallReplies() })
		attempts := func(n int) {
			var wg sync.WaitGroup
			for i := range n {
				wg.Go(func() {
					c := aClaim(fmt.Sprint("k", i))
					c.TTL = keepsTerms
					tr.isUnclear(tr.ask(c)) // no node answers
				})
			}
			wg.Wait()
		}
		attempts(10)
		attempts(1000)
		for range 10 {
			time.Sleep(3 * time.Second)
			synctest.Wait()
			if left := running(); len(left) > 3*10+20 {
				tr.Fatalf("%d goroutines, such as\n%s", len(left), left[0])
			}
		}

		tr.each("012", flow)
		time.Sleep(5 * time.Second)
		tr.nothingLeft()
	})
}

// The driver forgets holds that expired without a Release, as those of programs that
// leave a lock to its term.
func TestExpiredHoldsAreForgotten(t *testing.T) {
	three(t, func(tr trial) {
		for range 200 {
			c := aClaim("k")
			tr.acquire(c)
			time.Sleep(c.TTL + c.Timeout + time.Millisecond)
		}
		synctest.Wait()
		if n := len(tr.hs.byToken); n > 100 {
			tr.Errorf("the driver remembers %d holds of 200 that expired", n)
		}
	})
}
