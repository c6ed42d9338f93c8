package caslock

import (
	"context"

	"github.com/hasplock/hasp/backend"
)

// Sweep looks at one page of records, as the sweep that one release of many starts.
func Sweep(ctx context.Context, d backend.Driver) error {
	_, err := d.(*driver).sweeper.sweep(ctx)
	return err
}
