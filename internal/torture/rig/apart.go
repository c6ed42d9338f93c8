package rig

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/hostclock"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/torture/hosts"
)

// apart are hosts of their own for each server and for the process of each seat. No fault disturbs
// the links of this process to them. Only checks after the last fault do.
type apart struct {
	*hosts.Net
	lab     *redistest.Lab
	servers []*hosts.Host // in the order of their starts
	clients []*hosts.Host // by seat
	dns     []*hosts.Host // of the name server, if there is one

	far      []*hosts.Host // clients that are far from all servers
	distance time.Duration // there and back
}

// hostTerms is how many times longer the terms on hosts are. A call may take half a term,
// and a packet of 200 ms must not make every call fail.
const hostTerms = 2

// between is the time that a packet takes from one host to another, without a fault.
const between = 250 * time.Microsecond

// ownHosts ends the description of a store whose servers are on hosts of their own.
const ownHosts = ", on hosts of their own"

// soonGone are arguments of servers that close the connections of a host that is gone
// within seconds. By default they keep them, and their subscriptions, for minutes.
var soonGone = []string{"--tcp-keepalive", "1"}

// apart reports whether servers and clients are on hosts of their own.
func (o *options) apart() bool { return isApart(o.place) }

// isApart reports whether a store has hosts of its own.
func isApart(place string) bool { return strings.HasPrefix(place, onHosts) }

// openHosts makes the hosts of the clients. Each server makes one more. The far clients are
// those of every second seat.
func (s *store) openHosts(seed uint64, far time.Duration) {
	n, err := hosts.Start(seed)
	s.Check(err)
	s.Cleanup(n.Close)
	s.apart = &apart{Net: n, lab: s.Lab}
	for i := range seats {
		h, err := s.apart.host()
		s.Check(err)
		s.apart.clients = append(s.apart.clients, h)
		if far > 0 && i%2 == 1 {
			s.apart.far, s.apart.distance = append(s.apart.far, h), far
		}
	}
}

// host makes a host with links to all others.
func (a *apart) host() (*hosts.Host, error) {
	h, err := a.Host()
	if err == nil {
		a.Impose(hosts.Fault{Delay: between}, hosts.Between([]*hosts.Host{h}, a.all())...)
	}
	return h, err
}

// all returns all hosts, without that of this process.
func (a *apart) all() []*hosts.Host {
	return slices.Concat(a.servers, a.clients, a.dns)
}

// remote returns the hosts that clients connect to.
func (a *apart) remote() []*hosts.Host { return slices.Concat(a.servers, a.dns) }

// server makes the host of one more server.
func (a *apart) server() (*redistest.Place, error) {
	h, err := a.host()
	if err != nil {
		return nil, err
	}
	a.servers = append(a.servers, h)
	a.Impose(hosts.Fault{Delay: a.distance / 2}, hosts.Between([]*hosts.Host{h}, a.far)...)
	return &redistest.Place{IP: h.Addr.String(), Do: h.Do}, nil
}

// share returns an address that leads to one of the servers.
func (a *apart) share() netip.Addr {
	addr, err := a.Shared(a.servers...)
	a.lab.Check(err)
	return addr
}

// directURL returns the URL of the servers, or of their shared address or name.
func (s *store) directURL() string {
	if s.service != nil {
		_, port, err := net.SplitHostPort(s.servers[0].Addr)
		s.Check(err)
		host := s.service.addr.String()
		if s.service.dns != nil {
			host = s.service.dns.name
		}
		return s.urlOf([]string{net.JoinHostPort(host, port)}) + "?replicas=1"
	}
	var addrs []string
	for _, srv := range s.servers {
		addrs = append(addrs, srv.Addr)
	}
	return s.urlOf(addrs)
}

// on runs a function whose processes start on the host of a seat.
func (s *store) on(seat int, f func() error) error {
	if s.apart == nil {
		return f()
	}
	return s.apart.clients[seat].Do(f)
}

// kept keeps leases while a minority of the servers is cut off without an answer. They must
// not be lost: the others are a majority, and healthy.
func (r *run) kept(ctx context.Context) {
	if r.store.apart == nil || r.strategy != redlock {
		return
	}
	const lasts = 3 * maxTerm // the terms are long, so that a slow machine loses none
	a, own := r.store.apart, []*hosts.Host{r.store.apart.Own()}
	few := a.servers[:(len(a.servers)-1)/2]
	c := r.store.open(ctx, r.store.urls[0], &hasp.Options{TTL: maxTerm, Timeout: maxTerm / 2})
	defer c.Close()
	leases, err := hasp.LockAll(ctx, c, r.all[:8])
	r.Check(err)

	began := hostclock.Now()
	lift := a.Impose(cutOff, hosts.Between(own, few)...)
	defer lift()
	slept := pause(lasts)
	lost := 0
	for _, l := range leases.All() {
		lost += one(l.Err() != nil)
	}
	_ = leases.Unlock(ctx)

	// A machine that stands still for a part of a term may lose leases.
	if lost > 0 && slept < maxTerm/10 {
		r.fail("kept until its end", began, fmt.Sprintf("%d of 8 leases were lost while %d of %d servers were cut off", lost, len(few), len(a.servers)))
	}
}

// pause waits for a time, and returns the longest time for which this process stood still
// meanwhile.
func pause(lasts time.Duration) (slept time.Duration) {
	began := hostclock.Now()
	for last := began; last < began+int64(lasts); {
		time.Sleep(time.Millisecond)
		now := hostclock.Now()
		slept, last = max(slept, time.Duration(now-last)), now
	}
	return slept
}
