package redlock

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
)

// If the caller cancels before any node has answered, the error is the context's.
func TestACancelledInspectIsNoOutage(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		for _, v := range tr.vs {
			v.Proxy.Stall()
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		if _, err := tr.d.Inspect(ctx, "k"); err != context.DeadlineExceeded {
			t.Errorf("got %v, want the context's error", err)
		}
		took(t, "Inspect", began, time.Second)

		_, err := tr.d.Inspect(t.Context(), "k")
		isOutage(t, "Inspect that waits", err, "012")
	})
}

// A node that refuses to read the key must not report a lost hold.
func TestScriptErrorsAreNotTakenForLoss(t *testing.T) {
	nodes := redistest.StartNodes(t, 3, &redistest.Options{Own: true, Real: true})
	d := drives(t, nodes.Clients(), nil)
	c := aFenced("k")
	c.TTL, c.Timeout = time.Minute, 10*time.Second
	if _, err := d.Acquire(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	for _, rdb := range nodes.Clients() {
		if err := rdb.(*redis.Client).Do(t.Context(), "acl", "setuser", "default", "-getrange", "-mget").Err(); err != nil {
			t.Fatal(err)
		}
	}
	other := aFenced("other")
	other.Timeout = c.Timeout
	_, err := d.Acquire(t.Context(), other)
	for what, err := range map[string]error{"renew": renewOne(d, c, c.Timeout), "release": d.Release(t.Context(), c), "acquire": err} {
		if err == nil || backend.Definite(err) || strings.Contains(err.Error(), "no fence") {
			t.Errorf("%s: got %v, want an outage", what, err)
		}
	}
}

// A key has no holder if no record can have a quorum. A node that is silent may have
// a copy of any record.
func TestAKeyHasNoHolderIfNoRecordCanHaveAQuorum(t *testing.T) {
	found := func(pttl int64, record string) report {
		f, ok := redisstore.Decode([]any{pttl, record, ""})
		if !ok {
			t.Fatal("not a reply")
		}
		return report{found: []redisstore.Found{f}}
	}
	a, b, free, silent := found(1000, "a#"), found(1000, "b#"), found(-2, ""), report{err: errors.New("silent")}
	d := &driver{nodes: make([]*node, 3)}
	for name, c := range map[string]struct {
		all    []report
		unheld bool
	}{
		"a quorum is free":               {[]report{free, free, silent}, true},
		"the votes are split":            {[]report{a, b, free}, true},
		"a quorum has a record":          {[]report{a, a, free}, false},
		"a silent node may have it":      {[]report{a, free, silent}, false},
		"all that answer have it":        {[]report{a, a, silent}, false},
		"two records, and a silent node": {[]report{a, b, silent}, false},
	} {
		for i := range c.all {
			c.all[i].i = i
		}
		if got := d.sum(c.all, 0, false).unheld(); got != c.unheld {
			t.Errorf("%s: unheld is %v", name, got)
		}
	}
}

// A server without memory refuses each SET. A key that is held is still reported as held, and a
// free one as an outage.
func TestAHeldKeyOnServersWithoutMemory(t *testing.T) {
	nodes := redistest.StartNodes(t, 3, &redistest.Options{Own: true, Real: true})
	d := drives(t, nodes.Clients(), nil)
	c := aClaim("k")
	c.TTL, c.Timeout = time.Minute, 10*time.Second
	if _, err := d.Acquire(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	for _, rdb := range nodes.Clients() {
		if err := rdb.(*redis.Client).ConfigSet(t.Context(), "maxmemory", "1").Err(); err != nil {
			t.Fatal(err)
		}
	}
	for key, held := range map[string]bool{"k": true, "free": false} {
		other := aClaim(key)
		other.Timeout = c.Timeout
		if _, err := d.Acquire(t.Context(), other); err == nil || errors.Is(err, backend.ErrHeld) != held || backend.Definite(err) != held {
			t.Errorf("%s: got %v, want ErrHeld: %v", key, err, held)
		}
	}
}
