package redisstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// nodes knows the clients of a cluster's servers, and asks them which server has which slot. The
// search of go-redis asks one server after another, names no server in its errors, and does not
// find the host of a server that reports none.
type nodes struct {
	d     *dialer
	a     address
	known sync.Map        // address as in the map of slots → *redis.Client
	first []*redis.Client // which search uses until the cluster has made its own

	mu  sync.Mutex      // guards ids
	ids map[string]bool // the IDs of the servers in the last map of slots, or nil
}

// client returns a client for the cluster, and fills n.known and n.first with the clients of the
// servers that the URL names.
func (n *nodes) client() *redis.ClusterClient {
	all := n.d.options(n.a, n.a.addrs...)
	all.OnConnect = n.check
	o := all.Cluster()
	o.ClusterSlots = n.search
	c := redis.NewClusterClient(o)

	c.OnNewNode(func(node *redis.Client) {
		// Skip a client whose loopback address has no mark. go-redis makes it as a second client of
		// a server when that is redirected to, and closes it after a minute.
		if addr := node.Options().Addr; addr == marked(whole(addr)) {
			n.known.Store(addr, node)
		}
	})

	for _, addr := range n.a.addrs {
		all.Addrs = []string{addr}
		first := redis.NewClient(all.Simple())
		n.first = append(n.first, first)
		n.known.Store(marked(addr), first)
	}

	return c
}

// search asks the servers for the slots until one answers. If a server fails or is slow, search
// asks the next one. The order is random, so that the clients of a cluster do not all ask the same
// one.
func (n *nodes) search(ctx context.Context) ([]redis.ClusterSlot, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(n.d.timeout.Load()))
	defer cancel()
	var all []*redis.Client
	n.known.Range(func(_, node any) bool {
		all = append(all, node.(*redis.Client))
		return true
	})
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })

	answers, errs := askAll(ctx, all, hedgeAfter, 0, n.ask)
	if len(answers) == 0 {
		return nil, located{worst(errs, "nodes")}
	}
	return answers[0], nil
}

// check returns an error if a new connection leads to a server of another cluster, which got the
// address of a server of this one. It asks for the map of slots only if the server's ID is not
// known, because that reply may be long. If the server is new in this cluster, its map has IDs that
// are known.
func (n *nodes) check(ctx context.Context, conn *redis.Conn) error {
	id, err := conn.ClusterMyID(ctx).Result()
	if err == nil && n.knows(id) {
		return nil
	}
	if err != nil && !resp.IsReply(err) {
		return err
	}

	// The ID is not known, or the server refused to report it. So the map of slots decides.
	//lint:ignore SA1019 Redis 6.2 has no CLUSTER SHARDS
	slots, err := conn.ClusterSlots(ctx).Result()
	if err == nil && !n.adopt(slots) {
		err = fmt.Errorf("%w", errForeign) // go-redis unwraps the error once
	}
	return err
}

// knows reports whether the server with an ID is in this cluster, or no server is known yet.
func (n *nodes) knows(id string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ids == nil || n.ids[id]
}

// adopt remembers the servers of a map of slots, masters and replicas. If none of them was known,
// the map is of another cluster, and adopt returns false. Each map replaces the last one, so all
// servers may be replaced one by one.
func (n *nodes) adopt(slots []redis.ClusterSlot) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	ids := map[string]bool{}
	isOurs := n.ids == nil // the first map decides which cluster this is
	for _, s := range slots {
		for _, node := range s.Nodes {
			ids[node.ID] = true
			isOurs = isOurs || n.ids[node.ID]
		}
	}

	if isOurs && len(ids) > 0 { // an empty map would make all later maps foreign
		n.ids = ids
	}
	return isOurs
}

var errForeign = resp.NotSent(errors.New("it belongs to another cluster " +
	"(was the cluster created anew? then restart the program)"))

// ask asks one server for the slots, and for the master of each.
func (n *nodes) ask(ctx context.Context, node *redis.Client) ([]redis.ClusterSlot, error) {
	began := time.Now()
	origin := whole(node.Options().Addr)
	//lint:ignore SA1019 Redis 6.2 has no CLUSTER SHARDS
	slots, err := node.ClusterSlots(ctx).Result()
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s: %w", origin, diagnose(err, lockHints(n.a), time.Since(began)))
	case len(slots) == 0:
		return nil, fmt.Errorf("%s: the cluster is down: no server has a slot", origin)
	case !n.adopt(slots):
		return nil, fmt.Errorf("%s: %w", origin, errForeign)
	}

	for i := range slots {
		if len(slots[i].Nodes) == 0 {
			return nil, fmt.Errorf("%s: a slot without a server", origin)
		}
		master := slots[i].Nodes[0] // the replicas follow
		master.Addr = marked(redirected(master.Addr, origin))
		slots[i].Nodes = []redis.ClusterNode{master} // hasp uses no replica
	}

	return slots, nil
}

// redirected completes an address that the server with the address origin reported. The host of
// origin replaces a host that is missing or "?", because the server does not know it. It also
// replaces a loopback address, unless origin is one, because that address would lead to this
// machine. The port of origin replaces the port 0.
func redirected(addr, origin string) string {
	// Do not use net.SplitHostPort, because an IPv6 address may have no brackets.
	i := strings.LastIndexByte(addr, ':')
	if i < 0 { // there is no port
		return addr
	}
	host := strings.Trim(addr[:i], "[]")
	port := addr[i+1:]
	originHost, originPort, _ := net.SplitHostPort(origin)
	isUnknown := host == "" || host == "?"
	if isUnknown || loopback(host) && !loopback(originHost) {
		host = originHost
	}
	if port == "0" {
		port = originPort
	}
	return net.JoinHostPort(host, port)
}

// keepsHost begins the loopback addresses that search returns, because go-redis would remove their
// hosts.
const keepsHost = "="

// marked returns the address of a node as search returns it. Other addresses have no mark, so that
// go-redis finds the same client when a server redirects to them.
func marked(addr string) string {
	host, _, _ := net.SplitHostPort(addr)
	if net.ParseIP(host).IsLoopback() {
		return keepsHost + addr
	}
	return addr
}

// whole returns the address of a node without keepsHost.
func whole(addr string) string { return strings.TrimPrefix(addr, keepsHost) }

func loopback(host string) bool {
	return host == "localhost" || net.ParseIP(host).IsLoopback()
}
