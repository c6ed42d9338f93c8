package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/cmd/hasp/internal/text"
	"github.com/hasplock/hasp/internal/redistest"
)

// escape is an owner that would clear a terminal and imitate a line of hasp's.
const escape = "\x1b[2J\u202ehasp: all is well"

// line locks "key" on url as the owner "first", and lets owners wait for it, in
// order. At the end of the test, all of them have left.
func line(t *testing.T, url string, owners ...string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	open := func(owner string) *hasp.Client {
		c, err := hasp.Open(ctx, url, &hasp.Options{Owner: owner})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	first := open("first")
	lease, err := first.Lock(ctx, "key", hasp.WithTTL(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	t.Cleanup(func() {
		cancel()
		for range owners {
			<-ended
		}
		if err := lease.Unlock(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
		first.Close()
	})

	for i, owner := range owners {
		c := open(owner)
		go func() {
			_, err := c.Lock(ctx, "key")
			c.Close()
			ended <- err
		}()
		for began := time.Now(); ; time.Sleep(time.Millisecond) {
			s, err := first.Inspect(ctx, "key")
			if err == nil && len(s.Waiters) == i+1 {
				break
			}
			if time.Since(began) > patience {
				t.Fatalf("waiter %d is not in the queue: %+v, %v", i+1, s, err)
			}
		}
	}
}

// queueURL is the URL of a store with a queue, which processes can share.
func queueURL(t *testing.T) string {
	t.Helper()
	return "fairlock+" + redistest.Start(t, nil).URL() + "?prefix=" + t.Name() + ":"
}

func TestInspectShowsTheLine(t *testing.T) {
	t.Parallel()
	inProcess := "memlock://" + t.Name()
	redis := queueURL(t)
	for url, inspect := range map[string]func(args ...string) outcome{
		inProcess: func(args ...string) outcome { return call(append(args, "--url", inProcess)...) },
		redis:     func(args ...string) outcome { return runHasp(t, redis, args...) },
	} {
		owners := []string{"second", escape, "fourth"}
		line(t, url, owners...)

		shown := inspect("inspect", "key").want(t, 0).out
		if strings.ContainsAny(shown, "\x1b\u202e") {
			t.Errorf("raw: %q", shown)
		}
		at := strings.Index(shown, `"first"`)
		for i, owner := range owners {
			next := strings.Index(shown, fmt.Sprintf("waiter %d   %s", i+1, text.Quote(owner)))
			if next < at || at < 0 {
				t.Errorf("waiter %d of %q is not in its place:\n%s", i+1, owners, shown)
			}
			at = next
		}

		var s backend.Status
		shown = inspect("inspect", "key", "--json").want(t, 0).out
		if err := json.Unmarshal([]byte(shown), &s); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(shown, "\x1b") || !s.Held || s.Owner != "first" || !slices.Equal(s.Waiters, owners) {
			t.Errorf("got %+v, want waiters %q, from:\n%s", s, owners, shown)
		}
	}
}

// All workers would have the owner that the URL asks for.
func TestDemoShowsTheLine(t *testing.T) {
	t.Parallel()
	o := runHasp(t, queueURL(t)+"&owner=me", "demo", "--workers", "4", "--increments", "10", "--work", "4ms", "--ttl", "3s").want(t, 0)
	contains(t, o.out, "; in line: ")
	contains(t, o.out, "ok: the number is 40")
	if strings.Contains(o.out, "; waiting: ") {
		t.Errorf("waiters of a queue are shown without their order:\n%s", o.out)
	}
}
