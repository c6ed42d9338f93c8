package etcdlock_test

import (
	"context"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/hasplock/hasp/internal/etcdtest"
)

// server is one etcd process.
type server struct {
	*etcdtest.Server

	mu  sync.Mutex // guards was
	was int64      // messages that the processes before have received
}

// newServers returns n members of one cluster, which do not run yet.
func newServers(dir string, n int, args ...string) (all []*server, err error) {
	members, err := etcdtest.New(dir, n, args...)
	for _, m := range members {
		all = append(all, &server{Server: m})
	}
	return all, err
}

// startServers starts a cluster that ends with the test.
func startServers(tb testing.TB, n int, args ...string) (all []*server) {
	tb.Helper()
	for _, m := range etcdtest.Start(tb, n, args...) {
		all = append(all, &server{Server: m})
	}
	return all
}

// Kill ends the process at once.
func (s *server) Kill() {
	if n, err := s.received(); err == nil {
		s.mu.Lock()
		s.was = n
		s.mu.Unlock()
	}
	s.Server.Kill()
}

// pause stops the process, which keeps its connections.
func (s *server) pause(tb testing.TB) {
	tb.Helper()
	if err := s.Pause(); err != nil {
		tb.Fatal(err)
	}
}

// resume ends a pause.
func (s *server) resume(tb testing.TB) {
	tb.Helper()
	if err := s.Resume(); err != nil {
		tb.Fatal(err)
	}
}

// received returns how many messages of clients the server has received so far.
func (s *server) received() (int64, error) {
	n, err := s.sum(`grpc_server_msg_received_total\{.*\}`)
	s.mu.Lock()
	defer s.mu.Unlock()
	return int64(n) + s.was, err
}

// metric returns the sum of the metrics whose lines begin with a pattern.
func metric(tb testing.TB, s *server, pattern string) float64 {
	tb.Helper()
	sum, err := s.sum(pattern)
	if err != nil {
		tb.Fatal(err)
	}
	return sum
}

func (s *server) sum(pattern string) (sum float64, err error) {
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
