package fromshedlock

import (
	"context"
	"errors"
	"time"

	"github.com/hasplock/hasp"
)

// Report runs work under a lock.
func Report(ctx context.Context, locks *hasp.Client, work func(context.Context) error) error {
	err := hasp.Do(ctx, locks, "report", func(ctx context.Context, _ *hasp.Lease) error {
		return work(ctx)
	}, hasp.WithMaxWait(0), hasp.WithMaxHold(14*time.Minute), hasp.WithMinHold(time.Minute))
	if errors.Is(err, hasp.ErrHeld) {
		return nil // another process runs the job, or has run it at this tick
	}
	return err
}
