package pubsublock

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
	if err := c.Check(append(slices.Clone(redisstore.Params), "channel", "publish", "fence_ttl")...); err != nil {
		return nil, err
	}

	o := Options{Channel: c.Params["channel"]}
	switch publish, given := c.Params["publish"]; {
	case publish == "both":
		o.PublishBoth = true
	case given:
		return nil, fmt.Errorf("%w: parameter publish=%q: want both, or leave it out", backend.ErrInvalid, publish)
	}

	var err error
	if o.FenceTTL, err = redisstore.FenceTTL(c.Params); err != nil {
		return nil, err
	}
	if _, err := newDriver(nil, &o); err != nil {
		return nil, err // before anything is connected to
	}

	s, err := redisstore.OpenOne(ctx, "pubsublock", c.Nodes, c.Params)
	if err != nil {
		return nil, err
	}
	return newDriver(s, &o)
}
