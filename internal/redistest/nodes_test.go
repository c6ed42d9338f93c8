package redistest

import (
	"context"
	"slices"
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

func TestNodesKnowNothingOfEachOther(t *testing.T) {
	for _, kind := range []string{"process", "inprocess"} {
		t.Run(kind, func(t *testing.T) {
			if _, err := choose(kind, true); err != nil {
				t.Skip(err)
			}
			t.Setenv(Env, kind)
			ns := StartNodes(t, 3, &Options{Password: "p@ss"})
			all := ns.Clients()
			var ids []string
			for i, rdb := range all {
				if err := rdb.Set(t.Context(), "k"+string(rune('0'+i)), "v", 0).Err(); err != nil {
					t.Fatal(err)
				}
				ids = append(ids, runID(t, rdb))
			}
			if ids[0] == ids[1] || ids[1] == ids[2] || ids[2] == ids[0] {
				t.Errorf("some are the same: %q", ids)
			}
			keys, err := ns.Keys(t.Context())
			if err != nil || len(keys) != 3 || !slices.Equal(keys[0], []string{"k0"}) || !slices.Equal(keys[2], []string{"k2"}) {
				t.Errorf("keys: %q, %v", keys, err)
			}
			for _, u := range []string{ns.URL(), ns.Direct()} {
				if strings.Count(u, ",127.0.0.1:") != 2 || !strings.HasPrefix(u, "redis://:p%40ss@127.0.0.1:") {
					t.Errorf("URL %s", u)
				}
			}
			if ns.URL() == ns.Direct() {
				t.Error("no proxies")
			}
		})
	}
}

// Virtual nodes have all that redlock relies on.
func TestVirtualNodesDoWhatRealOnesDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		vs := VirtualNodes(t, 3)
		all := vs.Clients()
		first := all[0].(*redis.Client)
		if other := all[1].(*redis.Client); first.Options().Addr == other.Options().Addr || runID(t, first) == runID(t, other) {
			t.Error("two nodes are the same")
		}
		inScript, err := first.Eval(t.Context(), "return redis.call('info', 'server')", nil).Text()
		if err != nil || !strings.Contains(inScript, runID(t, first)) {
			t.Errorf("info in a script: %q, %v", inScript, err)
		}

		pipe := first.Pipeline()
		set := pipe.SetNX(t.Context(), "k", "v", 10*time.Second)
		again := pipe.SetNX(t.Context(), "k", "w", time.Hour)
		get := pipe.Get(t.Context(), "k")
		none := pipe.Get(t.Context(), "none")
		if _, err := pipe.Exec(t.Context()); err != redis.Nil {
			t.Errorf("pipeline: %v", err)
		}
		if !set.Val() || again.Val() || get.Val() != "v" || none.Err() != redis.Nil {
			t.Errorf("pipeline: %v, %v, %v, %v", set, again, get, none)
		}

		vs[1].Skew(-time.Hour)
		for i, want := range []time.Time{time.Now(), time.Now().Add(-time.Hour)} {
			if got := all[i].Time(t.Context()).Val(); !got.Equal(want) {
				t.Errorf("node %d says that it is %v, want %v", i, got, want)
			}
			sec, err := all[i].Eval(t.Context(), "return redis.call('time')[1] + 0", nil).Int64()
			if err != nil || sec != want.Unix() {
				t.Errorf("node %d says in a script that it is %v, %v, want %v", i, sec, err, want.Unix())
			}
		}
	})
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
