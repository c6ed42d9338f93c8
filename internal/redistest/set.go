package redistest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// NeedSets skips the test unless the servers of the tests are redis-server processes.
func NeedSets(t testing.TB) {
	t.Helper()
	kind, err := choose(os.Getenv(Env), true)
	must(t, "set", err)
	if kind != "process" {
		t.Skip("needs a set of redis-server processes; this run uses miniredis")
	}
	announce(kind)
}

// Set is several servers that form one Redis.
type Set struct {
	// Certificate is the certificate of all servers, for TLS.
	Certificate

	// Servers contains the servers that were masters at the start, and then their replicas.
	Servers []*Server

	t   testing.TB
	o   Options
	dir string
}

func newSet(t testing.TB, o *Options) Set {
	t.Helper()
	NeedSets(t)
	s := Set{t: t}
	if o != nil {
		s.o = *o
	}
	dir, err := s.tempDir(t, &s.o)
	must(t, "set", err)
	s.dir = dir
	return s
}

// Params returns the parameters that hasp needs together with URL.
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

// member is a server of a set before its start.
type member struct {
	*Server
	dir  string
	port int
}

func (m member) start(args ...string) error { return m.startAt(m.dir, m.port, args...) }

// members returns n new servers that are not started, each with a directory and an address. It
// stops the servers in the slice, and replaces them by the new ones.
func (s *Set) members(n int, name string, servers *[]*Server) ([]member, error) {
	for _, srv := range *servers {
		if srv.flav != nil { // the server was started
			srv.Stop()
		}
	}

	*servers = nil
	all := make([]member, n)

	for i := range all {
		m := &all[i]
		m.Server = &Server{t: s.t, o: s.o, Certificate: s.Certificate}
		var err error
		if m.dir, err = os.MkdirTemp(s.dir, name); err != nil {
			return nil, err
		}
		if m.port, err = freePort(s.t); err != nil {
			return nil, err
		}

		m.Addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(m.port))
		*servers = append(*servers, m.Server)
	}

	return all, nil
}

// id returns an ID for a sentinel or a cluster node, made from its address.
func (m member) id() string {
	a := netip.MustParseAddrPort(m.Addr)
	ip := a.Addr().As4()
	return fmt.Sprintf("%036x%04x", binary.BigEndian.Uint32(ip[:]), a.Port())
}

func (s *Set) at(addr string) (*Server, error) {
	i := slices.IndexFunc(s.Servers, func(srv *Server) bool { return srv.Addr == addr })
	if i < 0 {
		return nil, fmt.Errorf("no server is at %q", addr)
	}
	return s.Servers[i], nil
}

// The function running returns the servers that are neither paused nor killed.
func running(all []*Server) []*Server {
	return slices.DeleteFunc(slices.Clone(all), func(s *Server) bool { return s.away.Load() })
}

// agree asks all running servers. It returns their answer if all answers are the same, and
// otherwise an error.
func agree[A comparable](all []*Server, ask func(*Server) (A, error)) (answer A, err error) {
	for i, srv := range running(all) {
		next, err := ask(srv)
		if err != nil {
			return answer, err
		}
		if i > 0 && next != answer {
			return answer, fmt.Errorf("the servers disagree: %v and %v", answer, next)
		}

		answer = next
	}

	return answer, nil
}

// chain returns arguments with which the servers of a set can log in to each other.
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
	user := userinfo(s.o.User, s.o.Password)
	return scheme + kind + "://" + user + strings.Join(addrs, ",") + suffix
}

// must calls ask until one call succeeds. After the duration patience, it fails the test.
func (s *Set) must(what string, ask func(ctx context.Context) error) {
	s.t.Helper()
	must(s.t, what, until(ask))
}

// Each calls f for 0 to n-1 at the same time, and joins the errors.
func Each(n int, f func(i int) error) error {
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { errs[i] = f(i) })
	}
	all.Wait()
	return errors.Join(errs...)
}
