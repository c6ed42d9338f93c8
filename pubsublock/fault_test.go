package pubsublock_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/pubsublock"
)

// eager runs f with a driver whose connections can be made to fail, over a
// client as eager to retry as go-redis by itself, and one past that.
func eager(t *testing.T, f func(t *testing.T, p *faultproxy.Proxy, a, b rig)) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		o := *a.rdb.Options()
		o.MaxRetries, o.ReadTimeout, o.WriteTimeout, o.ContextTimeoutEnabled = 0, 0, 0, false
		a.rdb = redis.NewClient(&o)
		defer a.rdb.Close()
		a.d = pubsublock.New(a.rdb, nil)
		defer a.d.Close()
		f(t, v.Proxy, a, b)
	})
}

// outage fails the test unless err is an outage that names the server.
func outage(t *testing.T, r rig, what string, err error) {
	t.Helper()
	for _, definite := range []error{nil, backend.ErrHeld, backend.ErrLost, backend.ErrInvalid, errors.ErrUnsupported} {
		if errors.Is(err, definite) {
			t.Errorf("%s: got %v, want an outage", what, err)
			return
		}
	}
	if !strings.Contains(err.Error(), "redis ") {
		t.Errorf("%s: %q does not name the server", what, err)
	}
}

// A reply that is lost is an outcome that nobody knows. It must be told as
// that, and the server must not have been asked twice.
func TestReplyLost(t *testing.T) {
	for _, fault := range []faultproxy.Fault{faultproxy.LoseReply, faultproxy.HangReply} {
		for _, kind := range []func(string) backend.Claim{claim, fenced} {
			eager(t, func(t *testing.T, p *faultproxy.Proxy, r, b rig) {
				c := kind("k")
				r.acquire(t, c) // the scripts are known from here on
				r.renew(t, c)
				r.release(t, c)

				c = kind("k")
				p.Fail(c.Token, fault)
				_, err := r.d.Acquire(t.Context(), c)
				outage(t, r, "acquire", err)
				if got := b.rdb.HGetAll(t.Context(), "k").Val(); got[c.Token+"#"+c.Owner] != "1" {
					t.Errorf("the server has %q", got)
				}

				c.TTL = 10 * term
				p.Fail(c.Token, fault)
				outage(t, r, "renew", r.renew(t, c))
				if left := b.left(t, "k"); left < 9*term {
					t.Errorf("renew: %v left", left)
				}
				if err := r.renew(t, c); err != nil {
					t.Errorf("renew again: %v", err)
				}

				p.Fail(c.Token, fault)
				outage(t, r, "release", r.d.Release(t.Context(), c))
				if err := r.d.Release(t.Context(), c); !errors.Is(err, backend.ErrLost) {
					t.Errorf("release again: %v", err)
				}
				if n := p.Pending(); n != 0 {
					t.Errorf("%d faults did not happen", n)
				}
			})
		}
	}
}

// A command that never came to the server is as unknown as one that did.
func TestRequestLost(t *testing.T) {
	eager(t, func(t *testing.T, p *faultproxy.Proxy, r, _ rig) {
		c := claim("k")
		p.Fail(c.Token, faultproxy.LoseRequest)
		_, err := r.d.Acquire(t.Context(), c)
		outage(t, r, "acquire", err)
		r.acquire(t, c)
		p.Fail(c.Token, faultproxy.LoseRequest)
		outage(t, r, "release", r.d.Release(t.Context(), c))
		r.release(t, c)
	})
}

// A server that takes everything and answers nothing holds nobody up, even by
// a client that gives up after a minute.
func TestServerThatHangs(t *testing.T) {
	r := setup(t, nil)
	o := r.srv.ClientOptions()
	o.ReadTimeout, o.ContextTimeoutEnabled = time.Minute, true
	rdb := redis.NewClient(o)
	defer rdb.Close()
	r.d = pubsublock.New(rdb, nil)
	c := claim("k")
	r.acquire(t, c)
	r.srv.Pause()
	defer r.srv.Resume()
	began := time.Now()
	_, err := r.d.Acquire(bounded(t, 50*time.Millisecond), claim("k"))
	outage(t, r, "acquire", err)
	outage(t, r, "release", r.d.Release(bounded(t, 50*time.Millisecond), c))
	_, err = r.d.Inspect(bounded(t, 50*time.Millisecond), "k")
	outage(t, r, "inspect", err)
	outage(t, r, "break", r.d.Break(bounded(t, 50*time.Millisecond), "k"))
	r.d.Renew(bounded(t, 50*time.Millisecond), []backend.Claim{c}, func(_ int, _ backend.Grant, err error) {
		outage(t, r, "renew", err)
	})
	// A cancelled renewal does not wait for the client either.
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	r.d.Renew(ctx, []backend.Claim{c}, func(int, backend.Grant, error) { t.Error("answered by nobody") })
	if d := time.Since(began); d > 30*time.Second {
		t.Errorf("took %v", d)
	}
}

// A Wait of a driver that was opened by URL, whose calls can be broken off,
// ends with its context. The engine releases what the call may have taken.
func TestWaitByURLMayBeLeft(t *testing.T) {
	t.Parallel()
	r := setup(t, nil)
	p := r.srv.Proxy()
	d, err := hasp.Config{Strategy: "pubsublock", Nodes: []string{"redis://" + p.Addr()}}.Driver(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	r.release(t, mustAcquire(t, r, claim("k"))) // the scripts are known from here on
	c := claim("k")
	c.TTL = time.Hour
	p.Fail(c.Token, faultproxy.LoseReply)
	_, err = d.(backend.Waiter).Wait(t.Context(), c)
	outage(t, r, "wait whose reply is lost", err)
	r.release(t, c)

	c = claim("k")
	c.Timeout = time.Minute
	p.Fail(c.Token, faultproxy.HoldRequest)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := d.(backend.Waiter).Wait(ctx, c)
		if errors.Is(err, context.Canceled) {
			err = nil
		}
		done <- err
	}()
	eventually(t, "it does not ask", func() bool { return p.Pending() == 0 })
	cancel()
	arrives(t, "a cancelled wait", done) // long before its Timeout
}

// What a server replies when it cannot serve is an outage, and neither
// contention nor loss.
func TestRefusalsOfTheServerAreOutages(t *testing.T) {
	for name, c := range map[string]struct {
		before, after []any
		releases      bool // whether a hold can still be renewed and given back
	}{
		"OOM":        {[]any{"config", "set", "maxmemory", "1"}, []any{"config", "set", "maxmemory", "0"}, true},
		"READONLY":   {[]any{"replicaof", "127.0.0.1", "1"}, []any{"replicaof", "no", "one"}, false},
		"NOPERM":     {[]any{"acl", "setuser", "default", "-@hash", "-@scripting"}, []any{"acl", "setuser", "default", "+@all"}, false},
		"NOREPLICAS": {[]any{"config", "set", "min-replicas-to-write", "1"}, []any{"config", "set", "min-replicas-to-write", "0"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := setup(t, &redistest.Options{Own: true, Real: true})
			do := func(args []any) {
				if err := r.rdb.Do(t.Context(), args...).Err(); err != nil {
					t.Fatal(err)
				}
			}
			mine, fence := claim("mine"), fenced("fenced")
			r.acquire(t, mine)
			r.acquire(t, fence)
			r.renew(t, mine)
			r.d.Release(t.Context(), claim("x"))
			do(c.before)
			mine.TTL = 10 * term // a renewal that has something to write
			_, err := r.d.Acquire(t.Context(), claim("k"))
			outage(t, r, "acquire", err)
			_, err = r.d.Acquire(t.Context(), fenced("k"))
			outage(t, r, "acquire fenced", err)
			t.Log(err)
			if c.releases {
				if err := r.renew(t, mine); err != nil {
					t.Errorf("renew: %v", err)
				}
				if err := r.d.Release(t.Context(), mine); err != nil {
					t.Errorf("release: %v", err)
				}
			} else {
				outage(t, r, "renew", r.renew(t, mine))
				outage(t, r, "release", r.d.Release(t.Context(), mine))
			}
			do(c.after)
			r.acquire(t, claim("k"))
		})
	}
}

// A user that may not read must not take that for "not mine".
func TestScriptErrorsAreNotTakenForLoss(t *testing.T) {
	for _, right := range []string{"hlen", "hkeys", "hdel"} {
		r := setup(t, &redistest.Options{Own: true, Real: true})
		c := claim("k")
		r.acquire(t, c)
		r.forbid(t, "-"+right)
		if right != "hdel" {
			outage(t, r, "renew without "+right, r.renew(t, c))
			c.Owner = "" // so that the release has to look
		}
		outage(t, r, "release without "+right, r.d.Release(t.Context(), c))
	}
	r := setup(t, &redistest.Options{Own: true, Real: true})
	r.acquire(t, claim("k"))
	r.forbid(t, "-hlen", "-getrange")
	_, err := r.d.Acquire(t.Context(), fenced("free"))
	outage(t, r, "acquire fenced without getrange", err)
	if _, err := r.d.Acquire(t.Context(), claim("k")); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("acquire without hlen: %v", err)
	}
	if s, err := r.d.Inspect(t.Context(), "k"); !s.Held || err != nil {
		t.Errorf("inspect without hlen and getrange: %+v, %v", s, err)
	}
}

// A user that may not set terms takes no key, rather than one without an end.
func TestNoLockWithoutAnEnd(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	r.forbid(t, "-pexpire")
	_, err := r.d.Acquire(t.Context(), claim("k"))
	outage(t, r, "acquire without pexpire", err)
	if n := r.rdb.Exists(t.Context(), "k").Val(); n != 0 {
		t.Error("a key is left")
	}
}

// forbid takes rights from the user of all connections.
func (r rig) forbid(t *testing.T, rights ...any) {
	t.Helper()
	if err := r.rdb.Do(t.Context(), append([]any{"acl", "setuser", "default"}, rights...)...).Err(); err != nil {
		t.Fatal(err)
	}
}

func TestServerThatIsGone(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1})
	defer rdb.Close()
	r := rig{rdb: rdb, d: pubsublock.New(rdb, nil)}
	_, err := r.d.Acquire(t.Context(), claim("k"))
	outage(t, r, "acquire", err)
	outage(t, r, "renew", r.renew(t, claim("k")))
	outage(t, r, "release", r.d.Release(t.Context(), claim("k")))
}

// A Redis that comes back empty has forgotten the locks and the scripts.
func TestRestartWithoutData(t *testing.T) {
	r := setup(t, nil)
	c, f := claim("k"), fenced("f")
	r.acquire(t, c)
	last := r.acquire(t, f).Fence
	r.renew(t, c)
	r.srv.Kill()
	r.srv.Restart()
	if err := r.renew(t, c); !errors.Is(err, backend.ErrLost) {
		t.Errorf("renew: %v", err)
	}
	if err := r.d.Release(t.Context(), c); !errors.Is(err, backend.ErrLost) {
		t.Errorf("release: %v", err)
	}
	next := claim("k")
	r.acquire(t, next)
	if err := r.renew(t, next); err != nil {
		t.Errorf("renew: %v", err)
	}
	if g := r.acquire(t, fenced("f")); g.Fence <= last {
		t.Errorf("fence %d after %d", g.Fence, last)
	}
}

// And one that kept its data has kept the locks.
func TestRestartWithData(t *testing.T) {
	r := setup(t, &redistest.Options{Keep: true})
	c := fenced("k")
	last := r.acquire(t, c).Fence
	r.srv.Kill()
	r.srv.Restart()
	if err := r.renew(t, c); err != nil {
		t.Errorf("renew: %v", err)
	}
	if err := r.d.Release(t.Context(), c); err != nil {
		t.Errorf("release: %v", err)
	}
	if g := r.acquire(t, fenced("k")); g.Fence <= last {
		t.Errorf("fence %d after %d", g.Fence, last)
	}
}
