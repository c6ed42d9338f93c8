package redistest

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Sentinel is a master with two replicas, watched by three sentinels. They
// fail over on demand only: a busy machine is no reason.
type Sentinel struct {
	Set

	// Name is what the sentinels call the master.
	Name string

	// Servers are the master that was first and its replicas; Sentinels are
	// those that watch them.
	Servers, Sentinels []*Server
}

// StartSentinel starts a Sentinel set for t.
func StartSentinel(t testing.TB, o *Options) *Sentinel {
	t.Helper()
	NeedSets(t)
	set, err := newSet(t, o)
	s := &Sentinel{Set: set, Name: "mymaster"}
	if err == nil {
		err = s.startServers()
	}
	if err == nil {
		err = again(s.startSentinels)
	}
	if err == nil {
		err = until("Sentinel set", s.complete)
	}
	if err != nil {
		t.Fatalf("redistest: %v", err)
	}
	return s
}

func (s *Sentinel) startServers() error {
	for i := range 3 {
		srv, dir, err := s.server("server")
		if err != nil {
			return err
		}
		args := s.chain()
		if i > 0 {
			host, port, _ := net.SplitHostPort(s.Servers[0].Addr)
			args = append(args, "--replicaof", host, port)
		}
		s.Servers = append(s.Servers, srv)
		err = again(func() error {
			p, err := s.port()
			if err != nil {
				return err
			}
			return srv.startAt(dir, p, args...)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// startSentinels starts three that know of each other and of the replicas
// already, which they would find out in some seconds.
func (s *Sentinel) startSentinels() error {
	for _, old := range s.Sentinels {
		old.Stop()
	}
	s.Sentinels = nil
	all, err := s.ports(3)
	if err != nil {
		return err
	}
	for i, p := range all {
		srv, dir, err := s.server("sentinel")
		if err != nil {
			return err
		}
		srv.o.User, srv.o.Password = s.o.SentinelUser, s.o.SentinelPassword
		srv.Addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(p))
		file := filepath.Join(dir, "sentinel.conf")
		if err := os.WriteFile(file, []byte(s.config(dir, all, i)), 0o600); err != nil {
			return err
		}
		s.Sentinels = append(s.Sentinels, srv)
		if err := srv.run(&process{dir: dir, args: []string{file, "--sentinel"}}); err != nil {
			return err
		}
		// Redis 7 and later: not for tests alone, but good for them. A machine
		// that stands still for seconds must not have a sentinel sulk.
		srv.hurry()
	}
	return nil
}

func (s *Server) hurry() {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	s.command(ctx, "sentinel", "debug", "info-period", 200, "tilt-trigger", 1000000000)
}

// id is the name of a sentinel or of a node of a cluster.
func id(port int) string { return fmt.Sprintf("%040x", port) }

// config is the configuration of the sentinel at all[i].
func (s *Sentinel) config(dir string, all []int, i int) string {
	var b strings.Builder
	line := func(words ...any) { fmt.Fprintln(&b, words...) }
	plain, tls := all[i], 0
	if s.o.tls() {
		plain, tls = 0, all[i]
	}
	line("port", plain)
	line("bind 127.0.0.1")
	line("dir", dir)
	if s.o.tls() {
		line("tls-port", tls)
		line("tls-cert-file", s.CertFile)
		line("tls-key-file", s.KeyFile)
		line("tls-ca-cert-file", s.CAFile)
		line("tls-auth-clients", map[bool]string{true: "yes", false: "no"}[s.o.Mutual])
		line("tls-replication yes")
	}
	switch {
	case s.o.SentinelUser != "":
		line("user", s.o.SentinelUser, "on", strconv.Quote(">"+s.o.SentinelPassword), "~* &* +@all")
		line("user default off")
		line("sentinel sentinel-user", s.o.SentinelUser)
		line("sentinel sentinel-pass", strconv.Quote(s.o.SentinelPassword))
	case s.o.SentinelPassword != "":
		line("requirepass", strconv.Quote(s.o.SentinelPassword))
	}
	at := func(srv *Server) string { return strings.Replace(srv.Addr, ":", " ", 1) }
	line("sentinel myid", id(all[i]))
	line("sentinel monitor", s.Name, at(s.Servers[0]), 2)
	line("sentinel down-after-milliseconds", s.Name, 600000)
	line("sentinel failover-timeout", s.Name, 10000)
	if s.o.User != "" {
		line("sentinel auth-user", s.Name, s.o.User)
	}
	if s.o.Password != "" {
		line("sentinel auth-pass", s.Name, strconv.Quote(s.o.Password))
	}
	for _, replica := range s.Servers[1:] {
		line("sentinel known-replica", s.Name, at(replica))
	}
	for j, p := range all {
		if j != i {
			line("sentinel known-sentinel", s.Name, "127.0.0.1", p, id(p))
		}
	}
	return b.String()
}

// complete tells what is missing until everybody knows everybody.
func (s *Sentinel) complete(ctx context.Context) error {
	for _, replica := range s.Servers[1:] {
		if role, inStep, err := replica.role(ctx); err != nil || role != "slave" || !inStep {
			return fmt.Errorf("replica %s: %s, in step: %v, %v", replica.Addr, role, inStep, err)
		}
	}
	if err := s.Servers[0].followed(ctx, 2); err != nil {
		return err
	}
	for _, sentinel := range s.Sentinels {
		if _, err := sentinel.command(ctx, "sentinel", "ckquorum", s.Name); err != nil {
			return err
		}
	}
	return nil
}

// URL is how hasp is told of the set, with Params.
func (s *Sentinel) URL() string { return s.url("sentinel", s.Sentinels, "/"+s.Name+"/0") }

// Master is the server that the sentinels name.
func (s *Sentinel) Master() *Server {
	s.t.Helper()
	var master *Server
	s.must("master", until("master", func(ctx context.Context) (err error) {
		master, err = s.master(ctx)
		return err
	}))
	return master
}

// master is the server that all sentinels that are there agree on.
func (s *Sentinel) master(ctx context.Context) (*Server, error) {
	named := ""
	for _, sentinel := range s.Sentinels {
		if sentinel.away.Load() {
			continue
		}
		v, err := sentinel.command(ctx, "sentinel", "get-master-addr-by-name", s.Name)
		if err != nil {
			return nil, err
		}
		parts, _ := v.([]any)
		if len(parts) != 2 {
			return nil, fmt.Errorf("unexpected reply %v", v)
		}
		addr := net.JoinHostPort(fmt.Sprint(parts[0]), fmt.Sprint(parts[1]))
		if named != "" && named != addr {
			return nil, fmt.Errorf("the sentinels disagree on %s and %s", named, addr)
		}
		named = addr
	}
	for _, srv := range s.Servers {
		if srv.Addr == named {
			return srv, nil
		}
	}
	return nil, fmt.Errorf("nobody is at %q", named)
}

// Failover has the sentinels make a replica the master, whether the old one is
// there or not, and returns when all of them name the new one. A master that
// is there becomes a replica a moment later, and one that comes back too.
func (s *Sentinel) Failover() {
	s.t.Helper()
	old := s.Master()
	asked := time.Time{}
	s.must("failover", until("failover", func(ctx context.Context) error {
		master, err := s.master(ctx)
		if err != nil {
			return err
		}
		if master == old {
			// Again and again: one that finds no replica fit gives up.
			if time.Since(asked) > time.Second {
				asked = time.Now()
				_, err = s.leader().command(ctx, "sentinel", "failover", s.Name)
			}
			return fmt.Errorf("%s is still the master: %w", old.Addr, err)
		}
		if role, _, err := master.role(ctx); err != nil || role != "master" {
			return fmt.Errorf("%s is %s, %v", master.Addr, role, err)
		}
		return nil
	}))
}

// leader is the sentinel that does all failovers, so that it knows when one is
// under way.
func (s *Sentinel) leader() *Server {
	for _, sentinel := range s.Sentinels {
		if !sentinel.away.Load() {
			return sentinel
		}
	}
	return s.Sentinels[0]
}

func (s *Set) must(what string, err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatalf("redistest: %s: %v", what, err)
	}
}
