package pubsublock_test

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
			u := "pubsublock+" + srv.URL() + "?ttl=2m&prefix=app:&fence_ttl=2h&channel=free"
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
			sub := r.rdb.Subscribe(t.Context(), "free:{app:k}")
			defer sub.Close()
			if _, err := sub.Receive(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := lease.Unlock(t.Context()); err != nil || lease.Fence() == 0 {
				t.Errorf("unlock: %v, fence %d", err, lease.Fence())
			}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			if m, err := sub.ReceiveMessage(ctx); err != nil || m.Payload != "0" {
				t.Errorf("the release was told as %v, %v", m, err)
			}
		})
	}
}

// The same by a Config, as it comes out of a file.
func TestOpenByConfig(t *testing.T) {
	srv := redistest.Start(t, nil)
	c, err := hasp.Config{Strategy: "pubsublock", Nodes: []string{srv.URL()}, Params: hasp.Params{"ttl": "5s"}}.Open(t.Context(), nil)
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
		{"pubsublock://localhost:6379", true, []string{"redis://user:password@host:port/db"}},
		{"pubsublock://", true, []string{"0 nodes", "pubsublock+redis://localhost:6379"}},
		{"pubsublock+http://joe:hunter2@h", true, []string{"redis://"}},
		{"pubsublock+redis://joe:hunter2@h:port", true, []string{"port"}},
		{"pubsublock+redis://joe:hunter2@a,b", true, []string{"one host"}},
		{"pubsublock+redis://joe:hunter2@h?fence_tll=1h", true, []string{"fence_tll", "fence_ttl"}},
		{"pubsublock+redis://joe:hunter2@h?fence_ttl=soon", true, []string{"fence_ttl", "720h"}},
		{"pubsublock+redis://joe:hunter2@h?fence_ttl=1us", true, []string{"fence_ttl"}},
		{"pubsublock+redis://joe:hunter2@h?channel={x}", true, []string{"channel", "brace"}},
		{"pubsublock+redis://joe:hunter2@h?ca=/x", true, []string{"rediss://"}},
		{"pubsublock+redis://joe:hunter2@" + srv.Addr + "?timeout=20s", false, []string{srv.Addr, "WRONGPASS", "check user and password"}},
		{"pubsublock+rediss://joe:hunter2@" + srv.Addr + "?timeout=1s", false, []string{srv.Addr, "TLS"}},
		{"pubsublock+redis://joe:hunter2@127.0.0.1:1?timeout=20s", false, []string{"127.0.0.1:1", "connection refused"}},
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
		for _, want := range append(c.want, "hasp: open pubsublock: ") {
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
	_, err := hasp.Config{Strategy: "pubsublock", Nodes: []string{"redis://joe:hunter2@a", "redis://b"}}.Open(context.Background(), nil)
	if !errors.Is(err, hasp.ErrInvalid) || !strings.Contains(err.Error(), "2 nodes") || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("got %v", err)
	}
}
