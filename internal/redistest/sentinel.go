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

// Sentinel is a master with two replicas and three sentinels. The sentinels fail
// over on demand only, not because the machine is busy.
type Sentinel struct {
	Set

	// Name is the name of the master.
	Name string

	// Servers are the first master and its replicas.
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

// startSentinels starts three sentinels. Their configuration names each other and
// the replicas; to discover them would take seconds.
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
		// Since Redis 7: a sentinel must not enter its TILT mode if the machine
		// stands still for seconds.
		srv.hurry()
	}
	return nil
}

func (s *Server) hurry() {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	s.command(ctx, "sentinel", "debug", "info-period", 200, "tilt-trigger", 1000000000)
}

// id returns the ID of a sentinel or of a cluster node.
func id(port int) string { return fmt.Sprintf("%040x", port) }

// config returns the configuration of the sentinel at all[i].
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

// complete returns an error until all servers know each other.
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

// URL returns the URL of the set for hasp. Params belong to it.
func (s *Sentinel) URL() string { return s.url("sentinel", s.Sentinels, "/"+s.Name+"/0") }

// Master returns the server that the sentinels name.
func (s *Sentinel) Master() *Server {
	s.t.Helper()
	var master *Server
	s.must("master", until("master", func(ctx context.Context) (err error) {
		master, err = s.master(ctx)
		return err
	}))
	return master
}

// master returns the server that all running sentinels agree on.
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
	return nil, fmt.Errorf("no server is at %q", named)
}

// Failover makes the sentinels fail over to a replica, whether the old master runs
// or not. It returns when all of them name the new master. The old master becomes
// a replica a moment later, or after its restart.
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
			// Repeat the command: a sentinel that finds no suitable replica gives up.
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

// leader returns the sentinel that makes all failovers, so that it knows of one in
// progress.
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
