package rig

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/hasplock/hasp/internal/torture/hosts"
)

// nameserver is a name server on a host of its own. Its only name leads to the master of a
// store. The time to live of its answers is zero, so no resolver keeps them.
type nameserver struct {
	name string // it ends with a dot, so no resolver tries it in another domain
	addr string // host:port of the server

	mu      sync.Mutex                // guards all below
	current netip.Addr                // where the name leads
	stale   map[netip.Addr]netip.Addr // by client, the address that it gets instead
	code    dnsmessage.RCode          // unless it is success, the clients get no address
	late    time.Duration             // how late the clients get their answers
}

// answer is what a client gets.
type answer struct {
	addr netip.Addr
	code dnsmessage.RCode
	late time.Duration
}

// named counts the names of this process.
var named atomic.Int32

// openNames starts a name server, whose name leads to one of the servers.
func (s *store) openNames() *nameserver {
	h, err := s.apart.host()
	s.Check(err)
	s.apart.dns = append(s.apart.dns, h)
	n := &nameserver{name: fmt.Sprintf("redis%d.test.", named.Add(1)), current: s.apart.servers[0].Addr, stale: map[netip.Addr]netip.Addr{}}

	var conn net.PacketConn
	s.Check(h.Do(func() (err error) {
		conn, err = net.ListenPacket("udp4", netip.AddrPortFrom(h.Addr, 53).String())
		return err
	}))
	n.addr = conn.LocalAddr().String()

	ended := make(chan struct{})
	go func() {
		defer close(ended)
		serveNames(conn, n.answer)
	}()

	zone.Store(n.name, n)
	s.Cleanup(func() {
		zone.Delete(n.name)
		conn.Close()
		<-ended
	})
	return n
}

// answer returns what the server answers to a client that asks for a name.
func (n *nameserver) answer(name string, client netip.Addr) answer {
	n.mu.Lock()
	defer n.mu.Unlock()
	a := answer{addr: n.current, code: n.code, late: n.late}
	if old, ok := n.stale[client]; ok {
		a.addr = old
	}
	if name != n.name {
		a.code = dnsmessage.RCodeNameError
	}
	return a
}

// lead makes the name lead to an address.
func (n *nameserver) lead(to netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.current = to
}

// keep makes the name lead some clients to the current address, whatever lead sets later, as a
// cache does. drop ends this for all clients.
func (n *nameserver) keep(clients []*hosts.Host) (drop func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, h := range clients {
		n.stale[h.Addr] = n.current
	}
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		clear(n.stale)
	}
}

// fail makes the clients get no address, or get it late. lift ends this.
func (n *nameserver) fail(code dnsmessage.RCode, late time.Duration) (lift func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.code, n.late = code, late
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.code, n.late = dnsmessage.RCodeSuccess, 0
	}
}

// serveNames answers questions until conn is closed or fails.
func serveNames(conn net.PacketConn, ask func(name string, client netip.Addr) answer) {
	for b := make([]byte, 1500); ; {
		n, from, err := conn.ReadFrom(b)
		if err != nil {
			return
		}
		query, err := question(b[:n])
		if err != nil {
			continue
		}
		a := ask(query.Questions[0].Name.String(), from.(*net.UDPAddr).AddrPort().Addr().Unmap())
		reply, err := response(query, a)
		if err != nil {
			continue
		}
		// A reply that is late may find conn closed, and is lost.
		time.AfterFunc(a.late, func() { _, _ = conn.WriteTo(reply, from) })
	}
}

// question parses a message with one question. Extensions are ignored.
func question(b []byte) (m dnsmessage.Message, err error) {
	var p dnsmessage.Parser
	if m.Header, err = p.Start(b); err != nil {
		return m, err
	}
	if m.Questions, err = p.AllQuestions(); err == nil && len(m.Questions) != 1 {
		err = errors.New("want one question")
	}
	return m, err
}

// response is the message that answers a question. The name has an IPv4 address only.
func response(m dnsmessage.Message, a answer) ([]byte, error) {
	q := m.Questions[0]
	m.Header = dnsmessage.Header{ID: m.ID, Response: true, Authoritative: true, RecursionDesired: m.RecursionDesired, RCode: a.code}
	if a.code == dnsmessage.RCodeSuccess && q.Type == dnsmessage.TypeA {
		m.Answers = []dnsmessage.Resource{{
			Header: dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET},
			Body:   &dnsmessage.AResource{A: a.addr.As4()},
		}}
	}
	return m.Pack()
}

// resolveBy sets the resolver of this process, which then asks one name server for all names.
// It must be called before the first connection.
func resolveBy(server func() (addr string, err error)) { net.DefaultResolver = resolver(server) }

// resolver returns a resolver that asks a name server.
func resolver(server func() (addr string, err error)) *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		addr, err := server()
		if err != nil {
			return nil, err
		}
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}}
}

// zone has the name servers of this process, by their names.
var zone sync.Map

// ownNames is the address of a server on loopback that knows the names of all runs of this
// process. The process makes its own connections with it, which no fault disturbs. The server
// lives as long as the process, because the resolver is global.
var ownNames = sync.OnceValues(func() (addr string, err error) {
	conn, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	go serveNames(conn, func(name string, _ netip.Addr) answer {
		if n, ok := zone.Load(name); ok {
			n := n.(*nameserver)
			n.mu.Lock()
			defer n.mu.Unlock()
			return answer{addr: n.current}
		}
		return answer{code: dnsmessage.RCodeNameError}
	})
	return conn.LocalAddr().String(), nil
})
