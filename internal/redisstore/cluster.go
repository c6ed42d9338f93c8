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
	a        address
	d        *dialer
	searches searcher
	rdb      *redis.ClusterClient // for subscriptions; it gets the slots from clusterSlots

	mu      sync.Mutex           // guards the fields below
	servers map[string]*server   // by address
	gone    map[string]time.Time // since when a server has no slot, by address
	slots   [slot.Count]*server
	known   bool      // slots is known
	asked   time.Time // when slots was queried
	suspect *server   // the last server that failed; it is queried last
}

const (
	staleAfter = time.Minute            // when slots is queried again
	hedgeAfter = 200 * time.Millisecond // when a search queries another server
)

func newCluster(a address, d *dialer) *cluster {
	c := &cluster{a: a, d: d, servers: map[string]*server{}, gone: map[string]time.Time{}}
	c.searches.run, c.searches.open = c.search, d.open

	o := options(a, d, "")
	c.rdb = redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: a.addrs, ClusterSlots: c.clusterSlots,
		NewClient: func(made *redis.Options) *redis.Client {
			if made.NodeAddress != "" {
				made.Addr = made.NodeAddress // go-redis changes Addr if it is a loopback address
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
	// Before mu is locked, because a search under way locks it.
	c.searches.close()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.servers {
		s.rdb.Close()
	}
}

func (c *cluster) find(ctx context.Context, key string) (*server, error) {
	at, known, stale := c.has(key)
	// Before the first answer all callers wait for one search.
	if !known {
		if err := c.searches.wait(ctx); err != nil {
			return nil, err
		}
		at, _, _ = c.has(key)
	}
	if stale {
		// The known slots serve meanwhile. A server that has lost a slot redirects.
		c.searches.request()
	}
	if at == nil {
		return nil, redis.ErrClosed
	}
	return at, nil
}

// has returns the server of a key. If no server is known to have it, has returns
// any server, which then replies an error.
func (c *cluster) has(key string) (at *server, known, stale bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at = c.slots[slot.Of(key)]
	for _, s := range c.servers {
		if at == nil {
			at = s
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
		// The slot is being moved. Only this command goes to the other server, so
		// slots stays as it is.
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.serverLocked(redirected(addr, at.addr)), true
	}
	if errors.Is(err, redis.ErrClosed) && c.d.open.Err() == nil {
		// adopt has closed the server's client, so nothing was sent.
		if to, _, _ := c.has(key); to != at {
			return to, false
		}
	}
	return nil, false
}

// moved records that the server at addr has the slot of key now.
func (c *cluster) moved(at *server, key, addr string) *server {
	// Other slots may have moved as well.
	c.searches.request()
	c.mu.Lock()
	defer c.mu.Unlock()

	// The search takes a moment. Until then the next callers for this slot need no
	// redirection.
	to := c.serverLocked(redirected(addr, at.addr))
	c.slots[slot.Of(key)] = to
	return to
}

// redirected returns the address in a redirection by the server at origin. That
// server may not know its own host.
func redirected(addr, origin string) string {
	i := strings.LastIndexByte(addr, ':')
	if i < 0 {
		return addr
	}
	return hostport(strings.Trim(addr[:i], "[]"), addr[i+1:], origin)
}

// hostport returns the address of a server as the one at origin reports it. If the
// host is missing, or is a loopback address and origin is not, it is origin's host.
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

// serverLocked returns the server at an address. The caller holds mu.
func (c *cluster) serverLocked(addr string) *server {
	s := c.servers[addr]
	if s == nil {
		s = newServer(options(c.a, c.d, addr))
		// open ends before close locks mu. So either close finds this client, or it
		// is closed here.
		if c.d.open.Err() != nil {
			s.rdb.Close()
		}
		c.servers[addr] = s
	}
	return s
}

// failed starts a search if the slots may have moved.
func (c *cluster) failed(at *server, err error) {
	if !mayHaveMoved(err) {
		return
	}
	c.mu.Lock()
	c.suspect = at
	c.mu.Unlock()
	c.searches.request()
}

// span is a range of slots and the address of their server.
type span struct {
	first, last int64
	addr        string
}

// search queries one server after another for the slots, until one answers. It
// queries the next one when one has failed or is slow.
func (c *cluster) search(ctx context.Context) error {
	timeout := time.Duration(c.d.timeout.Load())
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	type found struct {
		spans []span
		err   error
	}
	nodes := c.nodes()
	// There is room for all answers, because search returns after the first good one.
	answers := make(chan found, len(nodes))

	var errs []error
	for next := 0; len(errs) < len(nodes); {
		if next < len(nodes) {
			s := nodes[next]
			next++
			c.searches.wg.Go(func() {
				spans, err := c.ask(within, s, timeout)
				answers <- found{spans, err}
			})
		}

		var hedge <-chan time.Time
		if next < len(nodes) {
			hedge = time.After(hedgeAfter)
		}

		select {
		case a := <-answers:
			if a.err == nil {
				// The queries that are still in flight end with within.
				c.adopt(a.spans)
				return nil
			}
			errs = append(errs, a.err)
		// This server is slow. It may still answer first.
		case <-hedge:
		}
	}
	return worst(errs, "nodes")
}

// nodes returns the servers to query, in this order.
func (c *cluster) nodes() []*server {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, addr := range c.a.addrs {
		c.serverLocked(addr)
	}

	var all []*server
	for _, s := range c.servers {
		all = append(all, s)
	}

	// Random, so that the clients of a cluster do not all query one server.
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	if i := slices.Index(all, c.suspect); i >= 0 {
		all = append(slices.Delete(all, i, i+1), c.suspect)
	}
	return all
}

// ask queries one server for the slots.
func (c *cluster) ask(ctx context.Context, s *server, took time.Duration) ([]span, error) {
	v, err := c.d.ask(ctx, s.rdb, "cluster", "slots")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.addr, diagnose(err, lockHints(c.a), took))
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
			host, _ := who[0].(string) // nil if the server does not know it
			port, _ := who[1].(int64)
			spans = append(spans, span{first, last, hostport(host, strconv.FormatInt(port, 10), s.addr)})
			total += last - first + 1
		}
		// Ranges that overlap are not the reply of a cluster.
		if total > slot.Count {
			return nil, fmt.Errorf("%s: %w", s.addr, resp.Unexpected(v, c.a.secrets()...))
		}
	}
	if len(spans) == 0 {
		return nil, fmt.Errorf("%s: the cluster is down: no server has a slot", s.addr)
	}
	return spans, nil
}

// adopt sets the slots. It closes the clients of servers that have had no slot for
// a while.
func (c *cluster) adopt(spans []span) {
	c.mu.Lock()
	defer c.mu.Unlock()

	old := c.slots
	c.slots = [slot.Count]*server{}
	used := map[*server]bool{}
	for _, sp := range spans {
		s := c.serverLocked(sp.addr)
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
		// Not sooner, because callers that found the server earlier may still use
		// its client.
		case c.asked.Sub(since) > staleAfter:
			s.rdb.Close()
			delete(c.servers, addr)
			delete(c.gone, addr)
		}
	}

	if old != c.slots && c.d.open.Err() == nil {
		// go-redis reloads on a goroutine of its own. That calls clusterSlots,
		// which locks mu.
		c.rdb.ReloadState(c.d.open)
	}
}

// clusterSlots passes the slots on to go-redis' client.
func (c *cluster) clusterSlots(ctx context.Context) ([]redis.ClusterSlot, error) {
	// find waits until the slots are known.
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

// probe asks all masters. It returns an error if one refuses, or if none answers. If
// only some do not answer, the others can be used.
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

	// Once one has answered, the others have a moment.
	answered := false
	var all []error
	late := time.NewTimer(grace)
	defer late.Stop()
	for ended := 0; ended < len(masters); {
		stop := late.C
		if !answered {
			stop = nil
		}

		select {
		case err := <-errs:
			ended++
			answered = answered || err == nil
			if err != nil {
				all = append(all, err)
			}
		case <-stop:
			// The others end with errors, which the loop still counts.
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

// healthy returns an error if a server reports that the cluster is down. A user
// without the right to query that can still use the cluster.
func (c *cluster) healthy(ctx context.Context, s *server) error {
	v, err := c.d.ask(ctx, s.rdb, "cluster", "info")
	info, _ := v.(string)

	// The error does not matter: the server has run a script, so it can be used.
	if err != nil || !strings.Contains(info, "cluster_state:fail") {
		return nil
	}
	return clusterDown{s.name}
}

// clusterDown reports that a server's cluster is down.
type clusterDown struct{ node string }

func (e clusterDown) Error() string {
	return e.node + ": CLUSTERDOWN the cluster is down (try again later; CLUSTER INFO has the details)"
}
func (clusterDown) RedisError() {}
