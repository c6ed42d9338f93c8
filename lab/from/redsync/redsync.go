package fromredsync

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/redlock"
)

// Report runs work under a lock.
func Report(ctx context.Context, masters []redis.UniversalClient, work func(context.Context) error) error {
	locks, err := redlock.New(masters, nil)
	if err != nil {
		return err
	}
	defer locks.Close()
	return hasp.Do(ctx, locks, "report", func(ctx context.Context, _ *hasp.Lease) error {
		return work(ctx)
	})
}
