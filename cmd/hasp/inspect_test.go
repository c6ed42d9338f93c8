package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

func TestInspect(t *testing.T) {
	t.Parallel()
	url := store(t)
	contains(t, runHasp(t, url, "inspect", "key").want(t, 0).out, "free")
	holder := startHasp(t, url, "run", "key", "--fence", "--", "cat")
	if _, err := holder.in.Write([]byte("ready\n")); err != nil {
		t.Fatal(err)
	}
	holder.out.expect("ready")
	o := runHasp(t, url, "inspect", "key").want(t, 0)
	for _, want := range []string{`"key"`, "held", "/hasp run cat\"", "ago)", "left, unless it is renewed", "fence"} {
		contains(t, o.out, want)
	}
	var s struct {
		Key string
		backend.Status
	}
	o = runHasp(t, url, "inspect", "key", "--json").want(t, 0)
	if err := json.Unmarshal([]byte(o.out), &s); err != nil {
		t.Fatalf("%v in:\n%s", err, o.out)
	}
	if s.Key != "key" || !s.Held || s.Fence == 0 || s.TTL <= 0 || time.Since(s.Since) > time.Hour {
		t.Errorf("%+v", s)
	}
}

func TestStatusShowsNothingRaw(t *testing.T) {
	t.Parallel()
	const evil = "\x1b[2J\r\nhasp: all is well\u202e"
	var b bytes.Buffer
	err := printStatus(&b, evil, backend.Status{Held: true, Owner: evil, Since: time.Now(), TTL: -1, Waiters: []string{evil, "next"}})
	if err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(b.String(), "\x1b\r\u202e") || strings.Contains(b.String(), "\nhasp:") {
		t.Errorf("raw: %q", b.String())
	}
	for _, want := range []string{"without an end", "waiter 1", `waiter 2   "next"`} {
		contains(t, b.String(), want)
	}
}

func TestBreak(t *testing.T) {
	t.Parallel()
	url := store(t)
	contains(t, runHasp(t, url, "break", "key").want(t, 0).out, `"key" is free`)
	holder := startHasp(t, url, "run", "key", "--ttl", "10m", "--", "cat")
	if _, err := holder.in.Write([]byte("ready\n")); err != nil {
		t.Fatal(err)
	}
	holder.out.expect("ready")
	runHasp(t, url, "break", "key").refused(t, exitUsage, "--force breaks it without a question")
	runHasp(t, url, "run", "key", "--no-wait", "--", "true").want(t, exitNotAcquired)
	runHasp(t, url, "break", "key", "--force").want(t, 0)
	runHasp(t, url, "run", "key", "--no-wait", "--", "true").want(t, 0)
}

// A person who says yes means the holder they were told of.
func TestSameHold(t *testing.T) {
	t.Parallel()
	now := time.Now()
	a := backend.Status{Held: true, Owner: "a", Since: now, TTL: 5, Fence: 1}
	b := a
	b.TTL = 9
	if !sameHold(a, b) {
		t.Error("a renewal made another hold of it")
	}
	for _, b := range []backend.Status{
		{Held: true, Owner: "b", Since: now, Fence: 1},
		{Held: true, Owner: "a", Since: now.Add(1), Fence: 1},
		{Held: true, Owner: "a", Since: now, Fence: 2},
		{},
	} {
		if sameHold(a, b) {
			t.Errorf("%+v is the hold of %+v", b, a)
		}
	}
}
