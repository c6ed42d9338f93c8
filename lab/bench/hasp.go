package main

import (
	"context"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	_ "github.com/hasplock/hasp/etcdlock"
	_ "github.com/hasplock/hasp/fairlock"
	_ "github.com/hasplock/hasp/pglock"
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

// openHasp opens a strategy by its URL.
func openHasp(strategy string, opts ...hasp.Option) opener {
	return func(ctx context.Context, s stores, term time.Duration) (locker, error) {
		o := &hasp.Options{TTL: term, Timeout: time.Minute}
		c, err := hasp.Open(ctx, strategy+"+"+s.url(strategy), o)
		return haspLocker{c, func() {}, opts}, err
	}
}

// url returns the URL of the stores of a strategy.
func (s stores) url(strategy string) string {
	switch strategy {
	case "redlock":
		hosts := strings.NewReplacer("redis://", "", "/0", "")
		return "redis://" + hosts.Replace(strings.Join(s.Five, ","))
	case "etcdlock":
		return "etcd://" + s.Etcd
	case "pglock":
		return s.Postgres
	}
	return s.One
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

func (h haspLocker) lock(ctx context.Context, key string) (held, error) {
	return h.Lock(ctx, key, h.opts...)
}

func (h haspLocker) close() {
	h.Close()
	h.end()
}
