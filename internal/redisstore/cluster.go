package redisstore

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/slot"
)

// cluster is the topology of a cluster: which server has which slot.
type cluster struct {
	a        address
	d        *dialer
	searches searcher

	mu      sync.Mutex         // guards the fields below
	servers map[string]*server // by address
	slots   [slot.Count]*server
	asked   time.Time // when a search last set slots; zero before the first one
}

const (
	staleAfter = time.Minute            // when slots are queried again, and unused servers closed
	hedgeAfter = 200 * time.Millisecond // how long a search waits before it queries another server
)

func newCluster(a address, d *dialer) *cluster {
	c := &cluster{a: a, d: d, servers: map[string]*server{}}
	c.searches.run, c.searches.d = c.search, d
	return c
}

func (c *cluster) find(ctx context.Context, key string) (*server, error) {
	at, known, stale := c.has(key)
	// Until the first answer, all callers wait for one search.
	if !known {
		if err := c.searches.wait(ctx); err != nil {
			return nil, err
		}
		at, _, stale = c.has(key)
	}
	if stale {
		// Use the known slots meanwhile, because a server that has lost a slot redirects.
		c.searches.request()
	}
	if at == nil {
		return nil, redis.ErrClosed
	}
	return at, nil
}

// has returns the server of a key. known is true after a search has succeeded, and stale is true if
// slots is old. If no server has the slot, at is any server, which then replies with an error.
func (c *cluster) has(key string) (at *server, known, stale bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at = c.slots[slot.Of(key)]
	for _, s := range c.servers {
		if at == nil {
			at = s
		}
	}
	return at, !c.asked.IsZero(), time.Since(c.asked) > staleAfter
}

func (c *cluster) follow(at *server, key string, err error) (to *server, asking bool) {
	if err == nil {
		return nil, false
	}
	if addr, ok := redis.IsMovedError(err); ok {
		return c.moved(at, key, addr), false
	}
	if addr, ok := redis.IsAskError(err); ok {
		// Do not change slots: the slot is being moved, and only this command goes to the other
		// server.
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.serverLocked(redirected(addr, at.addr)), true
	}
	if errors.Is(err, redis.ErrClosed) && c.d.open.Err() == nil {
		// adopt has closed the server's pool, so nothing was sent.
		if to, _, _ := c.has(key); to != at {
			return to, false
		}
	}
	return nil, false
}

// moved records that the server at addr has the slot of key now.
func (c *cluster) moved(at *server, key, addr string) *server {
	// Search for all slots, because others may have moved as well.
	c.searches.request()
	c.mu.Lock()
	defer c.mu.Unlock()

	// Record this slot before the search ends, so that its next callers need no redirection.
	to := c.serverLocked(redirected(addr, at.addr))
	c.slots[slot.Of(key)] = to
	return to
}

// redirected returns the address to which the server at origin redirects a command. If that server
// does not know the host, addr has no host.
func redirected(addr, origin string) string {
	i := strings.LastIndexByte(addr, ':')
	if i < 0 {
		return addr
	}
	return hostport(strings.Trim(addr[:i], "[]"), addr[i+1:], origin)
}

// hostport returns the address of a server whose host and port the server at origin reported. If
// the host is missing, or is a loopback address and origin's is not, hostport uses origin's host.
// If the port is 0, it uses origin's port.
func hostport(host, port, origin string) string {
	ours, its, _ := net.SplitHostPort(origin)
	if host == "" || host == "?" || loopback(host) && !loopback(ours) {
		host = ours
	}
	if port == "0" {
		port = its
	}
	return net.JoinHostPort(host, port)
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// serverLocked returns the server at an address, and creates it if it is new. The caller holds mu.
func (c *cluster) serverLocked(addr string) *server {
	s := c.servers[addr]
	if s == nil {
		s = newServer(c.a, c.d, addr)
		c.servers[addr] = s
	}
	return s
}

// failed starts a search if the slots may have moved.
func (c *cluster) failed(_ *server, err error) {
	if mayHaveMoved(err) {
		c.searches.request()
	}
}
