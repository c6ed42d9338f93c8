package caslock

import (
	"context"

	"github.com/hasplock/hasp/backend"
)

// Sweep looks at one page of records, as one release of many does.
func Sweep(ctx context.Context, d backend.Driver) error {
	return d.(*driver).sweeper.sweep(ctx)
}
