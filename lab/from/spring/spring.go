package fromspring

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/spinlock"
)

// Report runs work under a lock.
func Report(ctx context.Context, rdb *redis.Client, work func(context.Context) error) error {
	locks, err := spinlock.New(rdb, &spinlock.Options{Client: hasp.Options{Prefix: "registry:"}})
	if err != nil {
		return err
	}
	defer locks.Close()
	err = hasp.Do(ctx, locks, "report", func(ctx context.Context, _ *hasp.Lease) error {
		return work(ctx)
	}, hasp.WithMaxWait(5*time.Second))
	if errors.Is(err, hasp.ErrHeld) {
		return nil // tryLock has returned false
	}
	return err
}
