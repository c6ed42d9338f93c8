package strategytest

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// OpenByURL proves that a URL leads to every kind of server, with its
// parameters.
func (s Strategy) OpenByURL(t *testing.T) {
	for name, o := range map[string]*redistest.Options{
		"plain": {Own: true}, "user": {User: "ann", Password: "p@ss/w%rd?&"}, "tls": {TLS: true, Password: "x"}, "socket": {Unix: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := redistest.Start(t, o)
			u := s.Name + "+" + srv.URL() + "?ttl=2m&prefix=app:&fence_ttl=2h"
			if srv.CAFile != "" {
				u += "&ca=" + srv.CAFile
			}
			c, err := hasp.Open(t.Context(), u, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			lease := Lock(t, c, hasp.WithFence())
			r := rig{Redis: srv.Client()}
			if left := r.Left(t, "app:k"); left <= time.Minute || left > 2*time.Minute {
				t.Errorf("app:k has %v left", left)
			}
			if left := r.Left(t, "hasp:{app:k}:fence:app:k"); left <= 110*time.Minute || left > 2*time.Hour {
				t.Errorf("the counter has %v left", left)
			}
			if err := lease.Unlock(t.Context()); err != nil || lease.Fence() == 0 {
				t.Errorf("unlock: %v, fence %d", err, lease.Fence())
			}
		})
	}
}

// OpenByConfig proves that a Config opens what a URL opens.
func (s Strategy) OpenByConfig(t *testing.T) {
	srv := redistest.Start(t, nil)
	c, err := hasp.Config{Strategy: s.Name, Nodes: []string{srv.URL()}, Params: hasp.Params{"ttl": "5s"}}.Open(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	Want(t, "close", c.Close(), nil)
}

// OpenErrors proves that an error of Open says what is wrong, in one line and
// without the password.
func (s Strategy) OpenErrors(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Password: "right"})
	for _, c := range []struct {
		url     string // without the name of the strategy
		invalid bool
		want    []string
	}{
		{"://localhost:6379", true, []string{"redis://user:password@host:port/db"}},
		{"://", true, []string{"0 nodes", s.Name + "+redis://localhost:6379"}},
		{"+http://joe:hunter2@h", true, []string{"redis://"}},
		{"+redis://joe:hunter2@h:port", true, []string{"port"}},
		{"+redis://joe:hunter2@a,b", true, []string{"one host"}},
		{"+redis-sentinel://joe:hunter2@a,b", true, []string{"name of the master"}},
		{"+redis-cluster://joe:hunter2@a,b/1", true, []string{"no databases"}},
		{"+redis-cluster://joe:hunter2@a,b?sentinel_password=hunter2", true, []string{"redis-sentinel://"}},
		{"+redis-cluster://joe:hunter2@127.0.0.1:1,127.0.0.1:2?timeout=20s", false, []string{"none of 2 nodes can be used", "connection refused"}},
		{"+redis-sentinel://joe:hunter2@127.0.0.1:1,127.0.0.1:2/m?timeout=20s", false, []string{"none of 2 sentinels can be used", "connection refused"}},
		{"+redis://joe:hunter2@h?replicas=few", true, []string{"replicas"}},
		{"+redis://joe:hunter2@h?fence_tll=1h", true, []string{"fence_tll", "fence_ttl"}},
		{"+redis://joe:hunter2@h?fence_ttl=soon", true, []string{"fence_ttl", "720h"}},
		{"+redis://joe:hunter2@h?fence_ttl=1us", true, []string{"fence_ttl"}},
		{"+redis://joe:hunter2@h?ca=/x", true, []string{"rediss://"}},
		{"+redis://joe:hunter2@" + srv.Addr + "?timeout=20s", false, []string{srv.Addr, "WRONGPASS", "check user and password"}},
		{"+rediss://joe:hunter2@" + srv.Addr + "?timeout=1s", false, []string{srv.Addr, "TLS"}},
		{"+redis://joe:hunter2@127.0.0.1:1?timeout=20s", false, []string{"127.0.0.1:1", "connection refused"}},
	} {
		s.openError(t, s.Name+c.url, c.invalid, c.want)
	}
	for url, want := range s.BadURLs {
		s.openError(t, s.Name+url, true, want)
	}
}

func (s Strategy) openError(t *testing.T, url string, invalid bool, wants []string) {
	t.Helper()
	began := time.Now()
	_, err := hasp.Open(t.Context(), url, nil)
	wants = append(wants, "hasp: open "+s.Name+": ")
	for range 3 {
		if lacks(err, wants) == "" {
			break
		}
		// On a slow machine a call may time out a moment before its cause is known.
		_, err = hasp.Open(t.Context(), url, nil)
	}
	if err == nil {
		t.Errorf("%s: no error", url)
		return
	}
	t.Log(err)
	if errors.Is(err, hasp.ErrInvalid) != invalid {
		t.Errorf("%s: ErrInvalid: %v", err, !invalid)
	}
	if want := lacks(err, wants); want != "" {
		t.Errorf("%q does not contain %q", err, want)
	}
	if strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "\n") {
		t.Errorf("%q contains the password, or is not one line", err)
	}
	if d := time.Since(began); d > 15*time.Second {
		t.Errorf("%s: took %v", err, d)
	}
}

// lacks returns the first of these texts that err does not contain, or "".
func lacks(err error, texts []string) string {
	for _, text := range texts {
		if err == nil || !strings.Contains(err.Error(), text) {
			return text
		}
	}
	return ""
}

// ConfigWithTwoNodes proves that a Config with two nodes is refused.
func (s Strategy) ConfigWithTwoNodes(t *testing.T) {
	_, err := hasp.Config{Strategy: s.Name, Nodes: []string{"redis://joe:hunter2@a", "redis://b"}}.Open(context.Background(), nil)
	if !errors.Is(err, hasp.ErrInvalid) || !strings.Contains(err.Error(), "2 nodes") || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("got %v", err)
	}
}
