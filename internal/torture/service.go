package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// service is a master and its replica behind one address, as with a Service of
// Kubernetes. A new connection leads to the current master, and an old one stays
// where it is. The replica confirms holds.
type service struct {
	l       *redistest.Lab
	servers []*redistest.Server
	master  atomic.Int32        // index of the master in servers
	copies  []*faultproxy.Proxy // by server, the link that its replica uses
}

// away is the delay between the replica and the master.
const away = 3 * time.Millisecond

// openService starts the servers and the links of the clients to them.
func (s *store) openService(l *redistest.Lab) error {
	if s.strategy == redlock || s.strategy == filelock {
		return fmt.Errorf("%s does not use one Redis", s.strategy)
	}
	s.what = "a master and its replica behind one address, replicas=1"
	s.service = &service{l: l}
	for range 2 {
		srv := redistest.Start(l, &redistest.Options{Own: true, Real: true, Keep: true, Args: []string{"--appendfsync", "no", "--repl-diskless-sync-delay", "0"}})
		p := srv.Proxy()
		p.Delay(away)
		s.servers, s.admin = append(s.servers, srv), append(s.admin, srv.Client())
		s.service.servers, s.service.copies = s.servers, append(s.service.copies, p)
	}
	if err := s.follow(1, 0); err != nil {
		return err
	}
	if err := s.openWays(); err != nil {
		return err
	}
	url, _ := s.way()
	return s.openQueue(l, url)
}

// way returns a proxy that connects to the current master.
func (v *service) way(strategy string) (url string, links []*faultproxy.Proxy) {
	p, err := faultproxy.Listen(func() (net.Conn, error) {
		return net.Dial("tcp", v.servers[v.master.Load()].Addr)
	})
	if err != nil {
		v.l.Fatal(err)
	}
	v.l.Cleanup(p.Close)
	return strategy + "+redis://" + p.Addr() + "/0?replicas=1", []*faultproxy.Proxy{p}
}

// follow makes a server the replica of another, and waits until it is in step.
func (s *store) follow(replica, master int) error {
	host, port, _ := net.SplitHostPort(s.service.copies[master].Addr())
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		err := s.admin[replica].Do(ctx, "replicaof", host, port).Err()
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
	for {
		info, err := s.admin[replica].Info(ctx, "replication").Result()
		if err == nil && strings.Contains(info, "master_link_status:up") {
			return nil
		}
		if ctx.Err() != nil {
			return errors.Join(errors.New("the replica does not follow"), err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// withReplica disturbs the server that is the replica now.
func withReplica(fail, heal func(*redistest.Server)) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		replica := n.store.servers[1-n.store.service.master.Load()]
		fail(replica)
		return injection{key: -1, seat: -1, heal: func() error { heal(replica); return nil }}, true
	}
}

// moved makes the replica the master, and the address lead to it. If dead, it
// kills the old master first. Otherwise the connections to the old master stay.
func moved(dead bool) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		s := n.store
		old := int(s.service.master.Load())
		next := 1 - old
		var err error
		if dead {
			err = errors.Join(s.servers[old].Stop(), n.command(next, "replicaof", "no", "one"))
		} else if err = n.command(old, "failover"); err == nil {
			err = n.demoted(s.servers[old])
		}
		if err != nil {
			n.fail("harness", n.at, err.Error())
			return injection{}, false
		}
		s.service.master.Store(int32(next))
		return injection{key: -1, seat: -1, heal: func() error {
			if dead {
				if err := s.servers[old].Start(true); err != nil {
					return err
				}
			}
			return s.follow(old, next)
		}}, true
	}
}
