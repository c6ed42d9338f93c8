package redisstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
	"github.com/hasplock/hasp/internal/redisstore/slot"
)

// cluster is the topology of a cluster. It knows which server has which slot.
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
	staleAfter = time.Minute            // after this time, slots are queried again, and a server without slots is closed
	hedgeAfter = 200 * time.Millisecond // how long a search waits before it queries another server
)

func newCluster(a address, d *dialer) *cluster {
	c := &cluster{a: a, d: d, servers: map[string]*server{}}
	c.searches.run, c.searches.d = c.search, d
	return c
}

func (c *cluster) find(ctx context.Context, key string) (*server, error) {
	at, known, stale := c.has(key)
	// Until a search has succeeded, all callers wait for the same search.
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

// The method has returns the server of a key. The result known says whether a search has succeeded,
// and stale whether that was long ago. If no server has the slot, the method returns any server.
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
		// Do not change c.slots, because only this command goes to the other server while the slot
		// is being moved.
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.serverLocked(redirected(addr, at.addr)), true
	}
	if errors.Is(err, redis.ErrClosed) && c.d.open.Err() == nil {
		// The method adopt has closed the server's pool, so nothing was sent.
		if to, _, _ := c.has(key); to != at {
			return to, false
		}
	}
	return nil, false
}

// moved records that the slot of key is now at the address addr, and returns the server there.
func (c *cluster) moved(at *server, key, addr string) *server {
	// Search for all slots, because other slots may have moved as well.
	c.searches.request()
	c.mu.Lock()
	defer c.mu.Unlock()

	// Record this slot before the search ends, so that the next calls for it need no redirection.
	to := c.serverLocked(redirected(addr, at.addr))
	c.slots[slot.Of(key)] = to
	return to
}

// redirected completes addr, to which the server with the address origin redirects a command. If
// that server does not know the host, addr has no host.
func redirected(addr, origin string) string {
	i := strings.LastIndexByte(addr, ':')
	if i < 0 {
		return addr
	}
	return hostport(strings.Trim(addr[:i], "[]"), addr[i+1:], origin)
}

// hostport joins a host and a port that the server with the address origin reported. If the host is
// missing, or if it is a loopback address and the host of origin is not, hostport uses the host of
// origin. If the port is 0, hostport uses the port of origin.
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

// The method failed starts a search if the slots may have moved.
func (c *cluster) failed(_ *server, err error) {
	if mayHaveMoved(err) {
		c.searches.request()
	}
}

// The rest of this file asks the servers of a cluster for the map of slots, and checks the servers.

// span is a range of slots and the address of their server.
type span struct {
	first, last int64
	addr        string
}

// The method search queries the servers for the slots until one answers. If a server fails or is
// slow, the method queries the next one.
func (c *cluster) search(ctx context.Context, timeout time.Duration) error {
	answers, errs := askAll(ctx, c.nodes(), hedgeAfter, 0, func(ctx context.Context, s *server) ([]span, error) {
		return c.ask(ctx, s, timeout)
	})
	if len(answers) == 0 {
		return worst(errs, "nodes")
	}
	c.adopt(answers[0])
	return nil
}

// nodes returns the servers to query, in a random order, so that the clients of a cluster do not
// all query the same one.
func (c *cluster) nodes() []*server {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, addr := range c.a.addrs {
		c.serverLocked(addr)
	}

	all := slices.Collect(maps.Values(c.servers))
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// ask queries one server for the slots.
func (c *cluster) ask(ctx context.Context, s *server, took time.Duration) ([]span, error) {
	reply := s.Pipeline(ctx, []string{"cluster", "slots"})[0]
	if reply.Err != nil {
		return nil, fmt.Errorf("%s: %w", s.addr, diagnose(reply.Err, lockHints(c.a), took))
	}

	var spans []span
	total := int64(0)
	ranges, _ := reply.Value.([]any)
	for _, r := range ranges {
		parts, _ := r.([]any)
		if len(parts) < 3 {
			continue
		}
		first, _ := parts[0].(int64)
		last, ok := parts[1].(int64)
		if who, _ := parts[2].([]any); ok && len(who) > 1 && 0 <= first && first <= last && last < slot.Count {
			host, _ := who[0].(string) // nil if the server does not know its host
			port, _ := who[1].(int64)
			spans = append(spans, span{first, last, hostport(host, strconv.FormatInt(port, 10), s.addr)})
			total += last - first + 1
		}
		// A cluster has only slot.Count slots, so some of these ranges overlap.
		if total > slot.Count {
			return nil, fmt.Errorf("%s: %w", s.addr, resp.Unexpected(reply.Value, c.a.secrets()...))
		}
	}
	if len(spans) == 0 {
		return nil, fmt.Errorf("%s: the cluster is down: no server has a slot", s.addr)
	}
	return spans, nil
}

// adopt replaces the known slots by those of an answer. It closes the pools of servers that have
// had no slot for the duration staleAfter.
func (c *cluster) adopt(spans []span) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.slots = [slot.Count]*server{}
	used := map[*server]bool{}
	for _, sp := range spans {
		s := c.serverLocked(sp.addr)
		used[s] = true
		for i := sp.first; i <= sp.last; i++ {
			c.slots[i] = s
		}
	}
	c.asked = time.Now()

	for addr, s := range c.servers {
		switch {
		case used[s]:
			s.unused = time.Time{}
		case s.unused.IsZero():
			s.unused = c.asked
		// Close the pool only after the duration staleAfter, because callers that found the server
		// earlier may still use it.
		case c.asked.Sub(s.unused) > staleAfter:
			s.pool.Close()
			delete(c.servers, addr)
		}
	}
}

// probe calls ask for each master. It returns an error if a master replied with an error, or if
// none answered. If only some masters answered, it returns nil, because these can be used.
func (c *cluster) probe(ctx context.Context, ask func(context.Context, *server) error) error {
	answers, errs := askAll(ctx, c.masters(), 0, grace, func(ctx context.Context, s *server) (struct{}, error) {
		return struct{}{}, ask(ctx, s)
	})
	if len(errs) == 0 {
		return nil
	}
	if err := worst(errs, "masters"); len(answers) == 0 || errors.As(err, new(redis.Error)) {
		return err
	}
	return nil
}

// masters returns the servers that have slots.
func (c *cluster) masters() []*server {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []*server
	for _, s := range c.slots {
		if s != nil && !slices.Contains(all, s) {
			all = append(all, s)
		}
	}
	return all
}
