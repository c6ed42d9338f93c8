package redistest

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
)

// miniredis holds its locks while it writes. Another goroutine that waits for such a lock stops the
// time of the bubble. So a client that does not read must not block a write.
func TestAVirtualServerWaitsForNoClient(t *testing.T) {
	for name, slow := range map[string]func(*faultproxy.Proxy){
		"late":             func(p *faultproxy.Proxy) { p.Delay(time.Minute) },
		"hangs":            (*faultproxy.Proxy).Stall,
		"receives no more": func(p *faultproxy.Proxy) { p.Fail("ping", faultproxy.HangReply) },
	} {
		synctest.Test(t, func(t *testing.T) {
			v := Virtual(t)
			sub := v.Client().Subscribe(t.Context(), "news")
			defer sub.Close()
			await.Value(sub.Receive(t.Context()))
			slow(v.Proxy)
			go sub.Ping(t.Context())
			synctest.Wait()

			began := time.Now()
			rdb := v.Direct()
			for range 10 {
				await.Value(rdb.Publish(t.Context(), "news", "x").Result())
			}
			if took := time.Since(began); took > 0 {
				t.Errorf("%s: to publish took %v", name, took)
			}
			if name == "late" {
				await.Value(sub.Receive(t.Context()))
				if took := time.Since(began); took != time.Minute {
					t.Errorf("received after %v", took)
				}
			}
		})
	}
}
