// Package from has the code of the pages in docs/from. Its tests run that code, and check that the
// pages show it.
package from

import (
	"context"
	"errors"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis/rueidislock"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/redlock"
	"github.com/hasplock/hasp/spinlock"
)

// work is what the program does under the lock.
type work func(context.Context) error

func redsyncBefore(ctx context.Context, rs *redsync.Redsync, do work) error {
	m := rs.NewMutex("report", redsync.WithExpiry(30*time.Second))
	if err := m.LockContext(ctx); err != nil {
		return err
	}
	err := do(ctx) // must end within 30 s, or call m.ExtendContext
	_, uerr := m.UnlockContext(context.WithoutCancel(ctx))
	return errors.Join(err, uerr)
}

func redsyncAfter(ctx context.Context, masters []redis.UniversalClient, do work) error {
	locks, err := redlock.New(masters, nil) // once in the program; with one master: spinlock.New
	if err != nil {
		return err
	}
	defer locks.Close()
	return hasp.Do(ctx, locks, "report", func(ctx context.Context, _ *hasp.Lease) error {
		return do(ctx) // ctx ends if the lock is lost
	})
}

func redislockBefore(ctx context.Context, rdb *redis.Client, do work) error {
	lock, err := redislock.New(rdb).Obtain(ctx, "report", 30*time.Second, &redislock.Options{
		RetryStrategy: redislock.LinearBackoff(100 * time.Millisecond),
	})
	if err != nil {
		return err
	}
	err = do(ctx) // must end within 30 s, or call lock.Refresh
	return errors.Join(err, lock.Release(context.WithoutCancel(ctx)))
}

func redislockAfter(ctx context.Context, rdb *redis.Client, do work) error {
	locks, err := spinlock.New(rdb, nil) // once in the program
	if err != nil {
		return err
	}
	defer locks.Close() // leaves rdb open
	return hasp.Do(ctx, locks, "report", func(ctx context.Context, _ *hasp.Lease) error {
		return do(ctx) // ctx ends if the lock is lost
	})
}

func rueidislockBefore(ctx context.Context, locker rueidislock.Locker, do work) error {
	ctx, unlock, err := locker.WithContext(ctx, "report")
	if err != nil {
		return err
	}
	defer unlock()
	return do(ctx)
}

func rueidislockAfter(ctx context.Context, locks *hasp.Client, do work) error {
	lease, err := locks.Lock(ctx, "report")
	if err != nil {
		return err
	}
	err = do(lease.Context())
	return errors.Join(err, lease.Unlock(ctx)) // reports a loss during the work
}

func etcdBefore(ctx context.Context, client *clientv3.Client, do work) error {
	session, err := concurrency.NewSession(client, concurrency.WithTTL(10), concurrency.WithContext(ctx))
	if err != nil {
		return err
	}
	defer session.Close()
	m := concurrency.NewMutex(session, "report")
	if err := m.Lock(ctx); err != nil {
		return err
	}
	err = do(ctx) // must also watch session.Done
	return errors.Join(err, m.Unlock(context.WithoutCancel(ctx)))
}

func etcdAfter(ctx context.Context, locks *hasp.Client, do work) error {
	return hasp.Do(ctx, locks, "report", func(ctx context.Context, _ *hasp.Lease) error {
		return do(ctx) // ctx ends if the lock is lost
	}, hasp.WithTTL(10*time.Second))
}

// redissonAfter is getLock("report").tryLock(100, 10, SECONDS).
func redissonAfter(ctx context.Context, locks *hasp.Client, do work) error {
	lease, err := locks.Lock(ctx, "report",
		hasp.WithMaxWait(100*time.Second), hasp.WithTTL(10*time.Second), hasp.WithoutRenewal())
	if errors.Is(err, hasp.ErrHeld) {
		return nil // tryLock has returned false
	}
	if err != nil {
		return err
	}
	err = do(lease.Context())
	return errors.Join(err, lease.Unlock(ctx))
}

// springAfter is registry.obtain("report").tryLock(5, SECONDS).
func springAfter(ctx context.Context, locks *hasp.Client, do work) error {
	err := hasp.Do(ctx, locks, "report", func(ctx context.Context, _ *hasp.Lease) error {
		return do(ctx)
	}, hasp.WithMaxWait(5*time.Second))
	if errors.Is(err, hasp.ErrHeld) {
		return nil // tryLock has returned false
	}
	return err
}

// shedlockAfter is @SchedulerLock(name = "report", lockAtMostFor = "14m", lockAtLeastFor = "1m").
func shedlockAfter(ctx context.Context, locks *hasp.Client, do work) error {
	err := hasp.Do(ctx, locks, "report", func(ctx context.Context, _ *hasp.Lease) error {
		return do(ctx)
	}, hasp.WithMaxWait(0), hasp.WithMaxHold(14*time.Minute), hasp.WithMinHold(time.Minute))
	if errors.Is(err, hasp.ErrHeld) {
		return nil // another process runs the job, or has run it at this tick
	}
	return err
}
