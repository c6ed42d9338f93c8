package cli

import (
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

const evil = "\x1b[2J\r\nhasp: all is well\u202e\u009b"

// someEntries returns locks of every kind, as they are at the time now.
func someEntries(now time.Time) []backend.Entry {
	held := func(key, owner string, age, left time.Duration, fence uint64, waiters ...string) backend.Entry {
		return backend.Entry{Key: key, Status: backend.Status{Held: true, Owner: owner, Since: now.Add(-age), TTL: left, Fence: fence, Waiters: waiters}}
	}
	return []backend.Entry{
		held("backup", "db1/4711/hasp run ./backup.sh", 75*time.Second, 29400*time.Millisecond, 1795458000123456, "a", "b"),
		held("mail#0", "web1/12/mailer", 3*time.Second, 8*time.Second, 0),
		{Key: "report", Status: backend.Status{Held: true, Shared: []string{"r2", "r1"}, TTL: time.Minute}},
		{Key: "wanted", Status: backend.Status{Waiters: []string{"w"}}},
		{Key: "java", Status: backend.Status{Held: true, TTL: -1, Waiters: []string{"w"}}},
		held(evil, evil, time.Second, time.Second, 1, evil),
		held("", "  spaces  ", time.Second, time.Second, 0),
	}
}

func TestTableOfLocks(t *testing.T) {
	now := time.Now()
	var b strings.Builder
	must(t, table(&b, someEntries(now)[:5], now))
	contains(t, b.String(), "KEY     OWNER", "AGE    LEFT    FENCE             WAITERS\n", "1m15s  29s     1795458000123456  2\n",
		"mail#0  web1/12/mailer", "3s     8s      -                 -\n",
		"report  (2 shared) r1, r2", "-      1m0s", "wanted  (free)", "java    (not of this strategy)", "no end")
}

// One long key does not make every line of the table as long, and JSON tells keys apart that are not
// UTF-8.
func TestLsOfLongAndBinaryKeys(t *testing.T) {
	all := []backend.Entry{{Key: strings.Repeat("x", 1e6)}, {Key: "a\xff"}, {Key: "a\xfe"},
		{Key: "tick", Status: backend.Status{Held: true, Owner: "me", Kept: true}}}
	var b strings.Builder
	must(t, table(&b, all, time.Now()))
	if n := b.Len(); n > 5000 {
		t.Errorf("the table has %d bytes", n)
	}
	contains(t, b.String(), "me (min hold)")

	b.Reset()
	must(t, (&app{out: &b}).printLines(all[1:]))
	contains(t, b.String(), `"key_base64":"Yf8="`, `"key_base64":"Yf4="`, `{"key":"tick","held":true`)
}

// A key or an owner may be any bytes. Only printable ones reach the terminal.
func TestNothingIsShownRaw(t *testing.T) {
	t.Parallel()
	now := time.Now()
	status := backend.Status{Held: true, Owner: evil, Since: now.Add(-time.Minute), Waiters: []string{evil}, Shared: []string{evil}}
	for what, print := range map[string]func(*app) error{
		"inspect":        func(a *app) error { return printStatus(a.out, evil, status, map[int]backend.Status{0: status}, 0) },
		"inspect --json": func(a *app) error { return a.printJSON("  ", status) },
		"ls":             func(a *app) error { return table(a.out, someEntries(now), now) },
		"ls --json":      func(a *app) error { return a.printLines(someEntries(now)) },
	} {
		var b strings.Builder
		must(t, print(&app{out: &b}))
		raw := func(c rune) bool { return c != '\n' && (c < ' ' || c > '~') }
		if strings.ContainsFunc(b.String(), raw) || strings.Contains(b.String(), "\nhasp:") {
			t.Errorf("%s: raw: %q", what, b.String())
		}
	}
}

func TestLs(t *testing.T) {
	t.Parallel()
	url := store(t)
	runHasp(t, url, "ls", "--json").want(t, 0).prints(t, "")
	runHasp(t, url, "ls").shows(t, "KEY  OWNER")
	hold(t, url, "--fence")
	runHasp(t, url, "ls").shows(t, "\nkey  ", "/hasp run sh ")

	var e backend.Entry // decode fails if there is more than one
	runHasp(t, url, "ls", "k", "--json").want(t, 0).decode(t, &e)
	if e.Key != "key" || !e.Held || e.Fence == 0 || e.TTL <= 0 || e.Owner == "" {
		t.Errorf("got %+v", e)
	}
	for _, args := range [][]string{{"x"}, {"--waiting"}} {
		runHasp(t, url, append([]string{"ls", "--json"}, args...)...).want(t, 0).prints(t, "")
	}
}
