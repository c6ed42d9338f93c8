package spinlock

import (
	"context"
	"fmt"
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
	if len(c.Nodes) != 1 {
		return nil, fmt.Errorf("%w: %d nodes: want one, as in spinlock+redis://localhost:6379", backend.ErrInvalid, len(c.Nodes))
	}

	o := Options{Registry: c.Params["registry"]}
	var err error
	if o.FenceTTL, err = redisstore.FenceTTL(c.Params); err != nil {
		return nil, err
	}

	// Open calls the server once.
	s, err := redisstore.Open(ctx, c.Nodes[0], c.Params)
	if err != nil {
		return nil, err
	}
	return newDriver(s, &o)
}
