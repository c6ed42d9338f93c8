package redlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

var (
	// params are the parameters of the URL, without those of the engine.
	params = slices.Concat(tlsParams, []string{"db", "fence_ttl", "max_ttl", "durable", "allow_unsafe_nodes", "allow_eviction"})

	tlsParams = []string{"ca", "cert", "key", "server_name"}
)

const (
	// connections is the largest number of connections to a node. The number is high, so that calls
	// to a slow node do not wait for a connection.
	connections = 256

	// openGrace is how long Open waits for the other nodes once a quorum has answered.
	openGrace = 250 * time.Millisecond
)

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

	if err := d.probe(ctx, probes); err != nil {
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
	params := map[string]string{}
	for name, value := range p {
		switch {
		case !slices.Contains(redisstore.Params, name):
		case slices.Contains(tlsParams, name) && !secure(node) && slices.ContainsFunc(all, secure):
		default:
			params[name] = value
		}
	}
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
		if o.MaxTTL, err = time.ParseDuration(text); err != nil || o.MaxTTL <= 0 {
			return nil, fmt.Errorf("%w: parameter max_ttl=%q: want a positive duration such as 2m", backend.ErrInvalid, text)
		}
	}

	for name, value := range map[string]*bool{"durable": &o.Durable, "allow_unsafe_nodes": &o.AllowUnsafeNodes} {
		text, ok := p[name]
		if !ok {
			continue
		}
		if *value, err = strconv.ParseBool(text); err != nil {
			return nil, fmt.Errorf("%w: parameter %s=%q: want true or false", backend.ErrInvalid, name, text)
		}
	}
	return o, nil
}

// probe asks all nodes at once. When a quorum has answered without an error, it waits at most the
// time openGrace for other nodes, and returns nil. The call to a late node continues after that.
func (d *driver) probe(ctx context.Context, probes []func(context.Context) error) error {
	errs := make([]error, len(d.nodes))
	for i, n := range d.nodes {
		// This is the error of a node whose result does not arrive in time.
		errs[i] = fmt.Errorf("%s: no answer yet", n.name)
	}

	var same sameServerError
	well := 0
	gather(ctx, d, func(n *node) report {
		err := probes[n.i](ctx)
		if err == nil {
			_, err = n.refreshMark(ctx, time.Time{})
		}
		return report{i: n.i, err: err}
	}, func(all []report) time.Duration {
		last := all[len(all)-1]
		if errs[last.i] = last.err; last.err == nil {
			well++
		}
		switch {
		case errors.As(last.err, &same):
			return 0
		case well == d.quorum():
			return openGrace
		}
		return forever
	})

	switch {
	case same != sameServerError{}:
		return fmt.Errorf("%w: %w", backend.ErrInvalid, same)
	case well >= d.quorum():
		return nil
	case ctx.Err() == context.Canceled:
		return context.Cause(ctx)
	}
	return outage(errs)
}
