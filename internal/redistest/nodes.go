package redistest

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/redis/go-redis/v9"
)

// Nodes are independent servers, each with a fault proxy in front of it.
type Nodes struct {
	Servers []*Server
	Proxies []*faultproxy.Proxy
}

// StartNodes starts n servers for t.
func StartNodes(t testing.TB, n int, o *Options) *Nodes {
	t.Helper()
	own := Options{Own: true}
	if o != nil {
		own = *o
		own.Own = true
	}

	ns := &Nodes{}
	for range n {
		s := Start(t, &own)
		ns.Servers = append(ns.Servers, s)
		ns.Proxies = append(ns.Proxies, s.Proxy())
	}

	return ns
}

// URL returns a URL with the addresses of all proxies.
func (ns *Nodes) URL() string {
	all := make([]string, len(ns.Proxies))
	for i, p := range ns.Proxies {
		all[i] = p.Addr()
	}
	o := ns.Servers[0].o
	return "redis://" + userinfo(o.User, o.Password) + strings.Join(all, ",") + "/0"
}

// Clients returns a client of each node, through its proxy. A call of these clients ends at the
// deadline of its context at the latest.
func (ns *Nodes) Clients() []redis.UniversalClient {
	all := make([]redis.UniversalClient, len(ns.Servers))
	for i, s := range ns.Servers {
		o := s.ClientOptions()
		o.Addr = ns.Proxies[i].Addr()
		o.ContextTimeoutEnabled = true
		rdb := redis.NewClient(o)
		s.t.Cleanup(func() { rdb.Close() })
		all[i] = rdb
	}

	return all
}

// Settled calls count until its result has not changed for 100 ms, and returns the result. A caller
// that returns after a majority of replies leaves commands in flight. Settled lets these commands
// arrive. It gives up after 5 s.
func Settled(count func() int64) int64 {
	n := count()
	for range 50 {
		time.Sleep(100 * time.Millisecond)
		last := n
		if n = count(); n == last {
			break
		}
	}

	return n
}

// Keys lists the keys of each node.
func (ns *Nodes) Keys(ctx context.Context) ([][]string, error) {
	all := make([][]string, len(ns.Servers))
	err := Each(len(all), func(i int) (err error) {
		all[i], err = ns.Servers[i].command(ctx, "keys", "*").StringSlice()
		return err
	})
	return all, err
}
