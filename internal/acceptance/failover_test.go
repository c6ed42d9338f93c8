package acceptance

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// pair is a Client that holds a key and a Client that wants it.
type pair struct {
	strategy, key string
	holder, other *hasp.Client
	lease         *hasp.Lease
}

// pairs opens a pair for each strategy on a set of servers, with params. Each pair has another key.
// All keys are in one slot.
func pairs(t *testing.T, url, params string, opts ...hasp.Option) (all []*pair) {
	t.Helper()
	for _, strategy := range onRedis() {
		p := &pair{strategy: strategy, key: "{k}" + strategy + params}
		for _, c := range []**hasp.Client{&p.holder, &p.other} {
			eventually(t, strategy+": open", func() (err error) {
				*c, err = hasp.Open(t.Context(), strategy+"+"+url+"?"+params, nil)
				return err
			})
			t.Cleanup(func() { (*c).Close() })
		}
		eventually(t, strategy+": lock", func() (err error) {
			p.lease, err = p.holder.TryLock(t.Context(), p.key, opts...)
			return err
		})
		t.Cleanup(func() { p.lease.Unlock(context.Background()) })
		all = append(all, p)
	}
	return all
}

// goesOn fails the test unless the lease can be renewed and the other Client does not get the key.
func (p *pair) goesOn(t *testing.T, what string) {
	t.Helper()
	what = p.strategy + ": " + what
	eventually(t, what, func() error {
		err := p.lease.Extend(t.Context(), time.Minute)
		if errors.Is(err, hasp.ErrLost) {
			t.Fatalf("%s: %v", what, err)
		}
		return err
	})
	p.excludes(t, what)
}

func (p *pair) excludes(t *testing.T, what string) {
	t.Helper()
	eventually(t, what, func() error {
		lease, err := p.other.TryLock(t.Context(), p.key)
		if err == nil {
			lease.Unlock(t.Context())
			t.Fatalf("%s: two hold the key", what)
		}
		if !errors.Is(err, hasp.ErrHeld) {
			return err
		}
		return nil
	})
}

func TestLeasesSurviveAFailoverOrAreToldLost(t *testing.T) {
	t.Parallel()
	set := redistest.StartSentinel(t, nil)
	survive := pairs(t, set.URL(), "timeout=1s&replicas=2", hasp.WithTTL(10*time.Minute))
	set.Failover()
	for _, p := range survive {
		p.goesOn(t, "after a failover")
	}
	dead := set.Master()
	dead.Kill()
	set.Failover()
	for _, p := range survive {
		p.excludes(t, "after a kill")
	}

	// The failover loses a lock that no replica has. So pause the replica before the lock is taken.
	master := set.Master()
	replica := set.Servers[0]
	for _, srv := range set.Servers {
		if srv != master && srv != dead {
			replica = srv
		}
	}
	replica.Pause()
	defer replica.Resume()
	rdb := master.Client()
	eventually(t, "replicas", func() error {
		rdb.ClientKillByFilter(t.Context(), "type", "replica")
		info := rdb.Info(t.Context(), "replication").Val()
		if !strings.Contains(info, "connected_slaves:0") {
			return fmt.Errorf("%s", info)
		}
		return nil
	})
	lost := pairs(t, set.URL(), "timeout=1s", hasp.WithTTL(10*time.Second))
	master.Kill()
	replica.Resume()
	set.Failover()
	for _, p := range lost {
		select {
		case <-p.lease.Context().Done():
			if err := context.Cause(p.lease.Context()); !errors.Is(err, hasp.ErrLost) {
				t.Errorf("%s: ended by %v", p.strategy, err)
			}
		case <-time.After(time.Minute):
			t.Errorf("%s: the holder did not learn of the loss", p.strategy)
		}
		eventually(t, p.strategy, func() error {
			lease, err := p.other.TryLock(t.Context(), p.key)
			if err == nil {
				err = lease.Unlock(t.Context())
			}
			return err
		})
	}
}

func TestLeasesSurviveWhatHappensToACluster(t *testing.T) {
	t.Parallel()
	set := redistest.StartCluster(t, nil)
	all := pairs(t, set.URL(), "timeout=1s&replicas=1", hasp.WithTTL(10*time.Minute))
	finish := set.Move("{k}")
	for _, p := range all {
		// During the move, a server may refuse a script whose keys do not exist. Such a refusal
		// must count as an outage, and not as a loss.
		if err := p.lease.Extend(t.Context(), time.Minute); errors.Is(err, hasp.ErrLost) {
			t.Errorf("%s: half-way: %v", p.strategy, err)
		}
		if _, err := p.other.TryLock(t.Context(), p.key); err == nil {
			t.Errorf("%s: half-way: two hold the key", p.strategy)
		}
	}
	finish()
	for _, p := range all {
		p.goesOn(t, "moved")
	}
	set.Failover("{k}")
	for _, p := range all {
		p.goesOn(t, "failed over")
	}
	set.Master("{k}").Kill()
	set.Failover("{k}")
	for _, p := range all {
		p.excludes(t, "after a kill")
		eventually(t, p.strategy+": unlock", func() error {
			err := p.lease.Unlock(t.Context())
			if errors.Is(err, hasp.ErrLost) || errors.Is(err, hasp.ErrReleased) {
				t.Errorf("%s: unlock: %v", p.strategy, err)
				return nil
			}
			return err
		})
	}
}
