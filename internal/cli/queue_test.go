package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/cli/text"
	"github.com/hasplock/hasp/internal/redistest"
)

// escape is an owner that would clear a terminal and imitate a line of hasp's.
const escape = "\x1b[2J\u202ehasp: all is well"

// line locks "key" on url as the owner "first", and lets owners wait for it, in
// order. At the end of the test, all of them have left.
func line(t *testing.T, url string, owners ...string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		clients.Wait()
	})
	for i, owner := range append([]string{"first"}, owners...) {
		c, err := hasp.Open(ctx, url, &hasp.Options{Owner: owner})
		if err != nil {
			t.Fatal(err)
		}
		clients.Go(func() {
			defer c.Close()
			_ = hasp.Do(ctx, c, "key", func(ctx context.Context, _ *hasp.Lease) error {
				<-ctx.Done()
				return nil
			}, hasp.WithTTL(time.Hour))
		})
		for began := time.Now(); ; time.Sleep(time.Millisecond) {
			s, err := c.Inspect(ctx, "key")
			if err == nil && s.Held && len(s.Waiters) == i {
				break
			}
			if time.Since(began) > patience {
				t.Fatalf("%q is not in the queue: %+v, %v", owner, s, err)
			}
		}
	}
}

// queueURL is the URL of a store with a queue, which processes can share.
func queueURL(t *testing.T) string {
	t.Helper()
	return "fairlock+" + redistest.Start(t, nil).URL() + "?prefix=" + t.Name() + ":"
}

// Any program can write owners into the store.
func TestInspectShowsTheLine(t *testing.T) {
	t.Parallel()
	url, owners := queueURL(t), []string{"second", escape, "fourth"}
	line(t, url, owners...)

	shown := runHasp(t, url, "inspect", "key").want(t, 0).out
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
	o := runHasp(t, url, "inspect", "key", "--json").want(t, 0)
	o.decode(t, &s)
	if strings.Contains(o.out, "\x1b") || !s.Held || s.Owner != "first" || !slices.Equal(s.Waiters, owners) {
		t.Errorf("got %+v, want waiters %q, from:\n%s", s, owners, o.out)
	}
}

func TestDemoShowsTheLine(t *testing.T) {
	t.Parallel()
	o := runHasp(t, queueURL(t), "demo", "--workers", "4", "--increments", "10", "--work", "4ms", "--ttl", "3s").want(t, 0)
	contains(t, o.out, "; in line: ")
	contains(t, o.out, "ok: the number is 40")
	if strings.Contains(o.out, "; waiting: ") {
		t.Errorf("waiters of a queue are shown without their order:\n%s", o.out)
	}
}
