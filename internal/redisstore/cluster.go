package redisstore

import (
	"context"
	"errors"
	"fmt"
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

// cluster is the topology of a cluster: which server has which slot.
type cluster struct {
	a    address
	d    *dialer
	look looker
	rdb  *redis.ClusterClient // for subscriptions; it has our word on the slots

	mu      sync.Mutex           // guards the rest
	servers map[string]*server   // by address
	gone    map[string]time.Time // those that have no slot, since when
	slots   [slot.Count]*server
	known   bool      // that is, slots
	asked   time.Time // when they were asked for
	suspect *server   // the last that failed: who is asked last
}

const (
	staleAfter = time.Minute            // the map of slots is asked for again
	hedgeAfter = 200 * time.Millisecond // another node is asked
)

func newCluster(a address, d *dialer) *cluster {
	c := &cluster{a: a, d: d, servers: map[string]*server{}, gone: map[string]time.Time{}}
	c.look.search, c.look.open = c.search, d.open
	o := options(a, d, "")
	c.rdb = redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: a.addrs, ClusterSlots: c.clusterSlots,
		NewClient: func(made *redis.Options) *redis.Client {
			if made.NodeAddress != "" {
				made.Addr = made.NodeAddress // which go-redis makes up otherwise for a loopback
			}
			return redis.NewClient(made)
		},
		Username: o.Username, Password: o.Password, Dialer: o.Dialer,
		DialTimeout: o.DialTimeout, DialerRetries: o.DialerRetries, MaxRetries: o.MaxRetries,
		ContextTimeoutEnabled: true, ReadTimeout: -1, WriteTimeout: -1,
		DisableIdentity: true, MaintNotificationsConfig: o.MaintNotificationsConfig,
		PipelinePoolSize: o.PipelinePoolSize,
		ReadBufferSize:   o.ReadBufferSize, WriteBufferSize: o.WriteBufferSize,
	})
	return c
}

func (c *cluster) close() {
	c.look.close()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.servers {
		s.rdb.Close()
	}
}

func (c *cluster) find(ctx context.Context, key string) (*server, error) {
	at, known, stale := c.has(key)
	if !known {
		if err := c.look.wait(ctx); err != nil {
			return nil, err
		}
		at, _, _ = c.has(key)
	}
	if stale {
		c.look.trouble()
	}
	if at == nil {
		return nil, redis.ErrClosed
	}
	return at, nil
}

// has returns the server of a key: if nobody is known to have it, any will
// say so.
func (c *cluster) has(key string) (at *server, known, stale bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at = c.slots[slot.Of(key)]
	for _, any := range c.servers {
		if at == nil {
			at = any
		}
	}
	return at, c.known, time.Since(c.asked) > staleAfter
}

func (c *cluster) follow(at *server, key string, err error) (to *server, asking bool) {
	if err == nil {
		return nil, false
	}
	if addr, ok := redis.IsMovedError(err); ok {
		return c.moved(at, key, addr), false
	}
	if addr, ok := redis.IsAskError(err); ok {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.server(redirected(addr, at.addr)), true
	}
	if errors.Is(err, redis.ErrClosed) && c.d.open.Err() == nil {
		// A server that was given up: nothing was sent.
		if to, _, _ := c.has(key); to != at {
			return to, false
		}
	}
	return nil, false
}

// moved takes in who has the slot of key now.
func (c *cluster) moved(at *server, key, addr string) *server {
	c.look.trouble()
	c.mu.Lock()
	defer c.mu.Unlock()
	to := c.server(redirected(addr, at.addr))
	c.slots[slot.Of(key)] = to
	return to
}

// redirected is the address in a redirection by the server at origin, which
// need not know its own host.
func redirected(addr, origin string) string {
	i := strings.LastIndexByte(addr, ':')
	if i < 0 {
		return addr
	}
	return hostport(strings.Trim(addr[:i], "[]"), addr[i+1:], origin)
}

// hostport is the address of a node, as the one at origin calls it: if it does
// not know the host, or knows it by a name that is no use here, it is its own.
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

// server returns the server at an address. mu is held.
func (c *cluster) server(addr string) *server {
	s := c.servers[addr]
	if s == nil {
		s = newServer(options(c.a, c.d, addr))
		if c.d.open.Err() != nil {
			s.rdb.Close()
		}
		c.servers[addr] = s
	}
	return s
}

func (c *cluster) failed(at *server, err error) {
	if !moved(err) {
		return
	}
	c.mu.Lock()
	c.suspect = at
	c.mu.Unlock()
	c.look.trouble()
}

// span is a range of slots and who has them.
type span struct {
	first, last int64
	addr        string
}

// search asks one node after another who has which slot, the next one when
// one fails or hesitates.
func (c *cluster) search(ctx context.Context) error {
	timeout := time.Duration(c.d.timeout.Load())
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	type answer struct {
		spans []span
		err   error
	}
	nodes := c.nodes()
	answers := make(chan answer, len(nodes))
	var errs []error
	for next := 0; len(errs) < len(nodes); {
		if next < len(nodes) {
			s := nodes[next]
			next++
			c.look.wg.Go(func() {
				spans, err := c.ask(within, s, timeout)
				answers <- answer{spans, err}
			})
		}
		var hedge <-chan time.Time
		if next < len(nodes) {
			hedge = time.After(hedgeAfter)
		}
		select {
		case a := <-answers:
			if a.err == nil {
				c.adopt(a.spans)
				return nil
			}
			errs = append(errs, a.err)
		case <-hedge:
		}
	}
	return worst(errs, "nodes")
}

// nodes are those to ask, in this order.
func (c *cluster) nodes() []*server {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, addr := range c.a.addrs {
		c.server(addr)
	}
	var all []*server
	for _, s := range c.servers {
		all = append(all, s)
	}
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	if i := slices.Index(all, c.suspect); i >= 0 {
		all = append(slices.Delete(all, i, i+1), c.suspect)
	}
	return all
}

// ask asks one node for the slots.
func (c *cluster) ask(ctx context.Context, s *server, took time.Duration) ([]span, error) {
	v, err := c.d.ask(ctx, s.rdb, "cluster", "slots")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.addr, explain(err, lockServer(c.a), took))
	}
	var spans []span
	total := int64(0)
	ranges, _ := v.([]any)
	for _, r := range ranges {
		parts, _ := r.([]any)
		if len(parts) < 3 {
			continue
		}
		first, _ := parts[0].(int64)
		last, ok := parts[1].(int64)
		if who, _ := parts[2].([]any); ok && len(who) > 1 && 0 <= first && first <= last && last < slot.Count {
			host, _ := who[0].(string) // nil where the node does not know it
			port, _ := who[1].(int64)
			spans = append(spans, span{first, last, hostport(host, strconv.FormatInt(port, 10), s.addr)})
			total += last - first + 1
		}
		if total > slot.Count {
			return nil, fmt.Errorf("%s: %w", s.addr, resp.Unexpected(v, c.a.secrets()...))
		}
	}
	if len(spans) == 0 {
		return nil, fmt.Errorf("%s: the cluster is down: nobody has any slot", s.addr)
	}
	return spans, nil
}

// adopt takes in who has which slot. Servers that have had none for a while
// are given up.
func (c *cluster) adopt(spans []span) {
	c.mu.Lock()
	defer c.mu.Unlock()
	old := c.slots
	c.slots = [slot.Count]*server{}
	used := map[*server]bool{}
	for _, sp := range spans {
		s := c.server(sp.addr)
		used[s] = true
		for i := sp.first; i <= sp.last; i++ {
			c.slots[i] = s
		}
	}
	c.known, c.asked = true, time.Now()
	for addr, s := range c.servers {
		switch since, gone := c.gone[addr]; {
		case used[s]:
			delete(c.gone, addr)
		case !gone:
			c.gone[addr] = c.asked
		case c.asked.Sub(since) > staleAfter:
			s.rdb.Close()
			delete(c.servers, addr)
			delete(c.gone, addr)
		}
	}
	if old != c.slots && c.d.open.Err() == nil {
		c.rdb.ReloadState(c.d.open)
	}
}

// clusterSlots is what go-redis is told.
func (c *cluster) clusterSlots(ctx context.Context) ([]redis.ClusterSlot, error) {
	if _, err := c.find(ctx, ""); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []redis.ClusterSlot
	for i := 0; i < slot.Count; i++ {
		first := i
		for i+1 < slot.Count && c.slots[i+1] == c.slots[first] {
			i++
		}
		if s := c.slots[first]; s != nil {
			all = append(all, redis.ClusterSlot{Start: first, End: i, Nodes: []redis.ClusterNode{{Addr: s.addr}}})
		}
	}
	return all, nil
}

// probe asks all masters. One that cannot be reached is no reason not to use
// the others; one that refuses is.
func (c *cluster) probe(ctx context.Context, ask func(context.Context, *server) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	masters := c.masters()
	errs := make(chan error, len(masters))
	for _, s := range masters {
		go func() {
			err := ask(ctx, s)
			if err == nil {
				err = c.healthy(ctx, s)
			}
			errs <- err
		}()
	}
	answered := false
	var all []error
	late := time.NewTimer(grace)
	defer late.Stop()
	for heard := 0; heard < len(masters); {
		stop := late.C
		if !answered {
			stop = nil
		}
		select {
		case err := <-errs:
			heard++
			answered = answered || err == nil
			if err != nil {
				all = append(all, err)
			}
		case <-stop:
			cancel()
		}
	}
	if len(all) == 0 {
		return nil
	}
	if err := worst(all, "masters"); !answered || errors.As(err, new(redis.Error)) {
		return err
	}
	return nil
}

// masters are the servers that have slots.
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

// healthy asks a node how the cluster is. A user who may not know may use it
// all the same.
func (c *cluster) healthy(ctx context.Context, s *server) error {
	v, err := c.d.ask(ctx, s.rdb, "cluster", "info")
	info, _ := v.(string)
	if err != nil || !strings.Contains(info, "cluster_state:fail") {
		return nil
	}
	return clusterDown{s.name}
}

// clusterDown is a node's reply in other words.
type clusterDown struct{ node string }

func (e clusterDown) Error() string {
	return e.node + ": CLUSTERDOWN the cluster is down (try again later; cluster info says more)"
}
func (clusterDown) RedisError() {}
