package pubsublock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// A Wait of a driver that was opened by URL, whose calls can be broken off,
// ends with its context. The engine releases what the call may have taken.
func TestWaitByURLMayBeLeft(t *testing.T) {
	t.Parallel()
	r := setup(t, nil)
	p := r.Server.Proxy()
	d, err := hasp.Config{Strategy: "pubsublock", Nodes: []string{"redis://" + p.Addr()}}.Driver(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	r.Release(t, mustAcquire(t, r, claim("k"))) // the scripts are known from here on
	c := claim("k")
	c.TTL = time.Hour
	p.Fail(c.Token, faultproxy.LoseReply)
	_, err = d.(backend.Waiter).Wait(t.Context(), c)
	outage(t, "wait whose reply is lost", err)
	r.Release(t, c)

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
	eventually(t, "it asks", func() bool { return p.Pending() == 0 })
	cancel()
	arrives(t, "a cancelled wait", done) // long before its Timeout
}

// A user that may not read must not take that for "not mine".
func TestScriptErrorsAreNotTakenForLoss(t *testing.T) {
	for _, right := range []string{"hlen", "hkeys", "hdel"} {
		r := setup(t, &redistest.Options{Own: true, Real: true})
		c := claim("k")
		r.Acquire(t, c)
		r.Forbid(t, "-"+right)
		if right != "hdel" {
			outage(t, "renew without "+right, r.Renew(t, c))
			c.Owner = "" // so that the release has to look
		}
		outage(t, "release without "+right, r.Driver.Release(t.Context(), c))
	}
	r := setup(t, &redistest.Options{Own: true, Real: true})
	r.Acquire(t, claim("k"))
	r.Forbid(t, "-hlen", "-getrange")
	_, err := r.Driver.Acquire(t.Context(), fenced("free"))
	outage(t, "acquire fenced without getrange", err)
	if _, err := r.Driver.Acquire(t.Context(), claim("k")); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("acquire without hlen: %v", err)
	}
	if s, err := r.Driver.Inspect(t.Context(), "k"); !s.Held || err != nil {
		t.Errorf("inspect without hlen and getrange: %+v, %v", s, err)
	}
}

// A user that may not set terms takes no key, rather than one without an end.
func TestNoLockWithoutAnEnd(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	r.Forbid(t, "-pexpire")
	_, err := r.Driver.Acquire(t.Context(), claim("k"))
	outage(t, "acquire without pexpire", err)
	if n := r.Redis.Exists(t.Context(), "k").Val(); n != 0 {
		t.Error("a key is left")
	}
}
