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

// After Elect(true), a set replaces a master that does not answer, without Failover.
func TestSetsElectByThemselves(t *testing.T) {
	type set interface {
		Elect(bool)
		Elected(*Server, []string)
		Settled()
	}
	elect := func(t *testing.T, s set, master func() *Server) {
		t.Parallel()
		old := master()
		s.Elect(true)
		old.Pause()
		s.Elected(old, []string{old.Addr})
		old.Resume()
		s.Elect(false)
		s.Settled()
		if now := master(); now == old {
			t.Errorf("%s is the master again", old.Addr)
		}
		old.Demoted()
	}
	t.Run("sentinel", func(t *testing.T) {
		s := StartSentinel(t, nil)
		elect(t, s, s.Master)
	})
	t.Run("cluster", func(t *testing.T) {
		c := StartCluster(t, nil)
		elect(t, c, func() *Server { return c.Master("k") })
	})
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
