package faultproxy_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestProxyFaults(t *testing.T) {
	s := redistest.Start(t, &redistest.Options{Own: true})
	p := s.Proxy()
	o := s.ClientOptions()
	o.Addr, o.MaxRetries, o.ContextTimeoutEnabled = p.Addr(), -1, true
	rdb := redis.NewClient(o)
	defer rdb.Close()
	direct := s.Client()
	exists := func(key string) bool { return direct.Exists(t.Context(), key).Val() == 1 }
	setWithin := func(key string, d time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), d)
		defer cancel()
		return rdb.Set(ctx, key, "v", 0).Err()
	}
	const hung, long = 500 * time.Millisecond, time.Minute
	set := func(key string) error { return setWithin(key, long) }
	arrives := func(key string) { await.Until(t, key, func() bool { return exists(key) }) }

	if err := set("warm"); err != nil { // the connection is there
		t.Fatal(err)
	}
	for fault, carriedOut := range map[faultproxy.Fault]bool{faultproxy.LoseReply: true, faultproxy.HangReply: true, faultproxy.LoseRequest: false} {
		key := string(rune('a' + int(fault)))
		p.Fail("set "+key, fault)
		within := long
		if fault == faultproxy.HangReply {
			within = hung
		}
		if err := setWithin(key, within); err == nil {
			t.Errorf("fault %d: no error", fault)
		}
		if carriedOut {
			arrives(key)
		} else if exists(key) {
			t.Errorf("fault %d: carried out", fault)
		}
		if err := set(key); err != nil {
			t.Errorf("after fault %d: %v", fault, err)
		}
	}

	p.Fail("set held", faultproxy.HoldRequest)
	if err := setWithin("held", hung); err == nil || exists("held") {
		t.Errorf("held: %v, exists %v", err, exists("held"))
	}
	await.Until(t, "it is held", func() bool { return p.Pending() == 0 })
	p.Release()
	arrives("held")

	p.Down()
	if err := set("x"); err == nil {
		t.Error("no error while down")
	}
	p.Up()
	p.Commands()
	if err := set("counted"); err != nil {
		t.Error(err)
	}
	if n := p.Count(); n == 0 {
		t.Error("nothing was counted")
	}
	if got := p.Commands(); len(got) != 1 || got[0] != "set counted v" {
		t.Errorf("commands: %q", got)
	}
	if n := p.Pending(); n != 0 {
		t.Errorf("%d faults left", n)
	}
}

func TestOneDirectionStallsAndBytesTrickle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := redistest.Virtual(t)
		rdb, direct := v.Client(), v.Direct()
		set := func(key string) error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			return rdb.Set(ctx, key, "v", 0).Err()
		}
		for name, c := range map[string]struct {
			stall   func()
			arrives int64
		}{"requests": {v.Proxy.StallRequests, 0}, "replies": {v.Proxy.StallReplies, 1}} {
			if err := set("warm"); err != nil {
				t.Fatal(err)
			}
			c.stall()
			if err := set(name); err == nil {
				t.Errorf("%s stalled: no error", name)
			}
			if n := direct.Exists(t.Context(), name).Val(); n != c.arrives {
				t.Errorf("%s stalled: the server has %d of 1 key", name, n)
			}
			v.Proxy.Flow()
		}
		if err := set("warm"); err != nil {
			t.Fatal(err)
		}
		v.Proxy.Trickle(time.Minute)
		begin := time.Now()
		if err := set("slow"); err != nil {
			t.Error(err)
		}
		if d := time.Since(begin); d < 2*time.Minute {
			t.Errorf("a request and its reply took %v, want a minute each", d)
		}
	})
}
