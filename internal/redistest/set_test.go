package redistest

import (
	"errors"
	"testing"

	"github.com/redis/go-redis/v9"
)

func TestSentinelFailsOver(t *testing.T) {
	for name, o := range map[string]*Options{
		"plain":  nil,
		"secure": {Mutual: true, User: "ann", Password: "s3cret&", SentinelUser: "sen", SentinelPassword: "o/ther"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := StartSentinel(t, o)
			old := s.Master()
			if err := old.Client().Set(t.Context(), "k", "v", 0).Err(); err != nil {
				t.Fatal(err)
			}
			if n, err := old.Client().Wait(t.Context(), 2, 0).Result(); n != 2 || err != nil {
				t.Errorf("%d replicas, %v", n, err)
			}
			old.Kill()
			s.Failover()
			if v, err := s.Master().Client().Get(t.Context(), "k").Result(); v != "v" {
				t.Errorf("after the failover: %q, %v", v, err)
			}
		})
	}
}

func TestClusterFailsOverAndMovesSlots(t *testing.T) {
	for name, o := range map[string]*Options{
		"plain":  nil,
		"secure": {Mutual: true, User: "ann", Password: "s3cret&"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := StartCluster(t, o)
			first := c.Master("k")
			if err := first.Client().Set(t.Context(), "k", "v", 0).Err(); err != nil {
				t.Fatal(err)
			}
			finish := c.Move("k")
			if _, ok := redis.IsAskError(first.Client().Get(t.Context(), "k").Err()); !ok {
				t.Error("no ASK half-way")
			}
			finish()
			if _, ok := redis.IsMovedError(first.Client().Get(t.Context(), "k").Err()); !ok {
				t.Error("not MOVED in the end")
			}
			second := c.Master("k")
			c.Failover("k")
			third := c.Master("k")
			if v, err := third.Client().Get(t.Context(), "k").Result(); v != "v" || third == second {
				t.Errorf("after a failover from %s to %s: %q, %v", second.Addr, third.Addr, v, err)
			}
			third.Kill()
			c.Failover("k")
			if err := c.Master("k").Client().Get(t.Context(), "k").Err(); err != nil && !errors.Is(err, redis.Nil) {
				t.Errorf("after a takeover: %v", err)
			}
		})
	}
}
