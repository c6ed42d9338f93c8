package rig

import (
	"context"
	"math/rand/v2"
	"net"
	"slices"
	"time"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// Strategy is a strategy whose store this package does not know, or another library.
type Strategy struct {
	Name string
	Term time.Duration // of all leases

	// Open starts the servers. The Lab stops them, and Open reports errors to it. If it is nil,
	// the strategy uses Redis servers on hosts of their own.
	Open  func(*redistest.Lab) *Store
	Redis int // how many of them

	// Client opens a client of another library, with servers at addrs. If it is nil, the
	// clients are those of hasp. If Open is set as well, URL joins addrs with commas.
	Client func(ctx context.Context, addrs []string, term time.Duration) (Locker, error)
}

// Store is a store that this package does not know. Clients reach each of its servers
// through a proxy of their own, which has the faults of links.
type Store struct {
	What    string                                  // a description
	Servers []string                                // the address of each server
	URL     func(addrs []string) string             // of the servers, if clients reach them at other addresses
	Left    func(context.Context) ([]string, error) // lists what clients have left
	Faults  []Fault
}

// Fault is a fault of servers.
type Fault struct {
	Name        string
	Loses       bool    // it takes locks away
	Least, Most float64 // the length, in terms

	// Inject makes the fault happen. It returns what ends the fault, or nil if there is
	// nothing to end. Lasts is how long the fault lasts.
	Inject func(r *rand.Rand, lasts time.Duration) (heal func() error, err error)
}

// more returns the strategy of a run if this package does not know its store, or nil.
func (o *options) more() *Strategy {
	i := slices.IndexFunc(o.More, func(s Strategy) bool { return s.Name == o.strategy })
	if i < 0 {
		return nil
	}
	return &o.More[i]
}

// openOther starts the servers of a strategy.
func (s *store) openOther(o *Strategy) {
	s.other = o.Open(s.Lab)
	s.what = s.other.What
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
	for _, addr := range s.other.Servers {
		p, err := faultproxy.Listen(func() (net.Conn, error) { return net.Dial("tcp", addr) })
		s.Check(err)
		s.Cleanup(p.Close)
		links, addrs = append(links, p), append(addrs, p.Addr())
	}
	return s.other.URL(addrs), links
}

// others adds the faults of a store that this package does not know, and of its clients.
func (c *catalog) others(s *store, losing bool) {
	if !losing {
		c.processes(s)
		c.connections()
		c.spoils(anyRequest)
	}
	for _, f := range s.other.Faults {
		if f.Loses != losing {
			continue
		}
		c.add(server, f.Least, f.Most, f.Name, func(n *nemesis) *injection {
			heal, err := f.Inject(n.rand, n.lasts)
			n.Check(err)
			return ofAll(func() {
				if heal != nil {
					n.Check(heal())
				}
			})
		})
	}
}
