package fromredisson

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/pubsublock"
)

// Report runs work under a lock.
func Report(ctx context.Context, rdb *redis.Client, work func(context.Context) error) error {
	locks, err := pubsublock.New(rdb, nil)
	if err != nil {
		return err
	}
	defer locks.Close()
	lease, err := locks.Lock(ctx, "report",
		hasp.WithMaxWait(100*time.Second), hasp.WithTTL(10*time.Second), hasp.WithoutRenewal())
	if errors.Is(err, hasp.ErrHeld) {
		return nil // tryLock has returned false
	}
	if err != nil {
		return err
	}
	err = work(lease.Context())
	return errors.Join(err, lease.Unlock(ctx))
}
