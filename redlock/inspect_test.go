package redlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
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
	await.Must(t, strategytest.ErrOf(d.Acquire(t.Context(), c)))
	for _, rdb := range nodes.Clients() {
		await.Must(t, rdb.(*redis.Client).Do(t.Context(), "acl", "setuser", "default", "-getrange", "-mget").Err())
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
	found := func(pttl int64, record string) *redisstore.Found {
		f, ok := redisstore.Decode([]any{pttl, record, ""})
		if !ok {
			t.Fatal("not a reply")
		}
		return &f
	}
	a, b, free := found(1000, "a#"), found(1000, "b#"), found(-2, "")
	for name, c := range map[string]struct {
		all    []*redisstore.Found // nil if the node is silent
		unheld bool
	}{
		"a quorum is free":               {[]*redisstore.Found{free, free, nil}, true},
		"the votes are split":            {[]*redisstore.Found{a, b, free}, true},
		"a quorum has a record":          {[]*redisstore.Found{a, a, free}, false},
		"a silent node may have it":      {[]*redisstore.Found{a, free, nil}, false},
		"all that answer have it":        {[]*redisstore.Found{a, a, nil}, false},
		"two records, and a silent node": {[]*redisstore.Found{a, b, nil}, false},
	} {
		s := newSurvey(3)
		for i, f := range c.all {
			if f != nil {
				s.add(i, f, nil)
			}
		}
		if got := s.unheld(); got != c.unheld {
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
	await.Must(t, strategytest.ErrOf(d.Acquire(t.Context(), c)))
	for _, rdb := range nodes.Clients() {
		await.Must(t, rdb.(*redis.Client).ConfigSet(t.Context(), "maxmemory", "1").Err())
	}
	for key, held := range map[string]bool{"k": true, "free": false} {
		other := aClaim(key)
		other.Timeout = c.Timeout
		if _, err := d.Acquire(t.Context(), other); err == nil || errors.Is(err, backend.ErrHeld) != held || backend.Definite(err) != held {
			t.Errorf("%s: got %v, want ErrHeld: %v", key, err, held)
		}
	}
}

// token is as long as the engine's.
const token = "AAAABBBBCCCCDDDDEEEEFF"

// put writes a record of a key to some nodes, for ttl.
func (tr trial) put(t *testing.T, key, record string, ttl time.Duration, nodes ...int) {
	t.Helper()
	for _, i := range nodes {
		await.Must(t, tr.vs[i].Mini.Set(key, record))
		tr.vs[i].Mini.SetTTL(key, ttl)
	}
}

// A key is listed if a quorum has its record, whichever nodes these are.
func TestListOfAQuorum(t *testing.T) {
	try(t, 5, nil, func(t *testing.T, tr trial) {
		tr.put(t, "all", token+"#one", time.Minute, 0, 1, 2, 3, 4)
		tr.put(t, "first", token+"#two", time.Minute, 0, 1, 2)
		tr.put(t, "last", token+"~2#three", time.Minute, 2, 3)
		tr.put(t, "last", token+"~2#three", time.Minute/2, 4)
		tr.put(t, "minority", token+"#four", time.Minute, 1, 2)
		tr.put(t, "split", token+"~2#five", time.Minute, 0, 1)
		tr.put(t, "split", token+"~3#six", time.Minute, 2, 3)
		tr.put(t, "foreign", "value", time.Minute, 0, 1, 2, 3, 4)
		for _, down := range [][]int{nil, {0}, {4}, {0, 3}} {
			for _, i := range down {
				tr.vs[i].Proxy.Down()
			}
			all, err := strategytest.Listed(t.Context(), tr.d, "")
			if err != nil {
				t.Fatalf("without %v: %v", down, err)
			}
			for key, owner := range map[string]string{"all": "one", "first": "two", "last": "three"} {
				s, ok := all[key]
				holders := map[string][]int{"all": {0, 1, 2, 3, 4}, "first": {0, 1, 2}, "last": {2, 3, 4}}[key]
				left := slices.DeleteFunc(holders, func(i int) bool { return slices.Contains(down, i) })
				if want := len(left) >= 3; ok != want || ok && (!s.Held || s.Owner != owner || s.TTL <= 0) {
					t.Errorf("without %v: %s: %+v, listed %t, want %t", down, key, s, ok, want)
				}
				delete(all, key)
			}
			if len(all) > 0 {
				t.Errorf("without %v: %+v", down, all)
			}
			for _, i := range down {
				tr.vs[i].Proxy.Up()
			}
			time.Sleep(time.Second)
		}
		time.Sleep(time.Minute / 2)
		if all, err := strategytest.Listed(t.Context(), tr.d, "last"); len(all) != 0 || err != nil {
			t.Errorf("after the end of one copy of three: %+v, %v", all, err)
		}
	})
}

func TestListInAnOutage(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		for i := range 120 {
			tr.put(t, fmt.Sprint(i), token+"#me", time.Hour, 0, 1, 2)
		}
		tr.vs[1].Proxy.Stall()
		began := time.Now()
		all, err := strategytest.Listed(t.Context(), tr.d, "")
		if err != nil || len(all) != 120 {
			t.Errorf("one of three hangs: %d keys, %v", len(all), err)
		}
		if took := time.Since(began); took > 6*time.Second {
			t.Errorf("one of three hangs: took %v", took)
		}

		tr.vs[2].Proxy.Stall()
		_, err = strategytest.Listed(t.Context(), tr.d, "")
		isOutage(t, "two of three hang", err, "12")

		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		strategytest.Want(t, "cancelled", strategytest.ErrOf(strategytest.Listed(ctx, tr.d, "")), context.Canceled)
	})
}
