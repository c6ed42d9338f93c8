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

// params are those of the URL, besides the engine's.
var params = []string{"ca", "cert", "key", "server_name", "db", "fence_ttl", "max_ttl", "durable", "allow_unsafe_nodes"}

// connections is how many there are to a node at most: a slow one must not have
// its votes queue up for them.
const connections = 256

// openGrace is how long Open waits for the rest of the nodes once a quorum has
// answered.
const openGrace = 250 * time.Millisecond

// openConfig is the Opener of this strategy. Nodes that do not answer are no
// error while a quorum does: they are used when they are there.
func openConfig(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	if err := c.Check(params...); err != nil {
		return nil, err
	}
	o, err := options(c.Params)
	if err != nil {
		return nil, err
	}
	var nodes, names []string
	for _, list := range c.Nodes {
		urls, err := redisstore.Nodes(list)
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, urls...)
	}
	for _, node := range nodes {
		name, err := redisstore.Address(node)
		if err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	if _, err := newDriver(nil, names, o); err != nil {
		return nil, err // before anything is connected to
	}
	var stores []*redisstore.Store
	var probes []func(context.Context) error
	for _, node := range nodes {
		s, probe, err := redisstore.Prepare(node, nodeParams(node, nodes, c.Params), connections)
		if err != nil {
			for _, s := range stores {
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

// nodeParams are those for one node of several: what is for TLS is not for a
// node without, if there is one with.
func nodeParams(node string, all []string, p hasp.Params) map[string]string {
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

var tlsParams = []string{"ca", "cert", "key", "server_name"}

// options reads the parameters that are redlock's own.
func options(p hasp.Params) (*Options, error) {
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

// probe asks all nodes, and is content with a quorum.
func (d *Driver) probe(ctx context.Context, probes []func(context.Context) error) error {
	type answer struct {
		i   int
		err error
	}
	answers := make(chan answer, len(d.nodes))
	for i, n := range d.nodes {
		d.spawn(func() {
			err := probes[i](ctx)
			if err == nil {
				_, err = n.verify(ctx, time.Time{})
			}
			answers <- answer{i, err}
		})
	}
	errs := make([]error, len(d.nodes))
	for i, n := range d.nodes {
		errs[i] = fmt.Errorf("%s: no answer yet", n.name)
	}
	well := 0
	var grace <-chan time.Time
	for range d.nodes {
		select {
		case a := <-answers:
			if errs[a.i] = a.err; a.err == nil {
				well++
			}
			var same sameError
			if errors.As(a.err, &same) {
				return fmt.Errorf("%w: %w", backend.ErrInvalid, same)
			}
			if well == d.quorum() {
				timer := time.NewTimer(openGrace)
				defer timer.Stop()
				grace = timer.C
			}
			continue
		case <-grace:
		case <-ctx.Done():
		}
		break
	}
	if well >= d.quorum() {
		return nil
	}
	if ctx.Err() == context.Canceled {
		return context.Cause(ctx)
	}
	return outage(errs)
}
