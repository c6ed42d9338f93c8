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

// params are the parameters of the URL, without those of the engine.
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

	// Check the options and names before anything connects.
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

	if evict, _ := strconv.ParseBool(c.Params["allow_eviction"]); evict { // Prepare has checked it
		d.m.evict = "1"
	}
	if d.missing, err = probe(ctx, d.m, probes); err != nil {
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

// nodeParams returns the parameters for one node. Only the nodes with TLS receive the parameters of
// TLS. If no node has TLS, all nodes receive these parameters, so that redisstore returns an error.
func nodeParams(node string, all []string, p map[string]string) map[string]string {
	secure := func(node string) bool { return strings.HasPrefix(node, "rediss://") }
	plain := !secure(node) && slices.ContainsFunc(all, secure)
	params := maps.Clone(p)
	maps.DeleteFunc(params, func(name, _ string) bool {
		return !slices.Contains(redisstore.Params, name) || plain && slices.Contains(tlsParams, name)
	})
	return params
}

// options reads the parameters of redlock itself.
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

// probe asks all nodes at once. When a quorum has answered without an error, it waits at most the
// time openGrace for other nodes. The call to a late node continues after that.
//
// If a node answers with an error, such as a wrong password, or if its server must not store locks,
// probe returns that error, because it will not change by waiting. A node that is silent, refuses
// connections or has no address may be back soon, so the result missing has its error.
func probe(
	ctx context.Context, m *members, probes []func(context.Context) error,
) (missing, err error) {
	errs := make([]error, len(m.nodes))
	for i, n := range m.nodes {
		// This is the error of a node whose result does not arrive in time.
		errs[i] = n.errorf("no answer yet")
	}

	well := 0
	var final error
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
				final = fmt.Errorf("%w: %w", backend.ErrInvalid, err)
				return 0
			case isLasting(err):
				final = fmt.Errorf("a node can never vote: %w", err)
			}

			if final != nil || well >= m.quorum() {
				return openGrace // for other nodes, which may say the same
			}
			return forever
		}
	})

	switch {
	case errors.Is(final, errSameServer):
		return nil, final
	case ctx.Err() == context.Canceled && well < m.quorum():
		return nil, context.Cause(ctx)
	case well < m.quorum():
		return nil, outage(errs)
	case final != nil:
		return nil, final
	case well < len(m.nodes):
		return outage(errs), nil
	}

	return nil, nil
}

// isLasting reports whether a node has answered with an error that does not change by waiting, or has
// a server that must not store locks. A server that loads its data, runs a slow script or has too
// many clients will be back.
func isLasting(err error) bool {
	for _, passing := range []string{"LOADING", "BUSY", "max number of clients"} {
		if goredis.HasErrorPrefix(err, passing) {
			return false
		}
	}

	return redisstore.IsUnfit(err) || resp.IsReply(err)
}
