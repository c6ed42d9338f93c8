package etcdlock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

// TestEvictionCutOff lets a process die between the removal of an entry and the end of its
// lease. The holder must learn of it at its next renewal.
func TestEvictionCutOff(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)[0]
	for what, evict := range map[string]func(d backend.Inspector, c backend.Claim) error{
		"Break":   func(d backend.Inspector, c backend.Claim) error { return d.Break(context.Background(), c.Key) },
		"Release": func(d backend.Inspector, c backend.Claim) error { c.Handle = nil; return release(d, c) },
	} {
		t.Run(what, func(t *testing.T) {
			holder := openDriver(t, s.Client)
			other, meddler := openMeddled(t, s.Client, nil)
			c, kept := take(t, holder, "cut off", 5*time.Minute), take(t, holder, "kept", 5*time.Minute)
			meddler.set(losing("LeaseRevoke"), nil)
			if err := evict(other, c); err == nil {
				t.Errorf("%s returned no error, although the lease was not revoked", what)
			}
			other.Close()

			errs := renewAll(t.Context(), holder, []backend.Claim{c, kept})
			if !errors.Is(errs[0], backend.ErrLost) {
				t.Errorf("renewal after a %s that was cut off: %v, want ErrLost", what, errs[0])
			}
			if errs[1] != nil {
				t.Errorf("renewal of another hold: %v", errs[1])
			}
			if err := release(holder, c); !errors.Is(err, backend.ErrLost) {
				t.Errorf("release after a %s that was cut off: %v, want ErrLost", what, err)
			}
			free(t, holder, kept)
			holder.Close()
			nothingLeft(t, s.Client)
		})
	}
}

// TestKeepUntilIsNotExceeded keeps a key for little longer than a second. A lease of etcd
// lasts for 2 s at least, so the driver must end it.
func TestKeepUntilIsNotExceeded(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)[0]
	d, other := openDriver(t, s.Client), openDriver(t, s.Client)
	var late time.Duration
	for range 5 { // a slow machine may be late now and then
		c := take(t, d, "kept", time.Minute)
		c.KeepUntil = time.Now().Add(1050 * time.Millisecond)
		free(t, d, c)
		next := wants(t, other, "kept").granted(t)
		if late = time.Since(c.KeepUntil); late < 0 {
			t.Fatalf("the key was free %v before KeepUntil", -late)
		}
		free(t, other, next)
		if late < 900*time.Millisecond {
			return
		}
	}
	t.Errorf("the key was free %v after KeepUntil", late)
}

// TestLostFirstRenewal loses the renewal that moves a hold to a lease of the whole term, or
// its reply. Then the hold goes on, and after its release nothing is left.
func TestLostFirstRenewal(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)[0]
	for _, what := range []string{"request", "reply"} {
		for _, then := range []string{"renewed", "released"} {
			t.Run(what+" lost, then "+then, func(t *testing.T) {
				d, meddler := openMeddled(t, s.Client, nil)
				c := waitFor(t, d, "first renewal", 5*time.Minute)
				if what == "request" {
					meddler.set(losing("Txn"), nil)
				} else {
					meddler.set(nil, losing("Txn"))
				}
				if err := renew(d, c); err == nil {
					t.Error("the renewal succeeded")
				}
				meddler.set(nil, nil)
				if then == "renewed" {
					if err := renew(d, c); err != nil {
						t.Errorf("the next renewal: %v", err)
					}
				}
				free(t, d, c)
				d.Close()
				nothingLeft(t, s.Client)
			})
		}
	}
}
