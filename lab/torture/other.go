package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"time"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// others are the strategies that need neither Redis nor files.
var others = map[string]struct {
	term  time.Duration // of all leases
	start func(*redistest.Lab) *other
}{
	"pglock":   {time.Second, startPostgres},
	"etcdlock": {2 * time.Second, startEtcd}, // the shortest term that etcd grants
}

// other is the store of a strategy of others. Clients reach each of its servers through a
// proxy of their own, which has the faults of links.
type other struct {
	what    string                                  // a description
	servers []string                                // the address of each server
	url     func(addrs []string) string             // of the servers, if clients reach them at addrs
	left    func(context.Context) ([]string, error) // lists what clients have left
	faults  []otherFault
	ready   func() error // waits, after each fault, until all servers work; may be nil
}

// errNoVictim means that there is nothing now that a fault can disturb.
var errNoVictim = errors.New("no victim")

// otherFault is a fault of servers.
type otherFault struct {
	name        string
	loses       bool    // it takes locks away
	least, most float64 // the length, in terms

	// inject makes the fault happen. It returns what ends the fault, or nil if there is
	// nothing to end, or errNoVictim. lasts is how long the fault lasts.
	inject otherInject
}

type otherInject = func(r *rand.Rand, lasts time.Duration) (heal func() error, err error)

// openOther starts the servers of a strategy of others, and makes the links of the clients.
func (s *store) openOther(start func(*redistest.Lab) *other) {
	s.other = start(s.Lab)
	s.what = s.other.what
	for range seats {
		url, links := s.way()
		s.urls, s.links = append(s.urls, url), append(s.links, links)
	}
	// The proxies do not know the commands. They spoil any.
	s.texts = map[string][]string{anyRequest: {""}}
}

// anyRequest is an operation: the next bytes of a client, whatever they mean.
const anyRequest = "any request"

// otherWay returns a URL of the servers through new proxies.
func (s *store) otherWay() (url string, links []*faultproxy.Proxy) {
	var addrs []string
	for _, addr := range s.other.servers {
		p, err := faultproxy.Listen(func() (net.Conn, error) { return net.Dial("tcp", addr) })
		s.Check(err)
		s.Cleanup(p.Close)
		links, addrs = append(links, p), append(addrs, p.Addr())
	}
	return s.other.url(addrs), links
}

// others adds the faults of a store of others, and of its clients.
func (c *catalog) others(s *store, losing bool) {
	if !losing {
		c.processes(s)
		c.connections()
		c.spoils(anyRequest)
	}
	for _, f := range s.other.faults {
		if f.loses != losing {
			continue
		}
		c.add(server, f.least, f.most, f.name, func(n *nemesis) *injection {
			heal, err := f.inject(n.rand, n.lasts)
			if errors.Is(err, errNoVictim) {
				return nil
			}
			n.Check(err)
			return ofAll(func() {
				if heal != nil {
					n.Check(heal())
				}
			})
		})
	}
}

// ready waits until all servers work, after a fault.
func (s *store) ready() {
	if s.other != nil && s.other.ready != nil {
		s.Check(s.other.ready())
	}
}
