package spinlock_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/spinlock"
)

// throughProxy is a driver whose connections can be made to fail, over a
// client as eager to retry as go-redis by itself.
func throughProxy(t *testing.T) (rig, *faultproxy.Proxy) {
	r := setup(t, nil)
	p := r.srv.Proxy()
	o := r.srv.ClientOptions()
	o.Addr, o.MinRetryBackoff, o.ReadTimeout = p.Addr(), -1, 5*time.Second
	rdb := redis.NewClient(o)
	t.Cleanup(func() { rdb.Close() })
	r.d = spinlock.New(rdb, nil)
	return r, p
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
	t.Parallel()
	for name, kind := range map[string]func(string) backend.Claim{"unfenced": claim, "fenced": fenced} {
		t.Run(name+" cut", func(t *testing.T) { replyLost(t, faultproxy.LoseReply, kind) })
		t.Run(name+" hung", func(t *testing.T) { replyLost(t, faultproxy.HangReply, kind) })
	}
}

func replyLost(t *testing.T, fault faultproxy.Fault, kind func(string) backend.Claim) {
	t.Parallel()
	r, p := throughProxy(t)
	c := kind("k")
	r.acquire(t, c) // the scripts are known from here on
	r.renew(t, c)
	if err := r.d.Release(t.Context(), c); err != nil {
		t.Fatal(err)
	}

	c = kind("k")
	p.Fail(c.Token, fault)
	_, err := r.d.Acquire(t.Context(), c)
	outage(t, r, "acquire", err)
	atLast(t, "the server has the record", func() bool {
		return strings.HasPrefix(r.rdb.Get(t.Context(), "k").Val(), c.Token+"#")
	})

	c.TTL = 10 * term
	p.Fail(c.Token, fault)
	outage(t, r, "renew", r.renew(t, c))
	atLast(t, "the server has renewed", func() bool { return r.left(t, "k") > 9*term })
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
}

// atLast waits for what a server that is slow does late.
func atLast(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: still not so", what)
		}
	}
}

// A command that never came to the server is as unknown as one that did.
func TestRequestLost(t *testing.T) {
	r, p := throughProxy(t)
	c := claim("k")
	p.Fail(c.Token, faultproxy.LoseRequest)
	_, err := r.d.Acquire(t.Context(), c)
	outage(t, r, "acquire", err)
	r.acquire(t, c)
	p.Fail(c.Token, faultproxy.LoseRequest)
	outage(t, r, "release", r.d.Release(t.Context(), c))
	if err := r.d.Release(t.Context(), c); err != nil {
		t.Errorf("release again: %v", err)
	}
}

// That a key is held stays known when the question by whom goes unanswered.
func TestHeldIsHeldThoughTheHolderIsNotTold(t *testing.T) {
	r, p := throughProxy(t)
	r.acquire(t, claim("k"))
	if _, err := r.d.Acquire(t.Context(), claim("k")); !errors.Is(err, backend.ErrHeld) {
		t.Fatal(err)
	}
	p.Fail("evalsha", faultproxy.LoseReply)
	if _, err := r.d.Acquire(t.Context(), claim("k")); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("got %v", err)
	}
}

// hang has what f does run into a server that takes everything and answers
// nothing, by a client that gives up after a minute.
func TestServerThatHangs(t *testing.T) {
	r := setup(t, nil)
	o := r.srv.ClientOptions()
	o.ReadTimeout, o.ContextTimeoutEnabled = time.Minute, true
	rdb := redis.NewClient(o)
	defer rdb.Close()
	r.d = spinlock.New(rdb, nil)
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

// What a server replies when it cannot serve is an outage, and neither
// contention nor loss.
func TestRefusalsOfTheServerAreOutages(t *testing.T) {
	for name, c := range map[string]struct {
		before, after []any
		releases      bool // whether a hold can still be renewed and given back
	}{
		"OOM":        {[]any{"config", "set", "maxmemory", "1"}, []any{"config", "set", "maxmemory", "0"}, true},
		"READONLY":   {[]any{"replicaof", "127.0.0.1", "1"}, []any{"replicaof", "no", "one"}, false},
		"NOPERM":     {[]any{"acl", "setuser", "default", "-@string", "-@scripting"}, []any{"acl", "setuser", "default", "+@all"}, false},
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
	r := setup(t, &redistest.Options{Own: true, Real: true})
	c := claim("k")
	r.acquire(t, c)
	if err := r.rdb.Do(t.Context(), "acl", "setuser", "default", "-getrange").Err(); err != nil {
		t.Fatal(err)
	}
	outage(t, r, "renew", r.renew(t, c))
	outage(t, r, "release", r.d.Release(t.Context(), c))
	_, err := r.d.Acquire(t.Context(), fenced("free"))
	outage(t, r, "acquire fenced", err)
	if _, err := r.d.Acquire(t.Context(), claim("k")); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("acquire: %v", err)
	}
}

func TestServerThatIsGone(t *testing.T) {
	// The port of tcpmux, which no socket gets by chance.
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1})
	defer rdb.Close()
	r := rig{rdb: rdb, d: spinlock.New(rdb, nil)}
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
