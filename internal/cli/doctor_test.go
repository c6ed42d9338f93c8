//go:build unix

package cli

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestDoctor(t *testing.T) {
	t.Parallel()
	const pw = "pw-of-this-test"
	s := redistest.Start(t, redistest.Real)
	kept := redistest.Start(t, &redistest.Options{Args: []string{"--appendonly", "yes", "--appendfsync", "always"}})
	host, port, _ := net.SplitHostPort(s.Addr)
	replica := redistest.Start(t, &redistest.Options{Args: []string{"--replicaof", host, port}})
	rdb := s.Client()
	await.Until(t, "the replica is in step", func() bool { return rdb.Wait(t.Context(), 1, time.Second).Val() == 1 })
	must(t, rdb.Do(t.Context(), "acl", "setuser", "app", "on", ">"+pw, "+set", "+info", "+eval", "+evalsha", "+getrange", "+pttl", "+pexpire", "+del", "~app:*").Err())
	spinlock := func(s *redistest.Server) string { return "spinlock+" + s.URL() + "?timeout=20s" }
	app := strings.Replace(spinlock(s), "redis://", "redis://app:"+pw+"@", 1)
	all := []string{"ok    version of redis " + s.Addr, "ok    role and memory", "ok    clock", "ok    rights: the user may do all", "ok    latency"}
	for _, c := range []struct {
		name string
		url  string
		set  string // a setting of s and its value
		code int
		says []string
	}{
		{"a plain server", spinlock(s), "", 0, append(all, "warn  persistence", "no append-only file",
			"warn  replication", "Set replicas=1", "warn  min-replicas")},
		{"replicas that confirm", spinlock(s) + "&replicas=1", "min-replicas-to-write 1", 0, []string{"ok    replication", "of 1 replicas, 1 must confirm"}},
		{"an append-only file", spinlock(kept), "", 0, []string{"ok    persistence", "appendfsync always", "ok    replication"}},
		{"a replica", spinlock(replica), "", exitFailed, []string{"bad   role or memory", "it is a replica of " + s.Addr}},
		{"few rights", app + "&prefix=app:", "", 0,
			[]string{"warn  fence", "NOPERM", "warn  inspect", "lists the rights"}},
		{"no rights", app, "", exitFailed, []string{"bad   rights", "NOPERM"}},
		{"a quorum", "redlock+" + redistest.StartNodes(t, 3, nil).URL() + "?timeout=20s", "", 0, []string{"ok    clock", "ok    rights"}},
		{"files", store(t), "", 0, []string{"ok    rights", "ok    latency"}},
		{"eviction", spinlock(s), "maxmemory-policy allkeys-lru", exitFailed, []string{"bad   role or memory", "allkeys-lru (set noeviction"}},
		{"eviction that is allowed", spinlock(s) + "&allow_eviction=true", "", 0, []string{"warn  memory", "allkeys-lru"}},
	} {
		if setting, value, ok := strings.Cut(c.set, " "); ok {
			must(t, rdb.ConfigSet(t.Context(), "maxmemory", "1gb").Err())
			must(t, rdb.ConfigSet(t.Context(), setting, value).Err())
		}
		o := runHasp(t, c.url, "doctor")
		if o.code != c.code || strings.Contains(o.out+o.err, pw) {
			t.Errorf("%s: exit code %d, want %d\n%s%s", c.name, o.code, c.code, o.out, o.err)
		}
		contains(t, o.out, c.says...)
		isGood := c.name == "a quorum" || c.name == "an append-only file"
		if isGood && strings.Contains(o.out, "warn") {
			t.Errorf("%s: %s", c.name, o.out)
		}
	}
}
