package redlock_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/redlock"
)

// plain returns redsync without hasp, on the same nodes.
func plain(nodes []redis.UniversalClient) *redsync.Redsync {
	pools := make([]redsyncredis.Pool, len(nodes))
	for i, rdb := range nodes {
		pools[i] = goredis.NewPool(rdb)
	}
	return redsync.New(pools...)
}

// beside runs f in virtual time with a Client and with plain redsync, on three
// nodes.
func beside(t *testing.T, f func(t *testing.T, c *hasp.Client, rs *redsync.Redsync, vs redistest.VirtualServers)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		vs := redistest.VirtualNodes(t, 3)
		c := hasp.New(redlock.New(vs.Clients(), nil), nil)
		defer c.Close()
		f(t, c, plain(vs.Clients()), vs)
	})
}

// held fails the test unless the key is held, for hasp and for redsync.
func held(t *testing.T, what string, c *hasp.Client, rs *redsync.Redsync, key string) {
	t.Helper()
	if _, err := c.TryLock(t.Context(), key); !errors.Is(err, hasp.ErrHeld) {
		t.Errorf("%s: hasp: got %v, want ErrHeld", what, err)
	}
	var taken *redsync.ErrTaken
	if err := rs.NewMutex(key, redsync.WithExpiry(2*time.Minute)).TryLock(); !errors.As(err, &taken) {
		t.Errorf("%s: redsync: got %v, want ErrTaken", what, err)
	}
}

func TestRedsyncAndHaspExcludeEachOther(t *testing.T) {
	nodes := redistest.StartNodes(t, 3, nil)
	c := hasp.New(redlock.New(nodes.Clients(), nil), &hasp.Options{Timeout: 20 * time.Second})
	defer c.Close()
	rs := plain(nodes.Clients())
	for _, key := range []string{"orders", "app:{orders}:1", "a}b", "a{b"} {
		m := rs.NewMutex(key, redsync.WithExpiry(2*time.Minute))
		for range 2 {
			if err := m.TryLock(); err != nil {
				t.Fatalf("redsync cannot take a free key: %v", err)
			}
			held(t, "redsync holds it", c, rs, key)
			if s, err := c.Inspect(t.Context(), key); err != nil || !s.Held || s.Owner != "" || s.TTL <= time.Minute || s.TTL > 2*time.Minute {
				t.Errorf("inspect of what redsync holds: %+v, %v", s, err)
			}
			if ok, err := m.Extend(); !ok {
				t.Errorf("redsync cannot extend its hold: %v", err)
			}
			if ok, err := m.Unlock(); !ok {
				t.Errorf("redsync cannot free its hold: %v", err)
			}

			lease, err := c.TryLock(t.Context(), key, hasp.WithFence())
			if err != nil {
				t.Fatalf("hasp cannot take what redsync freed: %v", err)
			}
			held(t, "hasp holds it", c, rs, key)
			// The former hold of redsync is gone.
			if ok, _ := m.Extend(); ok {
				t.Error("redsync extends what hasp holds")
			}
			if ok, _ := m.Unlock(); ok {
				t.Error("redsync frees what hasp holds")
			}
			if err := lease.Extend(t.Context(), time.Minute); err != nil {
				t.Errorf("extend: %v", err)
			}
			if err := lease.Unlock(t.Context()); err != nil {
				t.Errorf("unlock: %v", err)
			}
		}
	}
	eventually(t, "nothing is left", func() error {
		all, err := nodes.Keys(t.Context())
		for i, keys := range all {
			for _, key := range keys {
				if !strings.HasPrefix(key, "hasp:{") { // a mark or a fence
					err = errors.Join(err, fmt.Errorf("node %d keeps %s", i, key))
				}
			}
		}
		return err
	})
}

func TestRedsyncAndHaspFollowEachOther(t *testing.T) {
	beside(t, func(t *testing.T, c *hasp.Client, rs *redsync.Redsync, _ redistest.VirtualServers) {
		m := rs.NewMutex("k", redsync.WithExpiry(time.Minute), redsync.WithTries(1000))
		for _, after := range []time.Duration{10 * time.Millisecond, 3210 * time.Millisecond} {
			if err := m.Lock(); err != nil {
				t.Fatal(err)
			}
			had := make(chan time.Time, 1)
			var lease *hasp.Lease
			go func() {
				var err error
				if lease, err = c.Lock(t.Context(), "k"); err != nil {
					t.Error(err)
				}
				had <- time.Now()
			}()
			time.Sleep(after)
			if ok, err := m.Unlock(); !ok {
				t.Fatal(err)
			}
			// Redsync publishes nothing, so hasp polls.
			freed := time.Now()
			if took := (<-had).Sub(freed); took < 0 || took > 1100*time.Millisecond {
				t.Errorf("hasp has what redsync freed %v later", took)
			}

			go func() {
				if err := m.Lock(); err != nil {
					t.Error(err)
				}
				had <- time.Now()
			}()
			time.Sleep(after)
			if err := lease.Unlock(t.Context()); err != nil {
				t.Error(err)
			}
			freed = time.Now()
			if took := (<-had).Sub(freed); took < 0 || took > 250*time.Millisecond {
				t.Errorf("redsync has what hasp freed %v later", took)
			}
			if ok, err := m.Unlock(); !ok {
				t.Fatal(err)
			}
		}
	})
}

func TestRedsyncKeepsWhatItExtends(t *testing.T) {
	beside(t, func(t *testing.T, c *hasp.Client, rs *redsync.Redsync, _ redistest.VirtualServers) {
		const term = 20 * time.Second
		m := rs.NewMutex("k", redsync.WithExpiry(term))
		if err := m.Lock(); err != nil {
			t.Fatal(err)
		}
		had := make(chan time.Time, 1)
		go func() {
			lease, err := c.Lock(t.Context(), "k")
			if err != nil {
				t.Error(err)
			}
			had <- time.Now()
			time.Sleep(time.Second)
			if ok, _ := m.Extend(); ok {
				t.Error("redsync extends what it has lost")
			}
			if ok, _ := m.Unlock(); ok {
				t.Error("redsync frees what it has lost")
			}
			if err := lease.Unlock(t.Context()); err != nil {
				t.Error(err)
			}
			had <- time.Now()
		}()
		var last time.Time
		for range 10 {
			time.Sleep(term - time.Second)
			if ok, err := m.Extend(); !ok {
				t.Fatalf("extend: %v", err)
			}
			last = time.Now()
		}
		if got := (<-had).Sub(last); got < term || got > term+1100*time.Millisecond {
			t.Errorf("hasp has the key %v after its last extension by redsync, want %v", got, term)
		}
		<-had
	})
}

func TestHaspKeepsWhatItRenews(t *testing.T) {
	beside(t, func(t *testing.T, c *hasp.Client, rs *redsync.Redsync, vs redistest.VirtualServers) {
		const term = 20 * time.Second
		lease, err := c.Lock(t.Context(), "k", hasp.WithTTL(term))
		if err != nil {
			t.Fatal(err)
		}
		for range 10 {
			time.Sleep(term)
			held(t, "renewed", c, rs, "k")
		}
		if err := lease.Err(); err != nil {
			t.Fatal(err)
		}
		// If hasp is cut off, it cannot renew, and redsync gets the key after one term.
		ended := lease.Context()
		other := plain(direct(vs)).NewMutex("k", redsync.WithExpiry(time.Minute), redsync.WithTries(1000))
		began := time.Now()
		for _, v := range vs {
			v.Proxy.Stall()
		}
		if err := other.Lock(); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > term+250*time.Millisecond {
			t.Errorf("redsync has what nobody renews after %v", took)
		}
		if ended.Err() == nil || !errors.Is(lease.Err(), hasp.ErrLost) {
			t.Errorf("the lease that redsync has taken over: %v", lease.Err())
		}
		for _, v := range vs {
			v.Proxy.Flow()
		}
		if err := lease.Unlock(t.Context()); !errors.Is(err, hasp.ErrLost) {
			t.Errorf("unlock of a lost lease: %v", err)
		}
		time.Sleep(time.Second)
		if ok, err := other.Extend(); !ok {
			t.Errorf("redsync has lost its hold to an unlock of hasp: %v", err)
		}
	})
}

// direct returns clients that do not use the proxies.
func direct(vs redistest.VirtualServers) []redis.UniversalClient {
	all := make([]redis.UniversalClient, len(vs))
	for i, v := range vs {
		all[i] = v.Direct()
	}
	return all
}

// Each has its majority without the node that is down.
func TestRedsyncAndHaspExcludeEachOtherWithoutAMinority(t *testing.T) {
	beside(t, func(t *testing.T, c *hasp.Client, rs *redsync.Redsync, vs redistest.VirtualServers) {
		use := func(what string) {
			t.Helper()
			lease, err := c.TryLock(t.Context(), "k")
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			if err := lease.Unlock(t.Context()); err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			time.Sleep(time.Second) // for the last of the nodes
		}
		use("all are there")
		for i, v := range vs {
			v.Kill()
			m := rs.NewMutex("k", redsync.WithExpiry(time.Minute))
			if err := m.TryLock(); err != nil {
				t.Fatalf("without node %d: %v", i, err)
			}
			if _, err := c.TryLock(t.Context(), "k"); !errors.Is(err, hasp.ErrHeld) {
				t.Errorf("without node %d: redsync holds the key, and hasp hears %v", i, err)
			}
			if ok, err := m.Unlock(); !ok {
				t.Fatalf("without node %d: %v", i, err)
			}
			lease, err := c.TryLock(t.Context(), "k")
			if err != nil {
				t.Fatalf("without node %d: %v", i, err)
			}
			if err := m.TryLock(); err == nil {
				t.Errorf("without node %d: hasp holds the key, and redsync takes it", i)
			}
			if err := lease.Unlock(t.Context()); err != nil {
				t.Errorf("without node %d: %v", i, err)
			}
			time.Sleep(time.Second)
			v.Start(true)
			for range 3 { // connections to it that are dead are found out first
				use("it is back")
			}
			time.Sleep(redlock.DefaultMaxTTL + 2*time.Second)
		}
	})
}
