package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/etcdlock"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/lab/internal/memetcd"
)

// openEtcd starts an etcd of three members.
func openEtcd(t *testing.T, r *rand.Rand) Store {
	s := &members{window: time.Duration(2+r.IntN(4)) * time.Second}
	s.etcd = memetcd.New(3, rand.New(rand.NewPCG(r.Uint64(), 0)))
	t.Cleanup(s.close)
	return s
}

// members is an etcd in memory, and the links of the Clients to its members.
type members struct {
	links
	etcd   *memetcd.Cluster
	window time.Duration
}

func (s *members) close() {
	for _, w := range s.links {
		w.each((*faultproxy.Proxy).Close)
	}
	s.etcd.Close()
}

func (s *members) Link(*rand.Rand, time.Duration) (backend.Driver, Link) {
	w := &wires{}
	dial := map[string]func(context.Context) (net.Conn, error){}
	conf := clientv3.Config{}
	for _, m := range s.etcd.Members {
		p := faultproxy.New(m.Dial)
		w.proxies = append(w.proxies, p)
		// As with a socket, a write does not wait for the reader, and written data is sent even
		// after a Close. The buffer is larger than all data that a client sends while a link is
		// silent. gRPC writes with a mutex held, so a full buffer would stop the bubble's time.
		ln := bufconn.Listen(1 << 18)
		p.Serve(ln)
		dial[m.Name()+":2379"] = ln.DialContext
		conf.Endpoints = append(conf.Endpoints, "http://"+m.Name()+":2379")
	}

	s.links = append(s.links, w)
	conf.DialOptions = []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context,
		addr string) (net.Conn, error) {
		return dial[addr](ctx)
	})}
	return await.Value(etcdlock.NewDriver(conf, &etcdlock.Options{Window: s.window})), w
}

func (s *members) Skip(d time.Duration) { s.etcd.Skip(d) }

func (s *members) Longest() time.Duration { return LongTerm }

func (s *members) Left() (all []string) {
	for _, key := range s.etcd.Keys() {
		all = append(all, "entry "+key)
	}
	for _, id := range s.etcd.Leases() {
		all = append(all, fmt.Sprintf("lease %x", id))
	}
	return all
}

// Strike disturbs one member, all members, or one Client's link to a member.
func (s *members) Strike(r *rand.Rand, _ func()) (heal func()) {
	node := r.IntN(len(s.etcd.Members))
	l := r.IntN(len(s.links))
	m := s.etcd.Members[node]
	p := s.links[l].proxies[node]
	switch n := r.IntN(linkFaults + 9); n - linkFaults {
	case 0, 1:
		return m.Freeze()
	case 2:
		return m.Kill()
	case 3:
		return m.Isolate()
	case 4:
		m.Lag(time.Duration(1+r.IntN(500)) * time.Millisecond)
		return func() { m.Lag(0) }
	case 5:
		s.etcd.Fill(true)
		return func() { s.etcd.Fill(false) }
	case 6, 7:
		s.etcd.MoveLeader()
	case 8:
		return s.each(func(m *memetcd.Member) func() {
			m.Fail(0.3)
			return func() { m.Fail(0) }
		})
	default:
		return disturb(r, p, n, "")
	}

	return nil
}

// Majority makes all members stop answering. They hang, they have no leader, or they are killed.
func (s *members) Majority(r *rand.Rand) (heal func()) {
	return s.each([]func(*memetcd.Member) func(){(*memetcd.Member).Freeze,
		(*memetcd.Member).Isolate, (*memetcd.Member).Kill}[r.IntN(3)])
}

// each makes all members fail. The function heal repairs them.
func (s *members) each(fail func(*memetcd.Member) (heal func())) (heal func()) {
	var heals []func()
	for _, m := range s.etcd.Members {
		heals = append(heals, fail(m))
	}
	return func() {
		for _, heal := range heals {
			heal()
		}
	}
}

// Rob revokes the lease of the holder of a key.
func (s *members) Rob(_ *rand.Rand, key string) {
	s.etcd.Rob("hasp/" + strings.ReplaceAll(url.PathEscape(key), "/", "%2F") + "/")
}
