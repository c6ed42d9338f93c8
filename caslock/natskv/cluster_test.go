package natskv_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/natskv"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
)

// The suite runs over a server of three that is not always the leader of the bucket.
func TestClusterConformance(t *testing.T) {
	t.Parallel()
	n := &node{}
	h := harness(n, "replicas=3")
	h.Store = func(context.Context) (string, func(), error) {
		*n = *startCluster(t)[1]
		return n.addr, nil, nil
	}
	conformance.Run(t, h)
}

// Of writers that meet at one version through three servers, one wins. Then each server sees the
// value of the winner.
func TestClusterAtomic(t *testing.T) {
	t.Parallel()
	var stores []*natskv.Store
	for _, n := range startCluster(t) {
		_, js := n.connect(t)
		s := await.Value(natskv.New(t.Context(), js, jetstream.KeyValueConfig{Bucket: "locks"}, false))
		stores = append(stores, s)
	}

	version := ""
	for round := range 30 {
		errs := make([]error, 24)
		versions := make([]string, len(errs))
		var wg sync.WaitGroup
		for i := range errs {
			s := stores[i%len(stores)]
			wg.Go(func() {
				versions[i], errs[i] = s.Put(t.Context(), "key", fmt.Append(nil, round, i), version)
			})
		}
		wg.Wait()

		winners := 0
		for i, err := range errs {
			switch {
			case err == nil:
				winners++
				version = versions[i]
			case !errors.Is(err, caslock.ErrConflict):
				t.Errorf("round %d: %v", round, err)
			}
		}
		if winners != 1 {
			t.Errorf("round %d: %d winners", round, winners)
		}
		for i, s := range stores {
			if e, err := s.Get(t.Context(), "key"); err != nil || e.Version != version {
				t.Errorf("round %d: server %d has %q, %v; want %q", round, i, e.Version, err, version)
			}
		}
	}
}

// A lease outlives the loss of each server, one after another. The URL names all servers.
func TestClusterServersRestart(t *testing.T) {
	t.Parallel()
	all := startCluster(t)
	var addrs []string
	for _, n := range all {
		addrs = append(addrs, n.addr)
	}
	at := "nats://" + strings.Join(addrs, ",") + "/locks?ttl=30s"
	c := await.Value(hasp.Open(t.Context(), at, nil))
	defer c.Close()
	lease := await.Value(c.Lock(t.Context(), "kept"))

	for i, n := range all {
		n.stop()
		await.Success(t, fmt.Sprintf("a lock without server %d", i), func() error {
			within, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			return hasp.Do(within, c, fmt.Sprint("key", i), func(context.Context, *hasp.Lease) error {
				return nil
			})
		})
		if _, err := c.TryLock(t.Context(), "kept"); !errors.Is(err, hasp.ErrHeld) {
			t.Errorf("without server %d: TryLock of a held key: %v", i, err)
		}

		await.Must(t, n.start())
		await.Until(t, fmt.Sprintf("server %d has caught up", i), func() bool {
			return n.s.JetStreamIsCurrent() && n.s.JetStreamIsStreamCurrent("$G", "KV_locks")
		})
	}
	if err := lease.Unlock(t.Context()); err != nil {
		t.Errorf("Unlock after all servers were restarted: %v", err)
	}
}
