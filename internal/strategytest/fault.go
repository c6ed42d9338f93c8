package strategytest

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

// RefusalsOfTheServerAreOutages proves that an error reply of a server that cannot serve counts as
// an outage, and not as contention or loss. Without memory, a hold can still be renewed and
// released.
func (s Strategy) RefusalsOfTheServerAreOutages(t *testing.T) {
	for name, trouble := range map[string]struct{ begin, end []any }{
		"OOM": {[]any{"config", "set", "maxmemory", "1"},
			[]any{"config", "set", "maxmemory", "0"}},
		"READONLY": {[]any{"replicaof", "127.0.0.1", "1"}, []any{"replicaof", "no", "one"}},
		"NOPERM": {[]any{"acl", "setuser", "default", "-@string", "-@hash", "-@scripting"},
			[]any{"acl", "setuser", "default", "+@all"}},
		"NOREPLICAS": {[]any{"config", "set", "min-replicas-to-write", "1"},
			[]any{"config", "set", "min-replicas-to-write", "0"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := s.setup(t, real)
			mine := Claim("mine")
			reader := Shared("reader")
			kept := Claim("kept")
			for _, c := range []backend.Claim{mine, reader, kept, Fenced("fenced")} {
				r.Acquire(t, c)
				r.Renew(t, c)
			}

			// A caller that has waited for readers may take the key by another script.
			before := Shared("waiting")
			waiting := Claim("waiting")
			waiting.WillRetry = true
			waiting.Waited = time.Millisecond
			r.Acquire(t, before)
			Want(t, "acquire", ErrOf(r.Driver.Acquire(t.Context(), waiting)), backend.ErrHeld)
			r.Release(t, before)
			r.Driver.Release(t.Context(), Kept(Claim("x"), Term)) // loads the script

			r.Do(t, trouble.begin...)
			for kind, c := range map[string]backend.Claim{
				"unfenced": Claim("k"), "fenced": Fenced("k"), "shared": Shared("k"),
				"beside a reader": Shared("reader"), "waiting": waiting,
			} {
				_, err := r.Driver.Acquire(t.Context(), c)
				Outage(t, "acquire "+kind, err)
				if !strings.Contains(fmt.Sprint(err), name) {
					t.Errorf("acquire %s: %v does not give the server's reason", kind, err)
				}
			}

			// The renewals ask for longer terms, so that they write.
			mine.TTL = 10 * Term
			reader.TTL = 10 * Term
			errs := map[string]error{"renew": r.Renew(t, mine), "renew shared": r.Renew(t, reader)}
			left := min(r.Left(t, "mine"), r.Left(t, "reader"))
			for what, c := range map[string]backend.Claim{
				"release": mine, "release shared": reader,
				"release with KeepUntil": Kept(kept, Term/2),
			} {
				errs[what] = r.Driver.Release(t.Context(), c)
			}
			for what, err := range errs {
				if name == "OOM" {
					Want(t, what, err, nil)
				} else {
					Outage(t, what, err)
				}
			}
			if name == "OOM" && left < 9*Term {
				t.Errorf("renewed: %v left", left)
			}

			r.Do(t, trouble.end...)
			r.Acquire(t, Claim("k"))
		})
	}
}

// ScriptErrorsAreNoLoss proves that a call of a user without one of these rights either succeeds,
// or is an outage and changes nothing.
func (s Strategy) ScriptErrorsAreNoLoss(t *testing.T) {
	outages := 0
	for _, right := range []string{"getrange", "hlen", "hkeys", "hdel", "pexpire", "zrange"} {
		r := s.setup(t, real)
		held := []backend.Claim{Claim("held"), Shared("held shared")}
		for _, c := range held {
			r.Acquire(t, c)
		}

		r.Forbid(t, "-"+right)
		exists := func(key string) bool { return r.Redis.Exists(t.Context(), key).Val() > 0 }
		judge := func(call string, err error, done bool) {
			call += " without " + right
			if done != (err == nil) {
				t.Errorf("%s: returned %v, done: %t", call, err, done)
			}
			if err != nil {
				Outage(t, call, err)
				outages++
			}
		}

		for _, c := range held {
			free := c
			free.Key = "free " + c.Key
			_, err := r.Driver.Acquire(t.Context(), free)
			judge("acquire", err, exists(free.Key))

			_, err = r.Driver.Acquire(t.Context(), Claim(c.Key))
			if !errors.Is(err, backend.ErrHeld) {
				Outage(t, "acquire a held key without "+right, err)
			}
			if st, err := r.Driver.Inspect(t.Context(), c.Key); err == nil && !st.Held {
				t.Errorf("inspect without %s: %+v", right, st)
			}

			longer := c
			longer.TTL = 100 * Term
			err = r.Renew(t, longer)
			judge("renew", err, r.Left(t, c.Key) > Term)

			c.Owner = "" // so that the release has to read the record
			err = r.Driver.Release(t.Context(), c)
			judge("release", err, !exists(c.Key))
		}

		if right == "getrange" {
			Outage(t, "acquire fenced", ErrOf(r.Driver.Acquire(t.Context(), Fenced("free"))))
		}
	}

	if outages < 6 {
		t.Error("calls need none of these rights")
	}
}
