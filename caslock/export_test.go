package caslock

import (
	"context"

	"github.com/hasplock/hasp/backend"
)

// Sweep looks at one page of records, as the sweep that one release of many starts.
func Sweep(ctx context.Context, d backend.Driver) error {
	return d.(*driver).sweeper.sweep(ctx)
}

// Renewals returns how many renewals have no answer yet.
func Renewals(d backend.Driver) int {
	rs := &d.(*driver).renewals
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return len(rs.byHold)
}
