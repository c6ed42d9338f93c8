package redisstore

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/redistest"
)

// setting takes a hold, in the way of a script.
var setting = NewHold(`
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', 600000)
return 1`)

// eventually repeats f until it returns nil: servers that fail over take a while.
func eventually(t *testing.T, what string, f func(ctx context.Context) error) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		err := f(ctx)
		cancel()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (s *Store) ping(ctx context.Context, key string) error {
	_, err := s.Do(ctx, "exists", key)
	return err
}

func TestSentinel(t *testing.T) {
	t.Parallel()
	set := redistest.StartSentinel(t, nil)
	s, err := open(t, set.URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	first := set.Master()
	if v, err := s.Hold(t.Context(), "set", "k", "v", "px", 600000, "nx"); v != "OK" || err != nil {
		t.Fatalf("got %v, %v", v, err)
	}
	set.Failover()
	// Nothing has failed yet, and nothing need: the sentinels tell.
	topology := s.servers.(*sentinels)
	eventually(t, "switch", func(context.Context) error {
		if at := topology.known(); at == nil || at.addr == first.Addr {
			return fmt.Errorf("still %v", at)
		}
		return nil
	})
	if err := s.ping(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	second := set.Master()
	second.Kill()
	set.Failover()
	eventually(t, "after a kill", func(ctx context.Context) error { return s.ping(ctx, "k") })
	third := set.Master()
	third.Pause()
	set.Failover()
	eventually(t, "after a pause", func(ctx context.Context) error { return s.ping(ctx, "k") })
	third.Resume()
}

func TestCluster(t *testing.T) {
	t.Parallel()
	set := redistest.StartCluster(t, nil)
	s, err := open(t, set.URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if v, err := s.Hold(t.Context(), "set", "k", "v", "px", 600000, "nx"); v != "OK" || err != nil {
		t.Fatalf("got %v, %v", v, err)
	}
	get := func(ctx context.Context) error {
		v, err := s.Do(ctx, "get", "k")
		if err == nil && v != "v" {
			err = fmt.Errorf("got %v", v)
		}
		return err
	}
	finish := set.Move("k")
	if err := get(t.Context()); err != nil {
		t.Errorf("half-way: %v", err)
	}
	finish()
	if err := get(t.Context()); err != nil {
		t.Errorf("moved: %v", err)
	}
	set.Failover("k")
	if err := get(t.Context()); err != nil {
		t.Errorf("failed over: %v", err)
	}
	master := set.Master("k")
	if n, err := master.Client().Wait(t.Context(), 1, time.Minute).Result(); n < 1 || err != nil {
		t.Fatalf("replicas: %d, %v", n, err)
	}
	master.Kill()
	set.Failover("k")
	eventually(t, "after a kill", get)
}
