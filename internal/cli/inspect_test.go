package cli

import (
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/cli/ui"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestInspect(t *testing.T) {
	t.Parallel()
	url := store(t)
	runHasp(t, url, "inspect", "key").shows(t, "free")
	hold(t, url, "--fence")
	runHasp(t, url, "inspect", "key").shows(t,
		`"key"`, "held", "/hasp run sh\"", "ago)", "left, unless it is renewed", "fence")
	var s struct {
		Key string
		backend.Status
	}
	runHasp(t, url, "inspect", "key", "--json").want(t, 0).decode(t, &s)
	if s.Key != "key" || !s.Held || s.Fence == 0 || s.TTL <= 0 || time.Since(s.Since) > time.Hour {
		t.Errorf("%+v", s)
	}
}

func TestStatus(t *testing.T) {
	t.Parallel()
	for want, s := range map[string]backend.Status{
		"\nfence   7\n":      {Held: true, Owner: "me", Fence: 7},
		"\nlast fence   7\n": {Fence: 7}, // the store may still know the fence of the last hold
		"without an end":     {Held: true, Owner: "me", TTL: -1},
		`waiter 2   "next"`:  {Waiters: []string{"first", "next"}},
	} {
		var b strings.Builder
		must(t, printStatus(&b, "key", s, nil, 0))
		contains(t, b.String(), want)
	}
}

func TestInspectShowsSlots(t *testing.T) {
	t.Parallel()
	url := store(t)
	runHasp(t, url, "inspect", "key", "--check").want(t, exitFailed)
	runHasp(t, url, "inspect", "key", "--check", "--slots", "1").want(t, exitFailed)
	hold(t, url, "--slots", "1")
	runHasp(t, url, "inspect", "key").shows(t, "free", "slots    1 held", "slot 0", `held by "`)
	runHasp(t, url, "inspect", "key", "--slots", "2").shows(t, "slots    1 of 2 held", "slot 0")
	runHasp(t, url, "inspect", "key", "--check", "--slots", "2").want(t, exitFailed)
	for _, args := range [][]string{{"key#0"}, {"key", "--slots", "1"}} {
		runHasp(t, url, append([]string{"inspect", "--check"}, args...)...).want(t, 0).prints(t, "")
	}
	var s struct{ Slots map[int]backend.Status }
	runHasp(t, url, "inspect", "key", "--json").want(t, 0).decode(t, &s)
	if len(s.Slots) != 1 || s.Slots[0].Owner == "" {
		t.Errorf("%+v", s)
	}
}

func TestBreak(t *testing.T) {
	t.Parallel()
	url := store(t)
	runHasp(t, url, "break", "key").shows(t, `"key" is free`)
	hold(t, url, "--ttl", "10m")
	runHasp(t, url, "break", "key").refused(t, exitUsage, "--force breaks it without a question")
	lock(t, url, exitNotAcquired, "--no-wait")
	breakKey(t, url)
	lock(t, url, 0, "--no-wait")
}

// Any value under a key counts as a hold, even if another application has written it. inspect says
// that it is not a lock of hasp, and only --force deletes it.
func TestForeignValueIsNotBrokenWithoutForce(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, nil)
	rdb := s.Client()
	url := redisURL(t, s)
	for kind, put := range map[string]func(key string) error{
		"a string with a term": func(key string) error { return rdb.Set(t.Context(), key, "value", time.Hour).Err() },
		"a list":               func(key string) error { return rdb.LPush(t.Context(), key, "value").Err() },
		"a PERSISTed hold": func(key string) error {
			return rdb.Set(t.Context(), key, "AAAAAAAAAAAAAAAAAAAAAA#owner", 0).Err()
		},
	} {
		key := t.Name() + ":" + kind
		must(t, put(key))
		call("inspect", "--url", url, kind).shows(t, "held", "not a record of this strategy")
		call("inspect", "--url", url, kind, "--json").shows(t, `"foreign": true`)
		call("break", "--url", url, kind).refused(t, exitUsage, "--force deletes it")
		if rdb.Exists(t.Context(), key).Val() != 1 {
			t.Errorf("break deleted %s", kind)
		}
		call("break", "--url", url, kind, "--force").want(t, 0)
		if shown := call("inspect", "--url", url, kind).want(t, 0).out; !strings.Contains(shown, "free") || strings.Contains(shown, "record") {
			t.Errorf("after the break of %s:\n%s", kind, shown)
		}
	}
}

func TestSameHold(t *testing.T) {
	t.Parallel()
	now := time.Now()
	a := backend.Status{Held: true, Owner: "a", Since: now, TTL: 5, Fence: 1}
	renewed := a
	renewed.TTL = 9
	for b, want := range map[*backend.Status]bool{
		&renewed: true,
		{Held: true, Owner: "b", Since: now, Fence: 1}:                            false,
		{Held: true, Owner: "a", Since: now.Add(2 * time.Millisecond), Fence: 1}:  true,
		{Held: true, Owner: "a", Since: now.Add(20 * time.Millisecond), Fence: 1}: false,
		{Held: true, Owner: "a", Since: now, Fence: 2}:                            false,
		{}: false,
	} {
		if got := ui.SameHold(a, *b); got != want {
			t.Errorf("%+v and %+v are the same hold: %v, want %v", a, *b, got, want)
		}
	}
}
