package natskv_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/caslock/natskv"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
)

// The suite runs over a server of three that is not always the leader of the bucket.
func TestClusterConformance(t *testing.T) {
	t.Parallel()
	n := &node{}
	h := harness(t, n, "replicas=3")
	h.Stop = nil
	h.Start = nil
	h.Store = func(context.Context) (string, func(), error) {
		*n = *startCluster(t)[1]
		return n.addr, nil, nil
	}
	conformance.Run(t, h)
}

// A read gets an answer while the servers elect a leader.
func TestClusterReadDuringAnElection(t *testing.T) {
	t.Parallel()
	nc, js := startCluster(t)[0].connect(t)
	s := await.Value(natskv.New(t.Context(), js, jetstream.KeyValueConfig{Bucket: "locks"}, false))
	version := await.Value(s.Put(t.Context(), "key", []byte("value"), ""))
	for range 10 {
		const stepDown = "$JS.API.STREAM.LEADER.STEPDOWN.KV_locks"
		await.Value(nc.RequestWithContext(t.Context(), stepDown, nil))
		await.Success(t, "a read", func() error {
			within := await.Timeout(t, time.Second)
			e, err := s.Get(within, "key")
			if errors.Is(err, context.DeadlineExceeded) {
				return err // a server that is the leader no more has got the request
			}
			if err != nil || e.Version != version {
				t.Errorf("Get: version %q, %v; want %q", e.Version, err, version)
			}
			return nil
		})
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
	at := "nats://" + strings.Join(addrs, ",") + "/locks?ttl=30s&timeout=20s"
	c := await.Value(hasp.Open(t.Context(), at, nil))
	defer c.Close()
	lease := await.Value(c.Lock(t.Context(), "kept"))

	for i, n := range all {
		n.stop()
		await.Success(t, fmt.Sprintf("a lock without server %d", i), func() error {
			within := await.Timeout(t, 10*time.Second)
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
