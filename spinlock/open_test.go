package spinlock_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestOpenByURL(t *testing.T) {
	for name, o := range map[string]*redistest.Options{
		"plain": {Own: true}, "user": {User: "ann", Password: "p@ss/w%rd?&"}, "tls": {TLS: true, Password: "x"}, "socket": {Unix: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := redistest.Start(t, o)
			u := "spinlock+" + srv.URL() + "?ttl=2m&prefix=app:&fence_ttl=2h"
			if srv.CAFile != "" {
				u += "&ca=" + srv.CAFile
			}
			c, err := hasp.Open(t.Context(), u, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			lease, err := c.Lock(t.Context(), "k", hasp.WithFence())
			if err != nil {
				t.Fatal(err)
			}
			r := rig{rdb: srv.Client()}
			if left := r.left(t, "app:k"); left <= time.Minute || left > 2*time.Minute {
				t.Errorf("app:k has %v left", left)
			}
			if left := r.left(t, "hasp:{app:k}:fence:app:k"); left <= 110*time.Minute || left > 2*time.Hour {
				t.Errorf("the counter has %v left", left)
			}
			if err := lease.Unlock(t.Context()); err != nil || lease.Fence() == 0 {
				t.Errorf("unlock: %v, fence %d", err, lease.Fence())
			}
		})
	}
}

// The same by a Config, as it comes out of a file.
func TestOpenByConfig(t *testing.T) {
	srv := redistest.Start(t, nil)
	c, err := hasp.Config{Strategy: "spinlock", Nodes: []string{srv.URL()}, Params: hasp.Params{"ttl": "5s"}}.Open(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

func TestOpenTellsWhatIsWrong(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Password: "right"})
	for _, c := range []struct {
		url     string
		invalid bool
		want    []string
	}{
		{"spinlock://localhost:6379", true, []string{"redis://user:password@host:port/db"}},
		{"spinlock://", true, []string{"0 nodes", "spinlock+redis://localhost:6379"}},
		{"spinlock+http://joe:hunter2@h", true, []string{"redis://"}},
		{"spinlock+redis://joe:hunter2@h:port", true, []string{"port"}},
		{"spinlock+redis://joe:hunter2@a,b", true, []string{"one host"}},
		{"spinlock+redis-sentinel://joe:hunter2@a,b", true, []string{"name of the master"}},
		{"spinlock+redis-cluster://joe:hunter2@a,b/1", true, []string{"no databases"}},
		{"spinlock+redis-cluster://joe:hunter2@a,b?sentinel_password=hunter2", true, []string{"redis-sentinel://"}},
		{"spinlock+redis-cluster://joe:hunter2@127.0.0.1:1,127.0.0.1:2?timeout=20s", false, []string{"none of 2 nodes answers", "connection refused"}},
		{"spinlock+redis-sentinel://joe:hunter2@127.0.0.1:1,127.0.0.1:2/m?timeout=20s", false, []string{"none of 2 sentinels answers", "connection refused"}},
		{"spinlock+redis://joe:hunter2@h?replicas=few", true, []string{"replicas"}},
		{"spinlock+redis://joe:hunter2@h?fence_tll=1h", true, []string{"fence_tll", "fence_ttl"}},
		{"spinlock+redis://joe:hunter2@h?fence_ttl=soon", true, []string{"fence_ttl", "720h"}},
		{"spinlock+redis://joe:hunter2@h?fence_ttl=1us", true, []string{"fence_ttl"}},
		{"spinlock+redis://joe:hunter2@h?ca=/x", true, []string{"rediss://"}},
		{"spinlock+redis://joe:hunter2@" + srv.Addr + "?timeout=20s", false, []string{srv.Addr, "WRONGPASS", "check user and password"}},
		{"spinlock+rediss://joe:hunter2@" + srv.Addr + "?timeout=1s", false, []string{srv.Addr, "TLS"}},
		{"spinlock+redis://joe:hunter2@127.0.0.1:1?timeout=20s", false, []string{"127.0.0.1:1", "connection refused"}},
	} {
		began := time.Now()
		_, err := hasp.Open(t.Context(), c.url, nil)
		if err == nil {
			t.Errorf("%s: no error", c.url)
			continue
		}
		t.Log(err)
		if errors.Is(err, hasp.ErrInvalid) != c.invalid {
			t.Errorf("%s: ErrInvalid: %v", err, !c.invalid)
		}
		for _, want := range append(c.want, "hasp: open spinlock: ") {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q does not say %q", err, want)
			}
		}
		if strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q tells the password, or is not one line", err)
		}
		if d := time.Since(began); d > 15*time.Second {
			t.Errorf("%s: took %v", err, d)
		}
	}
}

func TestConfigNamesOneNode(t *testing.T) {
	_, err := hasp.Config{Strategy: "spinlock", Nodes: []string{"redis://joe:hunter2@a", "redis://b"}}.Open(context.Background(), nil)
	if !errors.Is(err, hasp.ErrInvalid) || !strings.Contains(err.Error(), "2 nodes") || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("got %v", err)
	}
}
