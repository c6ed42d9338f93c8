package fairlock_test

import (
	"slices"
	"testing"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/strategytest"
	"github.com/hasplock/hasp/spinlock"
)

// A key that another strategy holds is listed while callers wait for it. A key that fairlock
// holds is listed once, with its waiters.
func TestListOfKeysThatCallersWaitFor(t *testing.T) {
	r := onServer(t)
	other := await.Value(spinlock.NewDriver(r.Server.Client(), nil))
	defer other.Close()
	foreign := strategytest.ListClaim("k")
	want(t, "acquire", errOf(other.Acquire(t.Context(), foreign)), nil)
	all, err := strategytest.Listed(t.Context(), r.Driver, "")
	if err != nil || len(all) != 0 {
		t.Errorf("without waiters: %+v, %v", all, err)
	}

	c := claim("k")
	r.wait(t, r.another(t), c, 1)
	for _, prefix := range []string{"", "k"} {
		all, err = strategytest.Listed(t.Context(), r.Driver, prefix)
		if e := all["k"]; err != nil || len(all) != 1 || !e.Held || e.Owner != "" || !slices.Equal(e.Waiters, []string{c.Owner}) {
			t.Errorf("with a waiter, by %q: %+v, %v", prefix, all, err)
		}
	}

	want(t, "release", other.Release(t.Context(), foreign), nil)
	await.Until(t, "the waiter has the key, and is listed once", func() bool {
		n, last := 0, backend.Entry{}
		for e, err := range r.Driver.List(t.Context(), "k", c.Timeout) {
			want(t, "list", err, nil)
			n, last = n+1, e
		}
		return n == 1 && last.Owner == c.Owner && len(last.Waiters) == 0
	})
}
