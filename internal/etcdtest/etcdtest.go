//go:build unix

// Package etcdtest starts etcd servers for tests and for the torture of lab. Each server is a
// process on free ports of the loopback interface. etcd must be installed.
package etcdtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/crew"
)

// Server is one member of a cluster.
type Server struct {
	Name         string
	Client, Peer string // addresses, host:port
	Dir          string // the directory of its data
	Args         []string

	log string

	mu    sync.Mutex      // guards the fields below
	cmd   *exec.Cmd       // nil if the process does not run
	ended <-chan struct{} // closed when cmd has ended
}

// Binary returns the etcd program: the file that HASP_TEST_ETCD names, or else the etcd on the
// PATH.
func Binary() string {
	if file := os.Getenv("HASP_TEST_ETCD"); file != "" && file != "required" {
		return file
	}
	return "etcd"
}

// If no etcd is installed, Need skips the test, or fails it if HASP_TEST_ETCD is set.
func Need(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath(Binary()); err == nil {
		return
	}
	if os.Getenv("HASP_TEST_ETCD") != "" {
		t.Fatalf("%s is not installed: apt-get install etcd-server", Binary())
	}
	t.Skip("no etcd is installed: apt-get install etcd-server")
}

// Start starts a cluster of n servers and waits until they answer. The end of the test stops them.
func Start(t testing.TB, n int, args ...string) []*Server {
	t.Helper()
	Need(t)
	dir, err := os.MkdirTemp("", "hasp-etcd")
	await.Must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	all, err := New(dir, n, args...)
	await.Must(t, err)

	for _, s := range all {
		t.Cleanup(s.Kill)
		await.Must(t, s.Start())
	}

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	for _, s := range all {
		await.Must(t, s.Healthy(ctx))
	}

	return all
}

// New returns n servers of one cluster, which do not run yet. Their files are in dir. Data that a
// server has written survives the end of its process, but not a crash of the machine.
func New(dir string, n int, args ...string) ([]*Server, error) {
	var all []*Server
	var cluster []string

	for i := range n {
		s := &Server{Name: fmt.Sprint("m", i), Dir: filepath.Join(dir, fmt.Sprint("m", i))}
		var err1, err2 error
		s.Client, err1 = crew.FreeAddr()
		s.Peer, err2 = crew.FreeAddr()
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}

		s.log = s.Dir + ".log"
		all = append(all, s)
		cluster = append(cluster, s.Name+"=http://"+s.Peer)
	}

	for _, s := range all {
		s.Args = append([]string{"--name", s.Name, "--data-dir", s.Dir,
			"--listen-client-urls", "http://" + s.Client, "--advertise-client-urls",
			"http://" + s.Client,
			"--listen-peer-urls", "http://" + s.Peer, "--initial-advertise-peer-urls",
			"http://" + s.Peer,
			"--initial-cluster", strings.Join(cluster, ","), "--initial-cluster-state", "new",
			"--unsafe-no-fsync", "--logger=zap", "--log-level=error"}, args...)
	}

	return all, nil
}

// Start starts the process. It does not wait until the server answers.
func (s *Server) Start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	log, err := os.OpenFile(s.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(Binary(), s.Args...)
	cmd.Stdout = log
	cmd.Stderr = log
	ended, err := crew.StartServer(cmd)
	if err != nil {
		return err
	}

	s.cmd = cmd
	s.ended = ended
	return nil
}

// Healthy waits until the server answers and has a leader.
func (s *Server) Healthy(ctx context.Context) error {
	for {
		ask, cancel := context.WithTimeout(ctx, time.Second)
		_, err := s.get(ask, "/health")
		cancel()
		if err == nil {
			return nil
		}

		select {
		case <-ctx.Done():
			out, _ := os.ReadFile(s.log)
			return fmt.Errorf("etcd %s does not answer: %w: %s", s.Name, ctx.Err(), out)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Metrics returns the server's metrics as text.
func (s *Server) Metrics(ctx context.Context) (string, error) { return s.get(ctx, "/metrics") }

func (s *Server) get(ctx context.Context, path string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, "GET", "http://"+s.Client+path, nil)
	if err != nil {
		return "", err
	}

	r, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if r.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s: %s", path, r.Status)
	}

	return string(b), err
}

// IsLeader reports whether the server leads the cluster.
func (s *Server) IsLeader() bool {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	text, _ := s.Metrics(ctx)
	return strings.Contains(text, "\netcd_server_is_leader 1")
}

// Kill kills the process and waits for its end. The files stay.
func (s *Server) Kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill()
	<-s.ended
	s.cmd = nil
}

// process returns the process, which must run.
func (s *Server) process() *os.Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cmd.Process
}

// Pid returns the process id. The process must run.
func (s *Server) Pid() int { return s.process().Pid }

// Pause calls [crew.Pause] for the process. The connections of the server stay.
func (s *Server) Pause() error { return crew.Pause(s.process()) }

// Resume undoes Pause.
func (s *Server) Resume() error { return crew.Resume(s.process()) }
