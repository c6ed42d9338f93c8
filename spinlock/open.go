package spinlock

import (
	"context"
	"slices"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// open is the Opener of this strategy.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	if err := c.Check(append(slices.Clone(redisstore.Params), "registry", "fence_ttl")...); err != nil {
		return nil, err
	}
	o := Options{Registry: c.Params["registry"]}
	var err error
	if o.FenceTTL, err = redisstore.FenceTTL(c.Params); err != nil {
		return nil, err
	}

	// OpenOne calls the server once.
	s, err := redisstore.OpenOne(ctx, "spinlock", c.Nodes, c.Params)
	if err != nil {
		return nil, err
	}
	return newDriver(s, &o)
}
