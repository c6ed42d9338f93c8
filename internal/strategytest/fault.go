package strategytest

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// faulty runs f in a bubble. The driver of a has connections that p can
// disturb, over a client that retries as go-redis does by default; b does not
// use p.
func (s Strategy) faulty(t *testing.T, f func(t *testing.T, p *faultproxy.Proxy, a, b rig)) {
	synctest.Test(t, func(t *testing.T) {
		v := redistest.Virtual(t)
		o := *v.Client().Options()
		o.MaxRetries, o.ReadTimeout, o.WriteTimeout, o.ContextTimeoutEnabled = 0, 0, 0, false
		rdb := redis.NewClient(&o)
		defer rdb.Close()
		a := rig{Redis: rdb, Driver: s.open(rdb)}
		defer a.Driver.Close()
		b := rig{Redis: v.Direct(), Driver: s.open(v.Direct())}
		defer b.Driver.Close()
		f(t, v.Proxy, a, b)
	})
}

// ReplyLost proves that a call whose reply is lost is of unknown outcome, and
// that the server got the command once.
func (s Strategy) ReplyLost(t *testing.T) {
	for _, fault := range []faultproxy.Fault{faultproxy.LoseReply, faultproxy.HangReply} {
		for name, kind := range kinds {
			s.faulty(t, func(t *testing.T, p *faultproxy.Proxy, a, b rig) {
				c := kind("k")
				a.Acquire(t, c) // from here on the server knows the scripts
				a.Renew(t, c)
				a.Release(t, c)

				c = kind("k")
				p.Fail(c.Token, fault)
				_, err := a.Driver.Acquire(t.Context(), c)
				Outage(t, name+": acquire", err)
				if !s.Has(t.Context(), b.Redis, c) {
					t.Errorf("%s: the server does not have the record", name)
				}

				c.TTL = 10 * Term
				p.Fail(c.Token, fault)
				Outage(t, name+": renew", a.Renew(t, c))
				if left := b.Left(t, "k"); left < 9*Term {
					t.Errorf("%s: renew: %v left", name, left)
				}
				if err := a.Renew(t, c); err != nil {
					t.Errorf("%s: renew again: %v", name, err)
				}

				p.Fail(c.Token, fault)
				Outage(t, name+": release", a.Driver.Release(t.Context(), c))
				Lost(t, name+": release again", a.Driver.Release(t.Context(), c))
				if n := p.Pending(); n != 0 {
					t.Errorf("%s: %d faults did not happen", name, n)
				}
			})
		}
	}
}

// ServerHangs proves that calls to a server that answers nothing end with their
// context, although the client would wait for a minute.
func (s Strategy) ServerHangs(t *testing.T) {
	r := s.setup(t, nil)
	o := r.Server.ClientOptions()
	o.ReadTimeout, o.ContextTimeoutEnabled = time.Minute, true
	rdb := redis.NewClient(o)
	defer rdb.Close()
	r.Driver = s.open(rdb)
	c := Claim("k")
	r.Acquire(t, c)
	r.Server.Pause()
	defer r.Server.Resume()

	began := time.Now()
	soon := func() context.Context { return Bounded(t, 50*time.Millisecond) }
	_, err := r.Driver.Acquire(soon(), Claim("k"))
	Outage(t, "acquire", err)
	Outage(t, "release", r.Driver.Release(soon(), c))
	_, err = r.Driver.Inspect(soon(), "k")
	Outage(t, "inspect", err)
	Outage(t, "break", r.Driver.Break(soon(), "k"))
	r.Driver.Renew(soon(), []backend.Claim{c}, func(_ int, _ backend.Grant, err error) { Outage(t, "renew", err) })

	// A renewal that is cancelled does not wait for the client either.
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	r.Driver.Renew(ctx, []backend.Claim{c}, func(int, backend.Grant, error) { t.Error("an answer without a server") })
	if d := time.Since(began); d > 30*time.Second {
		t.Errorf("took %v", d)
	}
}

// RefusalsOfTheServerAreOutages proves that an error reply of a server that
// cannot serve is an outage, and neither contention nor loss.
func (s Strategy) RefusalsOfTheServerAreOutages(t *testing.T) {
	for name, c := range map[string]struct {
		before, after []any
		releases      bool // whether a hold can still be renewed and released
	}{
		"OOM":        {[]any{"config", "set", "maxmemory", "1"}, []any{"config", "set", "maxmemory", "0"}, true},
		"READONLY":   {[]any{"replicaof", "127.0.0.1", "1"}, []any{"replicaof", "no", "one"}, false},
		"NOPERM":     {[]any{"acl", "setuser", "default", "-@string", "-@hash", "-@scripting"}, []any{"acl", "setuser", "default", "+@all"}, false},
		"NOREPLICAS": {[]any{"config", "set", "min-replicas-to-write", "1"}, []any{"config", "set", "min-replicas-to-write", "0"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := s.setup(t, &redistest.Options{Own: true, Real: true})
			mine := Claim("mine")
			r.Acquire(t, mine)
			r.Acquire(t, Fenced("fenced"))
			r.Renew(t, mine)
			r.Driver.Release(t.Context(), Claim("x")) // from here on the server knows the scripts

			r.Do(t, c.before...)
			for kind, claim := range kinds {
				_, err := r.Driver.Acquire(t.Context(), claim("k"))
				Outage(t, "acquire "+kind, err)
			}
			mine.TTL = 10 * Term // so that the renewal has something to write
			renewed, released := r.Renew(t, mine), r.Driver.Release(t.Context(), mine)
			if !c.releases {
				Outage(t, "renew", renewed)
				Outage(t, "release", released)
			} else if renewed != nil || released != nil {
				t.Errorf("renew: %v, release: %v", renewed, released)
			}

			r.Do(t, c.after...)
			r.Acquire(t, Claim("k"))
		})
	}
}

// ServerIsGone proves that a server that refuses connections is an outage.
func (s Strategy) ServerIsGone(t *testing.T) {
	// Port 1 belongs to tcpmux, and the kernel gives it to no socket by chance.
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1})
	defer rdb.Close()
	r := rig{Redis: rdb, Driver: s.open(rdb)}
	_, err := r.Driver.Acquire(t.Context(), Claim("k"))
	Outage(t, "acquire", err)
	Outage(t, "renew", r.Renew(t, Claim("k")))
	Outage(t, "release", r.Driver.Release(t.Context(), Claim("k")))
}
