package fromrueidislock

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/spinlock"
)

// Report runs work under a lock.
func Report(ctx context.Context, rdb *redis.Client, work func(context.Context) error) error {
	locks, err := spinlock.New(rdb, &spinlock.Options{Client: hasp.Options{Prefix: "rueidislock:0:"}})
	if err != nil {
		return err
	}
	defer locks.Close()
	lease, err := locks.Lock(ctx, "report") // as WithContext does
	if err != nil {
		return err
	}
	err = work(lease.Context())
	return errors.Join(err, lease.Unlock(ctx)) // says if the lock was lost
}
