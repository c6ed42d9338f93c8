// Command torture injects the faults of github.com/hasplock/hasp/internal/torture into
// programs that lock by other libraries, and into programs that do the same by hasp. It
// counts how often two programs hold a key at once. It needs Linux and root. From the
// directory bench:
//
//	go run ./torture -on hosts [-strategy redislock,hasp-spinlock,redsync,hasp-redlock] [-seed N] [-time 60s]
//
// Each library is used as its documentation says. A program renews a lock of redislock and of
// redsync after each third of its term, and no longer relies on the lock after a renewal that
// failed. It also does not rely on a lock of redsync longer than Mutex.Until says.
package main

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync/atomic"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	pools "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/torture/rig"
	_ "github.com/hasplock/hasp/redlock"
	_ "github.com/hasplock/hasp/spinlock"
)

// term is the term of all locks, as of hasp's in the same runs of the other command.
const term = 600 * time.Millisecond

func main() {
	rig.Main(rig.Program{
		Command: "cd bench && go run ./torture",
		Package: "github.com/hasplock/hasp/bench/torture",
		More: []rig.Strategy{
			{Name: "redislock", Term: term, Redis: 1, Client: openRedislock},
			{Name: "hasp-spinlock", Term: term, Redis: 1, Client: openHasp("spinlock", "")},
			{Name: "redsync", Term: term, Redis: 3, Client: openRedsync},
			{Name: "hasp-redlock", Term: term, Redis: 3, Client: openHasp("redlock", "?max_ttl=2s")},
		},
	})
}

func openHasp(strategy, query string) func(context.Context, []string, time.Duration) (rig.Locker, error) {
	return func(ctx context.Context, addrs []string, term time.Duration) (rig.Locker, error) {
		return rig.OpenHasp(ctx, strategy+"+redis://"+strings.Join(addrs, ",")+"/0"+query, term)
	}
}

// redislockClient is bsm/redislock.
type redislockClient struct {
	rdb  *redis.Client
	c    *redislock.Client
	term time.Duration
}

func openRedislock(_ context.Context, addrs []string, term time.Duration) (rig.Locker, error) {
	rdb := redis.NewClient(&redis.Options{Addr: addrs[0]})
	return &redislockClient{rdb, redislock.New(rdb), term}, nil
}

func (c *redislockClient) Lock(ctx context.Context, key string) (rig.Held, error) {
	l, err := c.c.Obtain(ctx, key, c.term, &redislock.Options{RetryStrategy: redislock.LinearBackoff(20 * time.Millisecond)})
	if err != nil {
		return nil, err
	}
	return redislockHeld{rig.Renew(c.term, func(ctx context.Context) error { return l.Refresh(ctx, c.term, nil) }), l}, nil
}

func (c *redislockClient) Close() error { return c.rdb.Close() }

type redislockHeld struct {
	rig.Renewing
	l *redislock.Lock
}

func (redislockHeld) Until() time.Time { return time.Time{} }

func (h redislockHeld) Unlock(ctx context.Context) error {
	h.End()
	return h.l.Release(ctx)
}

// redsyncClient is redsync.
type redsyncClient struct {
	rdbs []*redis.Client
	r    *redsync.Redsync
	term time.Duration
}

func openRedsync(_ context.Context, addrs []string, term time.Duration) (rig.Locker, error) {
	c := &redsyncClient{term: term}
	var all []pools.Pool
	for _, addr := range addrs {
		rdb := redis.NewClient(&redis.Options{Addr: addr})
		c.rdbs, all = append(c.rdbs, rdb), append(all, goredis.NewPool(rdb))
	}
	c.r = redsync.New(all...)
	return c, nil
}

func (c *redsyncClient) Lock(ctx context.Context, key string) (rig.Held, error) {
	m := c.r.NewMutex(key, redsync.WithExpiry(c.term), redsync.WithTries(math.MaxInt))
	if err := m.LockContext(ctx); err != nil {
		return nil, err
	}
	h := &redsyncHeld{m: m}
	h.until.Store(m.Until())
	h.Renewing = rig.Renew(c.term, h.extend)
	return h, nil
}

func (c *redsyncClient) Close() error {
	var errs []error
	for _, rdb := range c.rdbs {
		errs = append(errs, rdb.Close())
	}
	return errors.Join(errs...)
}

type redsyncHeld struct {
	rig.Renewing
	m     *redsync.Mutex
	until atomic.Value // of m, which only one goroutine at a time may use
}

func (h *redsyncHeld) extend(ctx context.Context) error {
	ok, err := h.m.ExtendContext(ctx)
	if !ok {
		return errors.Join(errors.New("not extended"), err)
	}
	h.until.Store(h.m.Until()) // an error of a minority does not matter
	return nil
}

func (h *redsyncHeld) Until() time.Time { return h.until.Load().(time.Time) }

func (h *redsyncHeld) Unlock(ctx context.Context) error {
	h.End()
	ok, err := h.m.UnlockContext(ctx)
	if !ok {
		return errors.Join(errors.New("not unlocked"), err)
	}
	return nil
}
