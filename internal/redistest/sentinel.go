package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Sentinel is a master with two replicas and three sentinels. Only Failover starts a failover, so a
// busy machine cannot cause one.
type Sentinel struct {
	Set

	// Name is the master's name for the sentinels.
	Name string

	Sentinels []*Server
}

// StartSentinel starts a Sentinel for t.
func StartSentinel(t testing.TB, o *Options) *Sentinel {
	t.Helper()
	s := &Sentinel{Set: newSet(t, o), Name: "mymaster"}
	must(t, "servers", again(s.startServers))
	must(t, "sentinels", again(s.startSentinels))
	s.must("Sentinel set", s.complete)
	return s
}

func (s *Sentinel) startServers() error {
	all, err := s.members(3, "server", &s.Servers)
	if err != nil {
		return err
	}

	args := s.chain()
	for _, m := range all {
		if err := m.start(args...); err != nil {
			return err
		}

		args = append(s.chain(), "--replicaof", "127.0.0.1", strconv.Itoa(all[0].port))
	}

	return nil
}

// startSentinels starts three sentinels. The configuration of each names the replicas and the other
// sentinels, because discovery would take seconds.
func (s *Sentinel) startSentinels() error {
	all, err := s.members(3, "sentinel", &s.Sentinels)
	if err != nil {
		return err
	}

	for i, m := range all {
		m.o.User = s.o.SentinelUser
		m.o.Password = s.o.SentinelPassword
		file := filepath.Join(m.dir, "sentinel.conf")
		if err := os.WriteFile(file, []byte(s.config(all, i)), 0o600); err != nil {
			return err
		}

		args := append(append([]string{file}, m.args(m.dir, m.port)...), s.chain()...)
		if err := m.run(&process{dir: m.dir, args: append(args, "--sentinel")}); err != nil {
			return err
		}

		// Keep the sentinel out of its TILT mode, which it would enter if the machine stood still
		// for seconds. The command exists since Redis 7.
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		m.command(ctx, "sentinel", "debug", "info-period", 200, "tilt-trigger", 1000000000)
		cancel()
	}

	return nil
}

func (s *Sentinel) config(all []member, i int) string {
	var b strings.Builder
	line := func(words ...any) { fmt.Fprintln(&b, append([]any{"sentinel"}, words...)...) }
	at := func(srv *Server) string { return strings.Replace(srv.Addr, ":", " ", 1) }
	line("myid", all[i].id())
	line("monitor", s.Name, at(s.Servers[0]), 2)
	line("down-after-milliseconds", s.Name, neverDown)
	line("failover-timeout", s.Name, failoverTimeout)
	if s.o.SentinelUser != "" {
		line("sentinel-user", s.o.SentinelUser)
		line("sentinel-pass", strconv.Quote(s.o.SentinelPassword))
	}
	if s.o.User != "" {
		line("auth-user", s.Name, s.o.User)
	}
	if s.o.Password != "" {
		line("auth-pass", s.Name, strconv.Quote(s.o.Password))
	}

	for _, replica := range s.Servers[1:] {
		line("known-replica", s.Name, at(replica))
	}

	for j, m := range all {
		if j != i {
			line("known-sentinel", s.Name, at(m.Server), m.id())
		}
	}

	return b.String()
}

// The method complete returns an error until all servers know each other.
func (s *Sentinel) complete(ctx context.Context) error {
	err := s.Servers[0].followed(ctx, 2)
	for _, replica := range s.Servers[1:] {
		err = errors.Join(err, replica.inStep(ctx))
	}
	for _, sentinel := range s.Sentinels {
		err = errors.Join(err, sentinel.command(ctx, "sentinel", "ckquorum", s.Name).Err())
	}
	return err
}

// These are settings of the sentinels, in milliseconds.
const (
	neverDown       = 600000
	failoverTimeout = 10000
)

// URL returns the URL of the set for hasp. hasp also needs the parameters of Params.
func (s *Sentinel) URL() string { return s.url("sentinel", s.Sentinels, "/"+s.Name+"/0") }

// Master returns the present master. It waits until all running sentinels agree.
func (s *Sentinel) Master() (master *Server) {
	s.t.Helper()
	s.must("master", func(ctx context.Context) (err error) {
		master, err = s.master(ctx)
		return err
	})
	return master
}

func (s *Sentinel) master(ctx context.Context) (*Server, error) {
	addr, err := agree(s.Sentinels, func(sentinel *Server) (string, error) {
		parts, err := sentinel.command(ctx, "sentinel", "get-master-addr-by-name",
			s.Name).StringSlice()
		if err == nil && len(parts) != 2 {
			err = fmt.Errorf("unexpected reply %q", parts)
		}
		if err != nil {
			return "", err
		}
		return net.JoinHostPort(parts[0], parts[1]), nil
	})

	if err != nil {
		return nil, err
	}

	return s.at(addr)
}

// Failover makes the sentinels fail over to a replica, whether the old master runs or not. It waits
// until all sentinels name the new master. The old master becomes a replica a moment later, or
// after its restart.
func (s *Sentinel) Failover() {
	s.t.Helper()
	old := s.Master()
	asked := time.Time{}
	s.must("failover", func(ctx context.Context) error {
		master, err := s.master(ctx)
		switch {
		case err != nil:
			return err
		case master != old:
			return master.is(ctx, "master")
		case time.Since(asked) > time.Second:
			// Repeat the command, because a sentinel gives up if it finds no suitable replica.
			// Always send it to the first sentinel, which knows of its own failover in progress.
			asked = time.Now()
			err = running(s.Sentinels)[0].command(ctx, "sentinel", "failover", s.Name).Err()
		}
		return errors.Join(fmt.Errorf("%s is still the master", old.Addr), err)
	})
}
