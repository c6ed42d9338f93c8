package rig

import (
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/internal/faultproxy"
)

// service is a master and its replica behind one address, as with a Service of
// Kubernetes. A new connection leads to the current master, and an old one stays
// where it is. The replica confirms holds.
type service struct {
	master atomic.Int32        // index of the master in the servers of the store
	copies []*faultproxy.Proxy // by server, the link that its replica uses; nil on hosts
	addr   netip.Addr          // on hosts: leads to the master
}

// away is the delay between the replica and the master.
const away = 3 * time.Millisecond

// openService starts the servers and the links of the clients to them.
func (s *store) openService() {
	s.what = "a master and its replica behind one address, replicas=1"
	s.service = &service{}
	for range 2 {
		srv := s.start("--repl-diskless-sync-delay", "0")
		if s.apart != nil {
			continue
		}
		p := srv.Proxy()
		p.Delay(away)
		s.service.copies = append(s.service.copies, p)
	}
	if s.apart != nil {
		s.what += ownHosts
		s.service.addr = s.apart.share()
	}
	s.follow(1, 0)
	s.openWays()
	url := s.urls[0]
	if s.apart == nil {
		url, _ = s.way()
	}
	s.openQueue(url)
}

// serviceWay returns a proxy that connects to the current master.
func (s *store) serviceWay() (url string, links []*faultproxy.Proxy) {
	p, err := faultproxy.Listen(func() (net.Conn, error) {
		return net.Dial("tcp", s.servers[s.service.master.Load()].Addr)
	})
	s.Check(err)
	s.Cleanup(p.Close)
	return s.strategy + "+redis://" + p.Addr() + "/0?replicas=1", []*faultproxy.Proxy{p}
}

// follow makes a server the replica of another.
func (s *store) follow(replica, master int) {
	addr := s.servers[master].Addr
	if s.apart == nil {
		addr = s.service.copies[master].Addr()
	}
	s.servers[replica].Follow(addr)
}

// lead makes the address lead to a server, which is the master now.
func (s *store) lead(master int) {
	s.service.master.Store(int32(master))
	if s.apart != nil {
		s.apart.Route(s.service.addr, s.apart.servers[master].Port)
	}
}

// replicaStopped stops the server that is the replica now.
func replicaStopped(n *nemesis) *injection {
	replica := n.store.servers[1-n.store.service.master.Load()]
	replica.Pause()
	return ofAll(replica.Resume)
}

// moved makes the replica the master, and the address lead to it. If dead, it
// kills the old master first. Otherwise the connections to the old master stay.
func moved(dead bool) inject {
	return func(n *nemesis) *injection {
		s := n.store
		old := int(s.service.master.Load())
		next := 1 - old
		if dead {
			s.servers[old].Kill()
			n.command(next, "replicaof no one")
		} else {
			n.command(old, "failover")
			s.servers[old].Demoted()
		}

		s.lead(next)
		return ofAll(func() {
			if dead {
				s.servers[old].Restart()
			}
			s.follow(old, next)
		})
	}
}
