package rig

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"slices"
	"time"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/testhost"
)

// Strategy is a strategy whose store this package does not know, or another library.
type Strategy struct {
	Name     string
	Term     time.Duration // of all leases
	HostTerm time.Duration // the same, on hosts of their own; if zero, Term

	// Open starts the servers, each at a place of its own. The Lab stops them, and Open reports
	// errors to it. If it is nil, the strategy uses Redis servers on hosts of their own.
	Open  func(*redistest.Lab, testhost.Where) *Store
	Redis int // how many of them

	// Client opens a client of another library, with servers at addrs. If it is nil, the
	// clients are those of hasp. If Open is set as well, URL joins addrs with commas.
	Client func(ctx context.Context, addrs []string, term time.Duration) (Locker, error)
}

// Store is a store that this package does not know. Clients reach each of its servers
// through a proxy of their own, which has the faults of links. On hosts of their own, the
// network between them has these faults.
type Store struct {
	What    string                                  // a description
	Servers []string                                // the address of each server, in the order of their places
	URL     func(addrs []string) string             // of the servers, if clients reach them at other addresses
	Left    func(context.Context) ([]string, error) // lists what clients have left
	Faults  []Fault

	// Kill ends a server at once, and Start starts it again with its data. They are used on
	// hosts only. Ready waits, after each fault, until all servers work. It may be nil.
	Kill  func(server int)
	Start func(server int) error
	Ready func() error

	// Leader returns the index of the leader, or a negative number during an election. It is
	// nil if the servers have no leader.
	Leader func() int
}

// ErrNoVictim means that there is nothing now that a fault can disturb.
var ErrNoVictim = errors.New("no victim")

// Fault is a fault of servers.
type Fault struct {
	Name        string
	Loses       bool    // it takes locks away
	Least, Most float64 // the length, in terms

	// Inject makes the fault happen. It returns what ends the fault, or nil if there is
	// nothing to end, or ErrNoVictim. Lasts is how long the fault lasts.
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
	var where testhost.Where
	if s.apart != nil {
		where = s.apart.server
	}
	s.other = o.Open(s.Lab, where)
	s.what = s.other.What
	if s.apart != nil {
		s.what += ownHosts
		s.urls = slices.Repeat([]string{s.other.URL(s.other.Servers)}, seats)
		return
	}

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
	switch {
	case losing:
	case s.apart != nil:
		c.processes(s)
		c.clientHosts(s)
		c.network(s)
	default:
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
			if errors.Is(err, ErrNoVictim) {
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

// size is how many servers the store has.
func (s *store) size() int {
	if s.other != nil {
		return len(s.other.Servers)
	}
	return len(s.servers)
}

// kill ends a server at once.
func (s *store) kill(server int) {
	if s.other != nil {
		s.other.Kill(server)
		return
	}
	s.servers[server].Kill()
}

// restart starts a killed server. Servers of other stores always keep their data.
func (s *store) restart(server int, data bool) error {
	if s.other != nil {
		return s.other.Start(server)
	}
	return s.servers[server].Start(data)
}

// ready waits until all servers work, after a fault.
func (s *store) ready() {
	if s.other != nil && s.other.Ready != nil {
		s.Check(s.other.Ready())
	}
}
