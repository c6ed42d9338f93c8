package acceptance

import (
	"errors"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// If too few replicas have a hold, it is neither granted nor renewed nor handed over. The caller
// gets an outage, because a failover may lose the hold.
func TestNothingIsHeldThatTooFewReplicasHave(t *testing.T) {
	t.Parallel()
	set := redistest.StartSentinel(t, nil)
	all := pairs(t, set.URL(), "timeout=3s&replicas=2", hasp.WithTTL(10*time.Minute))
	outage := func(p *pair, what string, err error) {
		t.Helper()
		if err == nil || errors.Is(err, hasp.ErrHeld) || errors.Is(err, hasp.ErrLost) {
			t.Errorf("%s: %s: got %v, want an outage", p.strategy, what, err)
		}
	}
	waits := make([]chan error, len(all))
	for i, p := range all {
		waits[i] = make(chan error, 1)
		go func() {
			lease, err := p.other.Lock(t.Context(), p.key)
			if err == nil {
				lease.Unlock(t.Context())
			}
			waits[i] <- err
		}()
	}
	time.Sleep(100 * time.Millisecond) // so that most of them wait

	for _, srv := range set.Servers {
		if srv != set.Master() {
			srv.Pause()
			defer srv.Resume()
		}
	}
	for i, p := range all {
		outage(p, "extend", p.lease.Extend(t.Context(), time.Hour))
		_, err := p.other.TryLock(t.Context(), p.key+" that is free")
		outage(p, "lock", err)
		if err := p.lease.Unlock(t.Context()); err != nil {
			t.Errorf("%s: unlock, which needs no replicas: %v", p.strategy, err)
		}
		outage(p, "a wait", <-waits[i])
	}
	for _, srv := range set.Servers {
		srv.Resume()
	}
	for _, p := range all {
		eventually(t, p.strategy, func() error {
			lease, err := p.other.TryLock(t.Context(), p.key)
			if err != nil {
				return err
			}
			err = lease.Extend(t.Context(), time.Hour)
			return errors.Join(err, lease.Unlock(t.Context()))
		})
	}
}
