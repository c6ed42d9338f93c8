package fairlock

import (
	"context"
	"fmt"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// open opens this strategy.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {

	var o Options
	if text, ok := c.Params["window"]; ok {
		window, err := time.ParseDuration(text)
		if err != nil || window < minWindow {
			return nil, fmt.Errorf("%w: parameter window=%q: want a duration of at least %v, such as 5s", backend.ErrInvalid, text, minWindow)
		}
		o.Window = window
	}

	var err error
	if o.FenceTTL, err = redisstore.FenceTTL(c.Params); err != nil {
		return nil, err
	}

	// Check the options before this, because newDriver does not close s if it refuses them.
	s, err := redisstore.OpenOne(ctx, "fairlock", c.Nodes, c.Params)
	if err != nil {
		return nil, err
	}
	return newDriver(s, &o)
}
