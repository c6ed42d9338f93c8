package main

import (
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/internal/faultproxy"
)

// service is a master and its replica behind one address, as with a Service of Kubernetes. A new
// connection leads to the current master, and an old one stays at its server. The replica confirms
// holds.
type service struct {
	master atomic.Int32        // index of the master in the servers of the store
	copies []*faultproxy.Proxy // the link from a server's replica to it, by server
}

// away is the delay between the replica and the master.
const away = 3 * time.Millisecond

// openService starts the servers and the links of the clients to them.
func (s *store) openService() {
	s.what = "a master and its replica behind one address, replicas=1"
	s.service = &service{}
	for range 2 {
		srv := s.start("--repl-diskless-sync-delay", "0")
		p := srv.Proxy()
		p.Delay(away)
		s.service.copies = append(s.service.copies, p)
	}
	s.follow(1, 0)
	s.openWays()
}

// follow makes a server the replica of another.
func (s *store) follow(replica, master int) {
	s.servers[replica].Follow(s.service.copies[master].Addr())
}

// master and replica return the indexes of the servers.
func (s *store) master() int  { return int(s.service.master.Load()) }
func (s *store) replica() int { return 1 - s.master() }

// lead makes the address lead to a server, which is the master now.
func (s *store) lead(master int) { s.service.master.Store(int32(master)) }

// replicaStopped stops the server that is the replica now.
func replicaStopped(n *nemesis) *injection {
	replica := n.store.servers[n.store.replica()]
	replica.Pause()
	return ofAll(replica.Resume)
}

// moved makes the replica the master, and makes the address lead to it. The connections to the old
// master stay.
func moved(n *nemesis) *injection {
	s, old, next := n.store, n.store.master(), n.store.replica()
	s.servers[old].HandOver()
	s.lead(next)
	return ofAll(func() { s.follow(old, next) })
}

// replaced kills the master, makes the replica the new master, and makes the address lead to it.
func replaced(n *nemesis) *injection {
	s, old, next := n.store, n.store.master(), n.store.replica()
	s.servers[old].Kill()
	n.command(next, "replicaof no one")
	s.lead(next)
	return ofAll(func() {
		s.servers[old].Restart()
		s.follow(old, next)
	})
}
