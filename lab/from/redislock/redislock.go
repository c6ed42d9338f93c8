package fromredislock

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/spinlock"
)

// Report runs work under a lock.
func Report(ctx context.Context, rdb *redis.Client, work func(context.Context) error) error {
	locks, err := spinlock.New(rdb, nil)
	if err != nil {
		return err
	}
	defer locks.Close()
	return hasp.Do(ctx, locks, "report", func(ctx context.Context, _ *hasp.Lease) error {
		return work(ctx)
	})
}
