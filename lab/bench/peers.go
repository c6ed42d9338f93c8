package main

import (
	"cmp"
	"context"
	"errors"
	"math"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	pools "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
)

// bsm/redislock

type redislockCaller struct {
	c    *redislock.Client
	term time.Duration
	end  func() error
}

// waits is the retry strategy in redislock's README. redislock has no default strategy.
var waits = redislock.LinearBackoff(100 * time.Millisecond)

func openRedislock(batched bool) opener {
	return func(_ context.Context, s stores, term time.Duration) (locker, error) {
		rdb, end, err := connectBatched(s.One, batched)
		return &redislockCaller{redislock.New(rdb), term, end}, err
	}
}

func (r *redislockCaller) lock(ctx context.Context, key string) (held, error) {
	l, err := r.c.Obtain(ctx, key, r.term, &redislock.Options{RetryStrategy: waits})
	return unlock(l.Release), err
}

func (r *redislockCaller) close() { _ = r.end() }

// redsync

type redsyncCaller struct {
	rdbs    []*redis.Client
	r       *redsync.Redsync
	options []redsync.Option
}

func openRedsync(nodes int, failFast bool) opener {
	return func(_ context.Context, s stores, term time.Duration) (locker, error) {
		urls := s.Five
		if nodes == 1 {
			urls = []string{s.One}
		}
		c := &redsyncCaller{options: []redsync.Option{
			redsync.WithExpiry(term), redsync.WithTries(math.MaxInt),
			redsync.WithFailFast(failFast),
		}}
		var all []pools.Pool
		for _, url := range urls {
			rdb, err := connect(url)
			if err != nil {
				c.close()
				return nil, err
			}
			c.rdbs = append(c.rdbs, rdb)
			all = append(all, goredis.NewPool(rdb))
		}
		c.r = redsync.New(all...)
		return c, nil
	}
}

func (c *redsyncCaller) lock(ctx context.Context, key string) (held, error) {
	m := c.r.NewMutex(key, c.options...)
	return unlock(func(ctx context.Context) error {
		ok, err := m.UnlockContext(ctx)
		if ok {
			return nil // ignore the errors of a minority of the nodes
		}
		return cmp.Or(err, errNotUnlocked)
	}), m.LockContext(ctx)
}

var errNotUnlocked = errors.New("unlock: the lock was lost")

func (c *redsyncCaller) close() {
	for _, rdb := range c.rdbs {
		rdb.Close()
	}
}

// rueidislock

type rueidisCaller struct{ l rueidislock.Locker }

func openRueidislock(tuned bool) opener {
	return func(_ context.Context, s stores, term time.Duration) (locker, error) {
		client, err := rueidis.ParseURL(s.One)
		if err != nil {
			return nil, err
		}
		client.ConnWriteTimeout = time.Minute
		o := rueidislock.LockerOption{ClientOption: client, KeyValidity: term}
		if tuned {
			o.NoLoopTracking = true
			o.KeyMajority = 1
			o.TryNextAfter = 10 * time.Second
			o.ExtendInterval = term / 3
		}
		l, err := rueidislock.NewLocker(o)
		return rueidisCaller{l}, err
	}
}

func (r rueidisCaller) lock(ctx context.Context, key string) (held, error) {
	_, cancel, err := r.l.WithContext(ctx, key)
	return unlock(func(context.Context) error {
		cancel() // returns after the release, without a result
		return nil
	}), err
}

func (r rueidisCaller) close() { r.l.Close() }
