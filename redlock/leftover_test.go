package redlock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

// keepsTerms is a term that no test outlasts: a record that is gone was released, and
// has not expired.
const keepsTerms = 90 * time.Second

// leftOn returns the records that no client holds any more.
func leftOn(i int, keys []string) (left []string) {
	for _, key := range keys {
		if key != markKey && !strings.Contains(key, "}:fence:") {
			left = append(left, fmt.Sprintf("%s on node %d", key, i))
		}
	}
	return left
}

// nothingLeft fails the test if a node has a record.
func nothingLeft(t *testing.T, what string, vs redistest.VirtualServers) {
	t.Helper()
	for i, v := range vs {
		if left := leftOn(i, v.Mini.Keys()); len(left) > 0 {
			t.Errorf("%s: %q", what, left)
		}
	}
}

// A program that ends right after its Unlock leaves no record, because Close waits
// for the votes of slow nodes and for their release.
func TestCloseLeavesNothing(t *testing.T) {
	for name, end := range map[string]func(t *testing.T, c *hasp.Client){
		"unlocked": func(t *testing.T, c *hasp.Client) {
			strategytest.Unlock(t, strategytest.Lock(t, c))
		},
		"refused": func(t *testing.T, c *hasp.Client) {
			if _, err := c.TryLock(t.Context(), "held"); !errors.Is(err, hasp.ErrHeld) {
				t.Errorf("got %v, want ErrHeld", err)
			}
		},
		"cancelled": func(t *testing.T, c *hasp.Client) {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Millisecond)
			defer cancel()
			if _, err := c.Lock(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v, want the end of the context", err)
			}
		},
	} {
		for _, n := range []int{3, 5} {
			for _, slow := range []time.Duration{5 * time.Millisecond, 200 * time.Millisecond} {
				for _, fresh := range []bool{true, false} {
					t.Run(fmt.Sprintf("%s, %d nodes, %v, fresh %v", name, n, slow, fresh), func(t *testing.T) {
						t.Parallel()
						try(t, n, nil, func(t *testing.T, tr trial) {
							for _, v := range tr.vs[:n/2+1] {
								elsewhere(t, v, "held")
							}
							d := tr.d
							if fresh {
								d = await.Value(NewDriver(tr.vs.Clients(), nil)).(*driver)
							}
							for i, v := range tr.vs {
								v.Proxy.Delay(time.Duration(i) * slow)
							}
							c := await.Value(hasp.New(d, nil))
							end(t, c)
							c.Close()
							for i, v := range tr.vs {
								if left := leftOn(i, v.Mini.Keys()); len(left) > 0 && left[0] != fmt.Sprintf("held on node %d", i) {
									t.Errorf("after Close: %q", left)
								}
							}
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
	try(t, 3, nil, func(t *testing.T, tr trial) {
		all := func(do func(*faultproxy.Proxy)) {
			tr.each("012", func(v *redistest.VirtualServer) { do(v.Proxy) })
		}
		all((*faultproxy.Proxy).StallReplies)
		attempts := func(n int) {
			var wg sync.WaitGroup
			for i := range n {
				wg.Go(func() {
					c := aClaim(fmt.Sprint("k", i))
					c.TTL = keepsTerms
					if _, err := tr.d.Acquire(t.Context(), c); err == nil {
						t.Error("a node has answered")
					}
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
				t.Fatalf("%d goroutines, such as\n%s", len(left), left[0])
			}
		}

		all((*faultproxy.Proxy).Flow)
		time.Sleep(5 * time.Second)
		nothingLeft(t, "when the nodes are back", tr.vs)
	})
}

// The driver forgets holds that expired without a Release, as those of programs that
// leave a lock to its term.
func TestExpiredHoldsAreForgotten(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		for range 200 {
			c := aClaim("k")
			tr.acquire(t, tr.d, c)
			time.Sleep(c.TTL + c.Timeout + time.Millisecond)
		}
		tr.d.hs.mu.Lock()
		defer tr.d.hs.mu.Unlock()
		if n := len(tr.d.hs.byToken); n > 100 {
			t.Errorf("the driver remembers %d holds of 200 that expired", n)
		}
	})
}
