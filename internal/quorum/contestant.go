package main

import (
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"time"

	"github.com/go-redsync/redsync/v4"
	rpool "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/redlock"
)

// ttl is the term of all locks, which redsync has chosen.
const ttl = 8 * time.Second

// contestant is one way to have a key on a majority of the servers.
type contestant struct {
	name  string
	ours  bool // goals are for us
	races bool // is let loose on one key with others of its kind
	open  opener
}

// opener has a contestant begin. One that makes its own connections leaves
// the clients alone.
type opener func(ctx context.Context, s *set, clients []redis.UniversalClient) (locker, error)

// contestants begin with the one that all are compared with.
var contestants = []contestant{
	{name: "by hand", open: byHand},
	{name: "redlock", ours: true, races: true, open: byRedlock},
	{name: "redlock by URL", ours: true, open: byURL},
	{name: "redsync", races: true, open: byRedsync()},
	{name: "redsync, fail-fast", open: byRedsync(redsync.WithFailFast(true))},
}

// locker is a contestant at work.
type locker interface {
	lock(ctx context.Context, key string) (unlock func(context.Context) error, err error)
	close()
}

// hand asks all servers at once, and goes by the first majority of answers.
// It leaves the other calls to themselves.
type hand []redis.UniversalClient

func byHand(_ context.Context, _ *set, clients []redis.UniversalClient) (locker, error) {
	return hand(clients), nil
}

func (h hand) close() {}

func (h hand) lock(ctx context.Context, key string) (func(context.Context) error, error) {
	token := rand.Text()
	unlock := func(ctx context.Context) error {
		return h.ask(func(rdb redis.UniversalClient) bool {
			n, err := deleteMine.Run(ctx, rdb, []string{key}, token).Int()
			return err == nil && n == 1
		})
	}
	err := h.ask(func(rdb redis.UniversalClient) bool {
		return rdb.SetArgs(ctx, key, token, redis.SetArgs{Mode: "NX", TTL: ttl}).Err() == nil
	})
	if err != nil {
		return nil, errors.Join(err, unlock(ctx))
	}
	return unlock, nil
}

var deleteMine = redis.NewScript(`
if redis.call('GET', KEYS[1]) == ARGV[1] then
	return redis.call('DEL', KEYS[1])
end
return 0`)

var errRefused = errors.New("a majority said no")

func (h hand) ask(yes func(redis.UniversalClient) bool) error {
	answers := make(chan bool, len(h))
	for _, rdb := range h {
		go func() { answers <- yes(rdb) }()
	}
	majority := len(h)/2 + 1
	for got := map[bool]int{}; ; {
		got[<-answers]++
		switch {
		case got[true] == majority:
			return nil
		case got[false] > len(h)-majority:
			return errRefused
		}
	}
}

// theirs is redsync as it comes.
type theirs struct {
	*redsync.Redsync
	options []redsync.Option
}

func byRedsync(o ...redsync.Option) opener {
	return func(_ context.Context, _ *set, clients []redis.UniversalClient) (locker, error) {
		pools := make([]rpool.Pool, len(clients))
		for i, rdb := range clients {
			pools[i] = goredis.NewPool(rdb)
		}
		return theirs{redsync.New(pools...), append(slices.Clip(o), redsync.WithExpiry(ttl))}, nil
	}
}

func (t theirs) close() {}

func (t theirs) lock(ctx context.Context, key string) (func(context.Context) error, error) {
	m := t.NewMutex(key, t.options...)
	unlock := func(ctx context.Context) error {
		if ok, err := m.UnlockContext(ctx); !ok {
			return errors.Join(errRefused, err)
		}
		return nil
	}
	return unlock, m.LockContext(ctx)
}

// ours is redlock.
type ours struct{ *hasp.Client }

var engine = &hasp.Options{TTL: ttl, Timeout: 20 * time.Second} // a slow machine is no outage

func byRedlock(_ context.Context, _ *set, clients []redis.UniversalClient) (locker, error) {
	return ours{hasp.New(redlock.New(clients, nil), engine)}, nil
}

func byURL(ctx context.Context, s *set, _ []redis.UniversalClient) (locker, error) {
	c, err := hasp.Open(ctx, s.url(), engine)
	return ours{c}, err
}

func (o ours) close() { o.Close() }

func (o ours) lock(ctx context.Context, key string) (func(context.Context) error, error) {
	lease, err := o.Lock(ctx, key)
	if err != nil {
		return nil, err
	}
	return lease.Unlock, nil
}
