package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
)

// connect returns a go-redis client with default options, except for timeouts
// that a slow machine does not reach. All contestants on go-redis use it.
func connect(url string) (*redis.Client, error) {
	o, err := redis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	o.ReadTimeout, o.WriteTimeout, o.PoolTimeout = time.Minute, time.Minute, time.Minute
	return redis.NewClient(o), nil
}

// bareCaller sends only the commands of a lock: no renewal, no deadline, no wait.
type bareCaller struct {
	rdb  redis.Cmdable
	term time.Duration
	end  func()
}

type bareLock struct {
	rdb        redis.Cmdable
	key, token string
}

func openBare(_ context.Context, s stores, term time.Duration) (locker, error) {
	rdb, err := connect(s.One)
	if err != nil {
		return nil, err
	}
	return &bareCaller{rdb, term, func() { rdb.Close() }}, nil
}

func openBatched(_ context.Context, s stores, term time.Duration) (locker, error) {
	rdb, err := connect(s.One)
	if err != nil {
		return nil, err
	}
	batched, err := rdb.AutoPipeline()
	if err != nil {
		return nil, err
	}
	return &bareCaller{batched, term, func() { rdb.Close() }}, nil
}

var errTaken = errors.New("the key is held")

var compareAndDelete = redis.NewScript(`if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0`)

func (b *bareCaller) lock(ctx context.Context, key string) (held, error) {
	l := &bareLock{b.rdb, key, rand.Text()}
	switch err := b.rdb.SetArgs(ctx, key, l.token, redis.SetArgs{Mode: "NX", TTL: b.term}).Err(); err {
	case nil:
		return l, nil
	case redis.Nil:
		return nil, errTaken
	default:
		return nil, err
	}
}

func (l *bareLock) Unlock(ctx context.Context) error {
	n, err := compareAndDelete.Run(ctx, l.rdb, []string{l.key}, l.token).Int()
	if err == nil && n != 1 {
		err = fmt.Errorf("%s was lost", l.key)
	}
	return err
}

func (b *bareCaller) close() { b.end() }
