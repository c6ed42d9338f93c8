package main

import (
	"context"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	_ "github.com/hasplock/hasp/fairlock"
	_ "github.com/hasplock/hasp/pubsublock"
	_ "github.com/hasplock/hasp/redlock"
	"github.com/hasplock/hasp/spinlock"
)

// haspLocker is a Client that was opened by its URL, as users open Clients, or over a client of
// Redis.
type haspLocker struct {
	*hasp.Client
	end  func()        // closes the client of Redis
	opts []hasp.Option // for each call of Lock
}

func openHasp(strategy string, opts ...hasp.Option) opener {
	return func(ctx context.Context, s stores, term time.Duration) (locker, error) {
		return openURL(ctx, strategy+"+"+s.One, term, opts...)
	}
}

// openPassed opens a contestant with a client of its own, as programs do that have one already.
func openPassed(_ context.Context, s stores, term time.Duration) (locker, error) {
	o, err := redis.ParseURL(s.One)
	if err != nil {
		return nil, err
	}
	rdb := redis.NewClient(o)
	c, err := spinlock.New(rdb,
		&spinlock.Options{Client: hasp.Options{TTL: term, Timeout: time.Minute}})
	return haspLocker{c, func() { rdb.Close() }, nil}, err
}

// openRedlock opens redlock by a URL that contains the hosts of all five servers.
func openRedlock(ctx context.Context, s stores, term time.Duration) (locker, error) {
	hosts := make([]string, len(s.Five))
	for i, url := range s.Five {
		hosts[i] = strings.TrimSuffix(strings.TrimPrefix(url, "redis://"), "/0")
	}
	return openURL(ctx, "redlock+redis://"+strings.Join(hosts, ","), term)
}

func openURL(
	ctx context.Context, url string, term time.Duration, opts ...hasp.Option,
) (locker, error) {
	c, err := hasp.Open(ctx, url, &hasp.Options{TTL: term, Timeout: time.Minute})
	return haspLocker{c, func() {}, opts}, err
}

func (h haspLocker) lock(ctx context.Context, key string) (held, error) {
	return h.Lock(ctx, key, h.opts...)
}

func (h haspLocker) close() {
	h.Close()
	h.end()
}
