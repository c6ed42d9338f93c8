package etcdlock_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

// TestLongAnswers reads a key whose entries are more than gRPC takes by default.
func TestLongAnswers(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)[0]
	d := openDriver(t, s.Client)
	const n = 55
	for i := range n {
		c := claimFor("long", 5*time.Minute)
		c.Shared, c.Owner = true, fmt.Sprint(i, strings.Repeat("o", 100_000))
		if _, err := acquire(d, c); err != nil {
			t.Fatal(err)
		}
	}
	st, err := bounded(func(ctx context.Context) (backend.Status, error) { return d.Inspect(ctx, "long") })
	if err != nil || len(st.Shared) != n {
		t.Errorf("inspect of a long answer: %d owners, want %d: %.300v", len(st.Shared), n, err)
	}
}

// TestLastSecond inspects a hold until its term has ended. In its last second, of which etcd
// says 0 s, the key is still held.
func TestLastSecond(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)[0]
	d, other := openDriver(t, s.Client), openDriver(t, s.Client)
	take(t, d, "last second", 2*time.Second)
	eventually(t, "the end of the term", func() error {
		st, err := bounded(func(ctx context.Context) (backend.Status, error) { return d.Inspect(ctx, "last second") })
		if err != nil || st.Held && st.TTL > 0 && st.TTL <= 2*time.Second {
			return fmt.Errorf("%+v, %v", st, err)
		}
		if st.Held {
			t.Fatalf("inspect: %+v", st)
		}
		// It was said to be free, so it must be.
		if _, err := acquire(other, claimFor("last second", time.Minute)); err != nil {
			t.Errorf("acquire of a key that Inspect has called free: %v", err)
		}
		return nil
	})
}

// The age of a hold does not count its wait. It is not known before the first renewal.
func TestAgeOfAHoldThatWaited(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)[0]
	d, h := openDriver(t, s.Client), openDriver(t, s.Client)
	held := take(t, h, "key", 5*time.Minute)
	c := claimFor("key", 5*time.Minute)
	c.Renewed = true
	w := wantsAs(t, d, c)
	queued(t, h, "key", 1)
	time.Sleep(100 * time.Millisecond)
	before := time.Now()
	free(t, h, held)
	c = w.granted(t)
	after := time.Now()
	for i := range 2 {
		st, err := bounded(func(ctx context.Context) (backend.Status, error) { return h.Inspect(ctx, "key") })
		if err != nil || !st.Held {
			t.Fatal(st, err)
		}
		if i == 0 && !st.Since.IsZero() || i == 1 && (st.Since.Before(before.Truncate(time.Millisecond)) || st.Since.After(after)) {
			t.Errorf("after %d renewals, the hold began at %v, want between %v and %v", i, st.Since, before, after)
		}
		if err := renew(d, c); err != nil {
			t.Fatal(err)
		}
	}
}
