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
		"late":          func(p *faultproxy.Proxy) { p.Delay(time.Minute) },
		"hangs":         (*faultproxy.Proxy).Stall,
		"hears no more": func(p *faultproxy.Proxy) { p.Fail("ping", faultproxy.HangReply) },
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
				if n, err := rdb.Publish(t.Context(), "news", "x").Result(); n != 1 || err != nil {
					t.Errorf("%s: %d, %v", name, n, err)
				}
			}

			if took := time.Since(began); took > 0 {
				t.Errorf("%s: to publish took %v", name, took)
			}
			if name != "late" {
				return
			}

			for range 11 { // 10 messages and the reply to the ping
				if _, err := sub.Receive(t.Context()); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}

			if took := time.Since(began); took != time.Minute {
				t.Errorf("%s: heard after %v", name, took)
			}
		})
	}
}
