package etcdlock_test

import (
	"context"
	"errors"
	"os"
	"regexp"
	"strconv"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/etcdtest"
)

func TestConformance(t *testing.T) {
	if !conformance.Child() {
		etcdtest.Need(t)
	}
	t.Parallel()

	// Two servers, because clauses that need a store for themselves run one after another.
	long := regexp.MustCompile("^(restart|leftovers|fence-)")
	for name, want := range map[string]bool{"restarts and leftovers": true, "others": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := harness(t)
			h.Only = func(clause string) bool { return long.MatchString(clause) == want }
			conformance.Run(t, h)
		})
	}
}

// harness is for one etcd process.
func harness(tb testing.TB) conformance.Harness {
	var s *server
	return conformance.Harness{
		Store: func(ctx context.Context) (string, func(), error) {
			all, err := newServers(tb.TempDir(), 1)
			if err != nil {
				return "", nil, err
			}
			s = all[0]
			return s.Client, s.Kill, start(ctx, s)
		},
		Open: open,
		Link: func(_ context.Context, store string) (*conformance.Link, error) { return conformance.TCP(store) },
		Stop: func(context.Context, string) error { s.Kill(); return nil },
		Start: func(ctx context.Context, _ string, data bool) error {
			if !data {
				if err := os.RemoveAll(s.Dir); err != nil {
					return err
				}
			}
			return start(ctx, s)
		},

		// A compaction is what etcd may do at any time.
		Flush: func(ctx context.Context, store string) error {
			return withClient(store, func(c *clientv3.Client) error {
				r, err := c.Get(ctx, "x")
				if err == nil {
					_, err = c.Compact(ctx, r.Header.Revision)
				}
				if errors.Is(err, rpctypes.ErrCompacted) {
					return nil // nothing has changed since the last time
				}
				return err
			})
		},
		Timeout: 4 * time.Second, // an etcd that is one of many processes may take seconds for an answer
		Commands: func(context.Context, string) (int64, error) {
			// Keep-alives have a stream each. The watches share one, so their requests count.
			n, err := sum(s, `(?:grpc_server_started_total\{.*|grpc_server_msg_received_total\{grpc_method="Watch".*)`)
			return int64(n), err
		},
		Cost:    conformance.Cost{Acquire: 2, Renew: 1, Release: 1, Keep: 5, Waiting: 12},
		Entries: entries,
		Cannot:  map[string]string{"fence-data-loss": "an etcd without its data counts its revisions from 1"},
	}
}

func withClient(store string, f func(c *clientv3.Client) error) error {
	c, err := newClient(store)
	if err != nil {
		return err
	}
	defer c.Close()
	return f(c)
}

// entries returns all names and all leases of the store.
func entries(ctx context.Context, store string) (all []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	err = withClient(store, func(c *clientv3.Client) error {
		r, err := c.Get(ctx, "", clientv3.WithPrefix(), clientv3.WithKeysOnly())
		if err != nil {
			return err
		}
		for _, kv := range r.Kvs {
			all = append(all, string(kv.Key))
		}
		l, err := c.Leases(ctx)
		if err != nil {
			return err
		}
		for _, x := range l.Leases {
			all = append(all, "lease "+strconv.FormatInt(int64(x.ID), 16))
		}
		return nil
	})
	return all, err
}
