package redistest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// patience is the time in which a set of servers must agree. It is much longer
// than they need, because the machine may be busy.
const patience = 90 * time.Second

// NeedSets skips the test if there are no redis-server processes, which a set of
// servers needs.
func NeedSets(t testing.TB) {
	t.Helper()
	kind, err := choose(os.Getenv(Env), true)
	if err != nil {
		t.Fatalf("redistest: %v", err)
	}
	if kind != "process" {
		t.Skip("needs a set of redis-server processes; this run uses miniredis")
	}
	announce(kind)
}

// Set is a number of servers that form one Redis.
type Set struct {
	// Certificate is the certificate of all servers, for TLS.
	Certificate

	t   testing.TB
	o   Options
	dir string
}

func newSet(t testing.TB, o *Options) (Set, error) {
	s := Set{t: t}
	if o != nil {
		s.o = *o
	}
	s.o.needClock(t)
	var err error
	if s.dir, err = tempDir(t); err == nil && s.o.tls() {
		s.Certificate, err = certify(s.dir)
	}
	return s, err
}

// Params returns the parameters that belong to URL.
func (s *Set) Params() map[string]string {
	p := s.params(&s.o)
	if s.o.SentinelPassword != "" {
		p["sentinel_password"] = s.o.SentinelPassword
	}
	if s.o.SentinelUser != "" {
		p["sentinel_user"] = s.o.SentinelUser
	}
	return p
}

// server returns a server that is not started, and a directory for it.
func (s *Set) server(name string) (*Server, string, error) {
	dir, err := os.MkdirTemp(s.dir, name)
	return &Server{t: s.t, o: s.o, Certificate: s.Certificate}, dir, err
}

// chain returns the arguments by which the servers of a set reach each other.
func (s *Set) chain() []string {
	args := []string{"--repl-diskless-sync-delay", "0"}
	if s.o.tls() {
		args = append(args, "--tls-replication", "yes", "--tls-cluster", "yes")
	}
	if s.o.User != "" {
		args = append(args, "--masteruser", s.o.User)
	}
	if s.o.Password != "" {
		args = append(args, "--masterauth", s.o.Password)
	}
	return args
}

// url returns a URL with the addresses of servers.
func (s *Set) url(kind string, servers []*Server, suffix string) string {
	scheme := "redis-"
	if s.o.tls() {
		scheme = "rediss-"
	}
	addrs := make([]string, len(servers))
	for i, srv := range servers {
		addrs[i] = srv.Addr
	}
	return scheme + kind + "://" + userinfo(s.o.User, s.o.Password) + strings.Join(addrs, ",") + suffix
}

// until calls ask until it returns nil. The error of ask says what is missing.
func until(what string, ask func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		within, done := context.WithTimeout(ctx, 5*time.Second)
		err := ask(within)
		done()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// command sends one command to a server on a connection of its own.
func (s *Server) command(ctx context.Context, args ...any) (any, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, s.network(), s.Addr)
	if err != nil {
		return nil, err // go-redis would log the failed dial
	}
	conn.Close()
	rdb := s.patient()
	defer rdb.Close()
	return rdb.Do(ctx, args...).Result()
}

// text is command for a reply that is a string.
func (s *Server) text(ctx context.Context, args ...any) (string, error) {
	v, err := s.command(ctx, args...)
	text, ok := v.(string)
	if err == nil && !ok {
		err = fmt.Errorf("%v: unexpected reply %v", args, v)
	}
	return text, err
}

// role returns "master" or "slave", and whether a slave is in step.
func (s *Server) role(ctx context.Context) (role string, inStep bool, err error) {
	v, err := s.command(ctx, "role")
	if err != nil {
		return "", false, err
	}
	parts, _ := v.([]any)
	if len(parts) < 3 {
		return "", false, errors.New("short reply to role")
	}
	return fmt.Sprint(parts[0]), len(parts) > 3 && parts[3] == "connected", nil
}

// followed returns an error until a master has that many replicas in step.
func (s *Server) followed(ctx context.Context, replicas int64) error {
	v, err := s.command(ctx, "wait", replicas, 1000)
	if n, _ := v.(int64); err == nil && n < replicas {
		err = fmt.Errorf("%s has %d replicas", s.Addr, n)
	}
	return err
}

// port reserves a port, and the port 10,000 higher, which a cluster node needs.
// Both are below the ports that most systems give to connections.
func (s *Set) port() (int, error) {
	for range 100 {
		p := 10500 + rand.IntN(11000)
		_, release, err := reserve(p)
		if err != nil {
			continue
		}
		_, releaseBus, err := reserve(p + 10000)
		if err != nil {
			release()
			continue
		}
		s.t.Cleanup(release)
		s.t.Cleanup(releaseBus)
		return p, nil
	}
	return 0, errors.New("no free port")
}

// ports reserves n different ports.
func (s *Set) ports(n int) ([]int, error) {
	var all []int
	for len(all) < n {
		p, err := s.port()
		if err != nil {
			return nil, err
		}
		if !slices.Contains(all, p) {
			all = append(all, p)
		}
	}
	return all, nil
}

// each calls f for 0 to n-1 at once. It returns the first error, but prefers one
// that is not errTaken.
func each(n int, f func(i int) error) error {
	errs := make(chan error, n)
	for i := range n {
		go func() { errs <- f(i) }()
	}
	var first error
	for range n {
		if err := <-errs; err != nil && (first == nil || errors.Is(first, errTaken)) {
			first = err
		}
	}
	return first
}
