package redistest

import (
	"errors"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
)

func TestChoose(t *testing.T) {
	t.Setenv("PATH", t.TempDir()) // no redis-server here
	t.Setenv(ServerEnv, "")
	for _, c := range []struct {
		asked string
		own   bool
		want  string
	}{
		{"", false, "inprocess"}, {"container", false, "inprocess"}, {"inprocess", true, "inprocess"},
		{"process", false, "!process"}, {"redis://h:1", false, "redis://h:1"}, {"redis://h:1", true, "inprocess"},
		{"docker", false, "!want"},
	} {
		got, err := choose(c.asked, c.own)
		if want, wantErr := strings.CutPrefix(c.want, "!"); wantErr {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%q: got %q, %v; want an error about %q", c.asked, got, err, want)
			}
		} else if got != c.want || err != nil {
			t.Errorf("%q: got %q, %v; want %q", c.asked, got, err, c.want)
		}
	}
}

func TestRestartLosesDataAndScriptsUnlessKept(t *testing.T) {
	for _, of := range []struct {
		kind string
		keep bool
	}{{"process", false}, {"process", true}, {"inprocess", false}, {"inprocess", true}} {
		kind, keep := of.kind, of.keep
		t.Run(kind, func(t *testing.T) {
			if _, err := choose(kind, true); err != nil {
				t.Skip(err)
			}
			t.Setenv(Env, kind)
			s := Start(t, &Options{Own: true, Keep: keep})
			o := s.ClientOptions()
			o.DialerRetries, o.MaxRetries = 1, -1
			rdb := redis.NewClient(o)
			defer rdb.Close()
			rdb.Set(t.Context(), "k", "v", 0)
			sha, err := rdb.ScriptLoad(t.Context(), "return 1").Result()
			if err != nil {
				t.Fatal(err)
			}
			s.Kill()
			if err := rdb.Ping(t.Context()).Err(); err == nil {
				t.Error("a dead server answers")
			}
			s.Restart()
			if _, err := rdb.Get(t.Context(), "k").Result(); errors.Is(err, redis.Nil) == keep {
				t.Errorf("keep %v: get: %v", keep, err)
			}
			s.Kill()
			if err := s.Start(false); err != nil {
				t.Fatal(err)
			}
			if _, err := rdb.Get(t.Context(), "k").Result(); !errors.Is(err, redis.Nil) {
				t.Errorf("keep %v: without data: get: %v", keep, err)
			}
			if err := rdb.EvalSha(t.Context(), sha, nil).Err(); !redis.HasErrorPrefix(err, "NOSCRIPT") {
				t.Errorf("a script survives: %v", err)
			}
		})
	}
}
