package fairlock_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
	"github.com/hasplock/hasp/spinlock"
)

// commands returns how many commands the server has run since the last call, with
// those inside scripts, and without those of the test and of new or idle connections.
func (r rig) commands(t *testing.T) (n int) {
	t.Helper()
	for line := range strings.Lines(r.Redis.Info(t.Context(), "commandstats").Val()) {
		name, stats, _ := strings.Cut(line, ":")
		switch name, _, _ = strings.Cut(name, "|"); name {
		case "cmdstat_zcard", "cmdstat_ttl", "cmdstat_info", "cmdstat_config", "cmdstat_hello", "cmdstat_client", "cmdstat_ping":
			continue
		}
		var calls int
		fmt.Sscanf(stats, "calls=%d", &calls)
		n += calls
	}
	want(t, "reset", r.Redis.ConfigResetStat(t.Context()).Err(), nil)
	return n
}

// A pair of acquire and release on a free key costs six commands on the server, and
// nine with a fence. An acquisition in a queue costs 14, however many callers wait.
func TestCommandsOfAPair(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	pair := func(c backend.Claim) { r.Acquire(t, c); r.Release(t, c) }
	for n, kind := range map[int]func(string) backend.Claim{6: claim, 9: fenced} {
		pair(kind("k")) // sends the scripts
		r.commands(t)
		pair(kind("k"))
		if got := r.commands(t); got != n {
			t.Errorf("a pair on a free key costs %d commands, want %d", got, n)
		}
	}

	const waiters, rounds = 64, 100
	var ds []Driver
	for range 4 {
		ds = append(ds, r.another(t)) // they poll after 20 s
	}
	release := func(d Driver, c backend.Claim) { want(t, "release", d.Release(t.Context(), c), nil) }
	holder := r.hold(t)
	var xs []*waiting
	for i := range waiters {
		xs = append(xs, r.wait(t, ds[i%len(ds)], claim("k"), i+1))
	}
	release(r.Driver, holder)
	turn := func() {
		x := xs[0]
		x.got(t)
		xs = append(xs[1:], r.wait(t, x.d, claim("k"), waiters))
		x.release(t)
	}
	for range ds {
		turn() // sends the scripts
	}
	r.commands(t)
	for range rounds {
		turn()
	}
	if n := r.commands(t); n != 14*rounds {
		t.Errorf("an acquisition among %d waiters costs %.2f commands, want 14", waiters, float64(n)/rounds)
	}
}

// Until the first renewal, the start of a hold follows from its term. Renewals keep it.
func TestSinceIsTheStartOfTheHold(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	since := func(when string, earliest, latest time.Time) time.Time {
		t.Helper()
		s, err := r.Driver.Inspect(t.Context(), "k")
		// The server rounds the clock down to ms, and the PTTL to the next ms.
		if err != nil || s.Since.Before(earliest.Add(-2*time.Millisecond)) || s.Since.After(latest.Add(2*time.Millisecond)) {
			t.Errorf("%s: since %v, %v; want %v to %v", when, s.Since, err, earliest, latest)
		}
		return s.Since
	}
	now := func() time.Time { return r.Redis.Time(t.Context()).Val() }

	c := claim("k")
	c.TTL = time.Hour
	const ago = 10 * time.Minute
	earliest := now()
	r.Acquire(t, c)
	latest := now()
	since("acquired", earliest, latest)
	// As if it were ten minutes later. No memory is free.
	earliest = now().Add(-ago)
	want(t, "pexpire", r.Redis.PExpire(t.Context(), "k", c.TTL-ago).Err(), nil)
	latest = now().Add(-ago)
	r.Redis.ConfigSet(t.Context(), "maxmemory", "1")
	since("later", earliest, latest)
	want(t, "renew", r.Renew(t, c), nil)
	r.Redis.ConfigSet(t.Context(), "maxmemory", "0")
	first := since("renewed", earliest, latest)
	c.TTL *= 2
	want(t, "renew", r.Renew(t, c), nil)
	if again := since("renewed again", earliest, latest); again != first {
		t.Errorf("since %v, and then %v", first, again)
	}

	// A wait that finds that its token has the key prolongs the hold like a renewal. A release
	// may set another term. The start is the same.
	for when, change := range map[string]func(c backend.Claim) error{
		"confirmed": func(c backend.Claim) error { return errOf(r.Driver.Wait(t.Context(), c)) },
		"kept":      func(c backend.Claim) error { return r.Driver.Release(t.Context(), strategytest.Kept(c, time.Hour)) },
	} {
		want(t, "break", r.Driver.Break(t.Context(), "k"), nil)
		c = claim("k")
		r.Acquire(t, c)
		earliest = now().Add(-c.TTL / 2)
		want(t, "pexpire", r.Redis.PExpire(t.Context(), "k", c.TTL/2).Err(), nil)
		latest = now().Add(-c.TTL / 2)
		want(t, when, change(c), nil)
		since(when, earliest, latest)
	}

	want(t, "break", r.Driver.Break(t.Context(), "k"), nil)
	// Without an end, the start is unknown.
	r.Acquire(t, c)
	r.Redis.Persist(t.Context(), "k")
	if s, err := r.Driver.Inspect(t.Context(), "k"); err != nil || !s.Since.IsZero() || s.Owner != c.Owner {
		t.Errorf("without an end: %+v, %v", s, err)
	}

	want(t, "break", r.Driver.Break(t.Context(), "k"), nil)
	// A start before 1970 does not fit into the record. An operator may shorten a long term.
	c.TTL = 100 * 365 * 24 * time.Hour
	r.Acquire(t, c)
	want(t, "pexpire", r.Redis.PExpire(t.Context(), "k", time.Minute).Err(), nil)
	want(t, "renew", r.Renew(t, c), nil)
	want(t, "renew again", r.Renew(t, c), nil)
	want(t, "release", r.Driver.Release(t.Context(), c), nil)
}

// An owner may have any bytes. It comes last in records, members and entries.
func TestOwnersOfAnyBytes(t *testing.T) {
	r := setup(t, nil)
	for _, owner := range []string{"", " ", "a b  c ", "#", "a#b", "fairlock+ 1 2 3 4 5", "\x00\r\n\xff", "PUBLISH x 1 1 0 y", "PUBLISH x 1 1 2 y"} {
		for _, next := range []backend.Claim{claim("k"), shared()} {
			c := r.hold(t)
			next.Owner = owner
			x := r.wait(t, r.another(t), next, 1)
			if s, err := r.Driver.Inspect(t.Context(), "k"); err != nil || len(s.Waiters) != 1 || s.Waiters[0] != owner {
				t.Errorf("%q: %+v, %v", owner, s, err)
			}
			r.Release(t, c)
			x.got(t)
			s, err := r.Driver.Inspect(t.Context(), "k")
			if err != nil || !next.Shared && s.Owner != owner || next.Shared && !slices.Equal(s.Shared, []string{owner}) {
				t.Errorf("%q: %+v, %v", owner, s, err)
			}
			want(t, "renew", r.Renew(t, next), nil)
			x.release(t)
		}
	}
}

// A key that another strategy holds is listed while callers wait for it. A key that fairlock
// holds is listed once, with its waiters.
func TestListOfKeysThatCallersWaitFor(t *testing.T) {
	r := onServer(t)
	other := await.Value(spinlock.NewDriver(r.Server.Client(), nil))
	defer other.Close()
	foreign := claim("k")
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
