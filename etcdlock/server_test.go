package etcdlock_test

import (
	"context"
	"errors"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/hasplock/hasp/internal/etcdtest"
)

// server is one etcd process.
type server = etcdtest.Server

var (
	newServers   = etcdtest.New   // members of one cluster, which do not run yet
	startServers = etcdtest.Start // a cluster that ends with the test
)

// start starts a server, and waits until it answers.
func start(ctx context.Context, s *server) error {
	if err := s.Start(); err != nil {
		return err
	}
	return s.Healthy(ctx)
}

func leaderOf(tb testing.TB, servers []*server) (leader *server) {
	tb.Helper()
	eventually(tb, "a leader", func() error {
		for _, leader = range servers {
			if leader.IsLeader() {
				return nil
			}
		}
		return errors.New("no leader")
	})
	return leader
}

// pause stops the process, which keeps its connections.
func pause(tb testing.TB, s *server) (resume func()) {
	tb.Helper()
	must := musts(tb)
	must(nil, s.Pause())
	return func() { must(nil, s.Resume()) }
}

// metric returns the sum of the metrics whose lines begin with a pattern.
func metric(tb testing.TB, s *server, pattern string) float64 {
	tb.Helper()
	x, err := sum(s, pattern)
	musts(tb)(x, err)
	return x
}

func sum(s *server, pattern string) (sum float64, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	text, err := s.Metrics(ctx)
	for _, m := range regexp.MustCompile(`(?m)^`+pattern+` (\S+)$`).FindAllStringSubmatch(text, -1) {
		x, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			return 0, err
		}
		sum += x
	}
	return sum, err
}

// hosts returns the addresses of servers, as in a URL.
func hosts(servers []*server) string {
	var all []string
	for _, s := range servers {
		all = append(all, s.Client)
	}
	return strings.Join(all, ",")
}

// newClient returns a plain client of etcd.
func newClient(hosts string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: strings.Split(hosts, ","), Logger: zap.NewNop()})
}

// plainClient returns a plain client of etcd, which ends with the test.
func plainClient(tb testing.TB, hosts string) *clientv3.Client {
	tb.Helper()
	c, err := newClient(hosts)
	musts(tb)(c, err)
	tb.Cleanup(func() { c.Close() })
	return c
}
