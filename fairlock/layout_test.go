package fairlock_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/strategytest"
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
	r := onServer(t)
	pair := func(c backend.Claim) { r.Acquire(t, c); r.Release(t, c) }
	for n, kind := range map[int]func(string) backend.Claim{6: claim, 9: fenced} {
		pair(kind("k")) // sends the scripts
		r.commands(t)
		pair(kind("k"))
		if got := r.commands(t); got != n {
			t.Errorf("a pair on a free key costs %d commands, want %d", got, n)
		}
	}

	// A shorter term costs more, because it may end before the next poll, and a longer one needs a
	// confirmation.
	long := func() backend.Claim { c := claim("k"); c.TTL = 10 * time.Minute; return c }
	const waiters, rounds = 64, 100
	var ds []Driver
	for range 4 {
		ds = append(ds, r.another(t)) // they poll after the test
	}
	holder := r.hold(t)
	var xs []*waiting
	for i := range waiters {
		xs = append(xs, r.waitOn(t, ds[i%len(ds)], long()))
	}
	r.Release(t, holder)
	turn := func() {
		x := xs[0]
		x.got(t)
		xs = append(xs[1:], r.waitOn(t, x.d, long()))
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

// Until the first renewal, the start of a hold follows from its term. Whatever changes the term
// keeps the start.
func TestSinceIsTheStartOfTheHold(t *testing.T) {
	r := onServer(t)
	memory := func(limit string) { r.Do(t, "config", "set", "maxmemory", limit) }
	for when, change := range map[string]func(c backend.Claim) error{
		"unchanged": func(backend.Claim) error { return nil },
		"renewed without memory, and again": func(c backend.Claim) error {
			memory("1")
			err := r.Renew(t, c)
			memory("0")
			c.TTL *= 2
			return errors.Join(err, r.Renew(t, c))
		},
		// A wait that finds that its token has the key prolongs the hold like a renewal.
		"confirmed": func(c backend.Claim) error { return errOf(r.Driver.Wait(t.Context(), c)) },
		"kept":      func(c backend.Claim) error { return r.Driver.Release(t.Context(), strategytest.Kept(c, time.Hour)) },
	} {
		const half = 12 * time.Hour
		c := claim(when)
		c.TTL = 2 * half
		r.Acquire(t, c)
		r.Redis.PExpire(t.Context(), when, half) // as if half of the term had passed
		began := time.Now().Add(-half)
		want(t, when, change(c), nil)
		s, err := r.Driver.Inspect(t.Context(), when)
		// A server that stands still within a script reads two times.
		if err != nil || s.Since.Sub(began).Abs() > time.Minute {
			t.Errorf("%s: since %v, %v; want %v", when, s.Since, err, began)
		}
	}

	// Without an end, the start is unknown.
	c := claim("k")
	r.Acquire(t, c)
	r.Do(t, "persist", "k")
	if s := r.status(t); !s.Since.IsZero() || s.Owner != c.Owner {
		t.Errorf("without an end: %+v", s)
	}

	// A start before 1970 does not fit into the record. An operator may shorten a long term.
	c = claim("long")
	c.TTL = 100 * 365 * 24 * time.Hour
	r.Acquire(t, c)
	r.Do(t, "pexpire", "long", 60_000)
	for range 2 {
		want(t, "renew", r.Renew(t, c), nil)
	}
	r.Release(t, c)
}

// An owner may have any bytes. It comes last in records, members and entries.
func TestOwnersOfAnyBytes(t *testing.T) {
	r := setup(t, nil)
	for _, owner := range []string{"", " ", "a b  c ", "#", "a#b", "fairlock+ 1 2 3 4 5", "\x00\r\n\xff", "PUBLISH x 1 1 0 y", "PUBLISH x 1 1 2 y"} {
		for _, next := range []backend.Claim{claim("k"), shared()} {
			c := r.hold(t)
			next.Owner = owner
			x := r.wait(t, next)
			if s := r.status(t); len(s.Waiters) != 1 || s.Waiters[0] != owner {
				t.Errorf("%q: %+v", owner, s)
			}
			r.Release(t, c)
			x.got(t)
			s := r.status(t)
			if !next.Shared && s.Owner != owner || next.Shared && !slices.Equal(s.Shared, []string{owner}) {
				t.Errorf("%q: %+v", owner, s)
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
	r.Do(t, "set", "k", "token-of-a-holder#owner")
	c := claim("k")
	x := r.wait(t, c)
	list := func(prefix string) (all []backend.Entry) {
		for e, err := range r.Driver.List(t.Context(), prefix, c.Timeout) {
			want(t, "list", err, nil)
			all = append(all, e)
		}
		return all
	}
	for _, prefix := range []string{"", "k"} {
		all := list(prefix)
		if len(all) != 1 || !all[0].Held || all[0].Owner != "" || !slices.Equal(all[0].Waiters, []string{c.Owner}) {
			t.Errorf("with a waiter, by %q: %+v", prefix, all)
		}
	}

	r.Do(t, "del", "k")
	x.got(t)
	next := claim("k")
	r.wait(t, next)
	if all := list("k"); len(all) != 1 || all[0].Owner != c.Owner || !slices.Equal(all[0].Waiters, []string{next.Owner}) {
		t.Errorf("the waiter has the key, and another waits: %+v", all)
	}
}
