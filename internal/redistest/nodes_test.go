package redistest

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/redis/go-redis/v9"
)

// runID returns the ID of the server's run.
func runID(t *testing.T, rdb redis.UniversalClient) string {
	t.Helper()
	info, err := rdb.Info(t.Context(), "server").Result()
	if err != nil {
		t.Fatal(err)
	}
	_, id, _ := strings.Cut(info, "\nrun_id:")
	id, _, ok := strings.Cut(id, "\r\n")
	if !ok || len(id) != 40 {
		t.Fatalf("no run_id in %q", info)
	}
	return id
}

func TestVirtualServersRestart(t *testing.T) {
	for _, data := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			v := Virtual(t)
			rdb := v.Client()
			rdb.Set(t.Context(), "k", "v", 0)
			time.Sleep(90 * time.Second)
			if info := rdb.Info(t.Context()).Val(); !strings.Contains(info, "\nuptime_in_seconds:90\r\n") {
				t.Errorf("after 90 s: %q", info)
			}
			sha := rdb.ScriptLoad(t.Context(), "return 1").Val()
			id := runID(t, rdb)
			v.Kill()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := rdb.Ping(ctx).Err(); err == nil {
				t.Error("a dead server answers")
			}
			v.Start(data)
			if err := rdb.EvalSha(t.Context(), sha, nil).Err(); !redis.HasErrorPrefix(err, "NOSCRIPT") {
				t.Errorf("a script survives: %v", err)
			}
			if n := rdb.Exists(t.Context(), "k").Val(); n == 1 != data {
				t.Errorf("data %v: key is there: %d", data, n)
			}
			if runID(t, rdb) == id {
				t.Error("the same run_id after a restart")
			}
			if info := rdb.Info(t.Context()).Val(); !strings.Contains(info, "\nuptime_in_seconds:0\r\n") {
				t.Errorf("after a restart: %q", info)
			}
		})
	}
}

// Miniredis holds its locks while it writes. A goroutine that waits for one of them
// stops the time of the bubble, so a slow client must not make it wait.
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
			if _, err := sub.Receive(t.Context()); err != nil {
				t.Fatal(err)
			}
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
			for range 11 { // and what the ping brings
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
