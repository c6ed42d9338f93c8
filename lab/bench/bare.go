package main

import (
	"context"
	crypto "crypto/rand"
	"errors"
	"fmt"
	"math/rand/v2"
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

// connectBatched is connect, with an AutoPipeline if batched.
func connectBatched(url string, batched bool) (rdb redis.Cmdable, end func() error, err error) {
	c, err := connect(url)
	if err != nil || !batched {
		return c, c.Close, err
	}
	rdb, err = c.AutoPipeline()
	return rdb, c.Close, err
}

// bareCaller sends only the commands of a lock: no renewal, no deadline.
type bareCaller struct {
	rdb   redis.Cmdable
	term  time.Duration
	pause time.Duration // mean sleep before another attempt; 0 makes one attempt
	end   func() error
}

// polling is the pause of a contestant that polls for a key.
const polling = 10 * time.Millisecond

type bareLock struct {
	rdb        redis.Cmdable
	key, token string
}

func openBare(batched bool, pause time.Duration) opener {
	return func(_ context.Context, s stores, term time.Duration) (locker, error) {
		rdb, end, err := connectBatched(s.One, batched)
		if err != nil {
			return nil, err
		}
		return &bareCaller{rdb, term, pause, end}, nil
	}
}

var errTaken = errors.New("the key is held")

var compareAndDelete = redis.NewScript(`if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0`)

func (b *bareCaller) lock(ctx context.Context, key string) (held, error) {
	l := &bareLock{b.rdb, key, crypto.Text()}
	for {
		err := b.rdb.SetArgs(ctx, key, l.token, redis.SetArgs{Mode: "NX", TTL: b.term}).Err()
		switch {
		case err == nil:
			return l, nil
		case err != redis.Nil:
			return nil, err
		case b.pause == 0:
			return nil, errTaken
		}
		time.Sleep(b.pause/2 + rand.N(b.pause))
	}
}

func (l *bareLock) Unlock(ctx context.Context) error {
	n, err := compareAndDelete.Run(ctx, l.rdb, []string{l.key}, l.token).Int()
	if err == nil && n != 1 {
		err = fmt.Errorf("%s was lost", l.key)
	}
	return err
}

func (b *bareCaller) close() { _ = b.end() }
