package fairlock

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// open is the Opener of this strategy.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	if err := c.Check(append(slices.Clone(redisstore.Params), "window", "fence_ttl", "turns")...); err != nil {
		return nil, err
	}

	var o Options
	if text, ok := c.Params["window"]; ok {
		window, err := time.ParseDuration(text)
		if err != nil || window < minWindow {
			return nil, fmt.Errorf("%w: parameter window=%q: want a duration of at least %v, such as 5s", backend.ErrInvalid, text, minWindow)
		}
		o.Window = window
	}

	if text, ok := c.Params["turns"]; ok {
		turns, err := strconv.Atoi(text)
		if err != nil || turns < 1 {
			return nil, fmt.Errorf("%w: parameter turns=%q: want a number of at least 1, such as 32", backend.ErrInvalid, text)
		}
		o.Turns = turns
	}

	var err error
	if o.FenceTTL, err = redisstore.FenceTTL(c.Params); err != nil {
		return nil, err
	}

	// The options come first, because newDriver does not close s if it refuses them.
	s, err := redisstore.OpenOne(ctx, "fairlock", c.Nodes, c.Params)
	if err != nil {
		return nil, err
	}
	return newDriver(s, &o)
}
