package etcdlock_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// server is one etcd process.
type server struct {
	index              int    // in the cluster
	name, client, peer string // the addresses are host:port
	dir                string
	args               []string

	mu  sync.Mutex // guards all below
	cmd *exec.Cmd  // nil if it does not run
	log *os.File
	was int64 // messages that the processes before have received
}

// etcdBinary returns the etcd to test with: the file that HASP_TEST_ETCD names, or the one
// that is installed.
func etcdBinary() string {
	if file := os.Getenv("HASP_TEST_ETCD"); file != "" && file != "required" {
		return file
	}
	return "etcd"
}

// needEtcd skips the test if no etcd is installed.
func needEtcd(tb testing.TB) {
	tb.Helper()
	if _, err := exec.LookPath(etcdBinary()); err == nil {
		return
	}
	if os.Getenv("HASP_TEST_ETCD") != "" {
		tb.Fatalf("%s is not installed: apt-get install etcd-server", etcdBinary())
	}
	tb.Skip("no etcd is installed: apt-get install etcd-server")
}

// freePort returns a port of the loopback that nobody listens on now.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

// newServers returns n members of one cluster, which do not run yet.
func newServers(dir string, n int, args ...string) ([]*server, error) {
	var all []*server
	var cluster []string
	for i := range n {
		client, err1 := freePort()
		peer, err2 := freePort()
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		s := &server{index: i, name: fmt.Sprint("m", i), client: client, peer: peer, dir: filepath.Join(dir, fmt.Sprint("m", i))}
		all = append(all, s)
		cluster = append(cluster, s.name+"=http://"+peer)
	}
	for _, s := range all {
		s.args = append([]string{"--name", s.name, "--data-dir", s.dir,
			"--listen-client-urls", "http://" + s.client, "--advertise-client-urls", "http://" + s.client,
			"--listen-peer-urls", "http://" + s.peer, "--initial-advertise-peer-urls", "http://" + s.peer,
			"--initial-cluster", strings.Join(cluster, ","), "--initial-cluster-state", "new",
			"--unsafe-no-fsync", "--logger=zap", "--log-level=error"}, args...)
	}
	return all, nil
}

// start starts the process and does not wait until it answers.
func (s *server) start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	log, err := os.OpenFile(s.dir+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	s.log = log
	cmd := exec.Command(etcdBinary(), s.args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	s.cmd = cmd
	return nil
}

// healthy waits until the member answers and has a leader.
func (s *server) healthy(ctx context.Context) error {
	for {
		ask, cancel := context.WithTimeout(ctx, time.Second)
		req, _ := http.NewRequestWithContext(ask, "GET", "http://"+s.client+"/health", nil)
		r, err := http.DefaultClient.Do(req)
		if err == nil {
			r.Body.Close()
		}
		cancel()
		if err == nil && r.StatusCode == http.StatusOK {
			return nil
		}
		select {
		case <-ctx.Done():
			out, _ := os.ReadFile(s.dir + ".log")
			return fmt.Errorf("etcd %s does not answer: %w: %s", s.name, ctx.Err(), out)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// kill ends the process at once.
func (s *server) kill() {
	if n, err := s.received(); err == nil {
		s.mu.Lock()
		s.was = n
		s.mu.Unlock()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd == nil {
		return
	}
	s.cmd.Process.Signal(syscall.SIGCONT)
	s.cmd.Process.Kill()
	s.cmd.Wait()
	s.log.Close()
	s.cmd = nil
}

// signal sends a signal to the process.
func (s *server) signal(tb testing.TB, sig syscall.Signal) {
	tb.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.cmd.Process.Signal(sig); err != nil {
		tb.Fatal(err)
	}
}

var receivedLine = regexp.MustCompile(`(?m)^grpc_server_msg_received_total\{.*\} (\d+)`)

// received returns how many messages of clients the server has received so far.
func (s *server) received() (int64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	text, err := s.metrics(ctx)
	s.mu.Lock()
	n := s.was
	s.mu.Unlock()
	for _, m := range receivedLine.FindAllStringSubmatch(text, -1) {
		k, _ := strconv.ParseInt(m[1], 10, 64)
		n += k
	}
	return n, err
}

func (s *server) metrics(ctx context.Context) (string, error) {
	req, err := http.NewRequestWithContext(ctx, "GET", "http://"+s.client+"/metrics", nil)
	if err != nil {
		return "", err
	}
	r, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	return string(b), err
}

// metric returns the sum of the metrics whose lines begin with a pattern.
func metric(tb testing.TB, s *server, pattern string) (sum float64) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	text, err := s.metrics(ctx)
	if err != nil {
		tb.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^`+pattern+` (\S+)$`).FindAllStringSubmatch(text, -1) {
		x, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			tb.Fatal(err)
		}
		sum += x
	}
	return sum
}

// isLeader reports whether the member is the leader.
func (s *server) isLeader() bool {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	text, _ := s.metrics(ctx)
	return strings.Contains(text, "\netcd_server_is_leader 1")
}

// startServers starts a cluster that ends with the test.
func startServers(tb testing.TB, n int, args ...string) []*server {
	tb.Helper()
	needEtcd(tb)
	all, err := newServers(tb.TempDir(), n, args...)
	if err != nil {
		tb.Fatal(err)
	}
	run(tb, all)
	return all
}

// run starts servers that end with the test.
func run(tb testing.TB, all []*server) {
	tb.Helper()
	for _, s := range all {
		tb.Cleanup(s.kill)
		if err := s.start(); err != nil {
			tb.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, s := range all {
		if err := s.healthy(ctx); err != nil {
			tb.Fatal(err)
		}
	}
}

// hosts returns the addresses of servers, as in a URL.
func hosts(servers []*server) string {
	var all []string
	for _, s := range servers {
		all = append(all, s.client)
	}
	return strings.Join(all, ",")
}

// newClient returns a plain client of etcd.
func newClient(hosts string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: strings.Split(hosts, ","), Logger: zap.NewNop()})
}
