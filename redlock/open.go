package redlock

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// params are the parameters of a redlock URL. The parameters of the engine, such as ttl, are not
// among them.
var params = append([]string{"allow_eviction", "allow_unsafe_nodes", "db", "fence_ttl", "max_ttl"}, tlsParams...)

var tlsParams = []string{"ca", "cert", "key", "server_name"}

// openGrace is how long Open waits for the other nodes once a quorum has answered.
const openGrace = 250 * time.Millisecond

// openConfig opens the driver for hasp.Open. It succeeds if a quorum of the nodes answers. The
// driver uses the other nodes when they answer later.
func openConfig(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	o, err := options(c.Params)
	if err != nil {
		return nil, err
	}

	nodes, names, err := nodeURLs(c.Nodes)
	if err != nil {
		return nil, err
	}

	// Check the options and names first, because a later error would have to close the stores.
	if _, err := newDriver(nil, names, o); err != nil {
		return nil, err
	}

	var stores []*redisstore.Store
	var probes []func(context.Context) error
	for _, node := range nodes {
		s, probe, err := redisstore.Prepare(node, nodeParams(node, nodes, c.Params), connections)
		if err != nil {
			for _, s := range stores {
				// Ignore the error, because the stores have sent nothing.
				s.Close()
			}
			return nil, err
		}

		stores, probes = append(stores, s), append(probes, probe)
	}

	d, err := newDriver(stores, names, o)
	if err != nil {
		return nil, err
	}

	// Ignore the error, because Prepare has refused a value that is no bool.
	if evict, _ := strconv.ParseBool(c.Params["allow_eviction"]); evict {
		d.m.evict = "1"
	}
	d.missing, err = probe(ctx, d.m, probes)
	if err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// nodeURLs returns the URL and the address of each node in the given lists.
func nodeURLs(lists []string) (nodes, names []string, err error) {
	for _, list := range lists {
		urls, err := redisstore.Nodes(list)
		if err != nil {
			return nil, nil, err
		}
		for _, node := range urls {
			name, err := redisstore.Address(node)
			if err != nil {
				return nil, nil, err
			}
			nodes, names = append(nodes, node), append(names, name)
		}
	}

	return nodes, names, nil
}

// nodeParams returns those of the parameters p that redisstore needs for one node. The argument all
// contains the URLs of all nodes. If some of these have TLS, only they receive the parameters of
// TLS, because redisstore refuses these for a node without TLS. If no node has TLS, every node
// receives them, so that redisstore refuses them.
func nodeParams(node string, all []string, p map[string]string) map[string]string {
	secure := func(node string) bool { return strings.HasPrefix(node, "rediss://") }
	withoutTLS := !secure(node) && slices.ContainsFunc(all, secure)
	params := maps.Clone(p)
	maps.DeleteFunc(params, func(name, _ string) bool {
		isOurs := !slices.Contains(redisstore.Params, name) // such as max_ttl
		return isOurs || withoutTLS && slices.Contains(tlsParams, name)
	})
	return params
}

// options returns the Options that the parameters of redlock itself set. The error is ErrInvalid.
func options(p map[string]string) (*Options, error) {
	o := &Options{}
	var err error
	if o.FenceTTL, err = redisstore.FenceTTL(p); err != nil {
		return nil, err
	}
	if text, ok := p["max_ttl"]; ok {
		if o.MaxTTL, err = clock.ParseDuration(text); err != nil || o.MaxTTL <= 0 {
			return nil, invalid("parameter max_ttl=%q: want a positive duration such as 30s", text)
		}
	}

	if text, ok := p["allow_unsafe_nodes"]; ok {
		if o.AllowUnsafeNodes, err = strconv.ParseBool(text); err != nil {
			return nil, invalid("parameter allow_unsafe_nodes=%q: want true or false", text)
		}
	}

	return o, nil
}

// probe asks all nodes at once, and returns as err why the driver cannot be opened. When a quorum
// has answered without an error, probe waits at most the time openGrace for the other nodes. The
// call to a late node continues after that.
//
// If a node answers with an error, such as a wrong password, or if its server must not store locks,
// probe returns that error even if the others are a quorum, because waiting does not help. A node
// that is silent, refuses connections or has no address may be back soon. If the others are a
// quorum, the result missing contains the errors of such nodes, and otherwise err does.
func probe(
	ctx context.Context, m *members, probes []func(context.Context) error,
) (missing, err error) {
	errs := make([]error, len(m.nodes))
	for i, n := range m.nodes {
		errs[i] = n.errorf("no answer yet") // until the node's result arrives
	}

	well := 0         // how many nodes have answered without an error
	var lasting error // an error of a node that waiting does not change
	m.gather(ctx, func(n *node) func() time.Duration {
		err := probes[n.i](ctx)
		if err == nil {
			_, err = n.refreshMark(ctx, time.Time{})
		}
		return func() time.Duration {
			errs[n.i] = err
			switch {
			case err == nil:
				well++
			case errors.Is(err, errSameServer):
				lasting = fmt.Errorf("%w: %w", backend.ErrInvalid, err)
				return 0 // the URL is wrong, whatever the other nodes answer
			case isLasting(err):
				lasting = fmt.Errorf("a node can never vote: %w", err)
			}

			// After a lasting error, wait for the other nodes as well, because outage reports the
			// errors of all nodes if there is no quorum.
			if lasting != nil || well >= m.quorum() {
				return openGrace
			}
			return forever
		}
	})

	switch {
	case errors.Is(lasting, errSameServer):
		return nil, lasting
	case well < m.quorum() && ctx.Err() == context.Canceled:
		return nil, context.Cause(ctx) // the caller has given up, which is no outage
	case well < m.quorum():
		return nil, outage(errs)
	case lasting != nil:
		return nil, lasting
	case well < len(m.nodes):
		return outage(errs), nil
	}

	return nil, nil
}

// isLasting reports whether err is an error that waiting does not change: the node has answered
// with it, or the node's server must not store locks. The errors of a server that loads its data,
// runs a slow script or has too many clients do not last.
func isLasting(err error) bool {
	for _, passing := range []string{"LOADING", "BUSY", "max number of clients"} {
		if goredis.HasErrorPrefix(err, passing) {
			return false
		}
	}

	return redisstore.IsUnfit(err) || resp.IsReply(err)
}
