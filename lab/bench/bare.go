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

// connect returns a go-redis client with default options, but with timeouts that are too long for a
// slow machine to reach. All contestants on go-redis use such a client.
func connect(url string) (*redis.Client, error) {
	o, err := redis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	o.ReadTimeout = time.Minute
	o.WriteTimeout = time.Minute
	o.PoolTimeout = time.Minute
	return redis.NewClient(o), nil
}

// connectBatched does what connect does. If batched is true, it returns the client's AutoPipeline.
func connectBatched(url string, batched bool) (rdb redis.Cmdable, end func() error, err error) {
	c, err := connect(url)
	if err != nil || !batched {
		return c, c.Close, err
	}
	rdb, err = c.AutoPipeline()
	return rdb, c.Close, err
}

// bareCaller sends only the commands of a lock. It renews no lock.
type bareCaller struct {
	rdb   redis.Cmdable
	term  time.Duration
	pause time.Duration // mean sleep before another attempt; if 0, there is only one attempt
	end   func() error
}

// polling is the pause of a contestant that polls for a key.
const polling = 10 * time.Millisecond

func openBare(batched bool, pause time.Duration) opener {
	return func(_ context.Context, s stores, term time.Duration) (locker, error) {
		rdb, end, err := connectBatched(s.One, batched)
		return &bareCaller{rdb, term, pause, end}, err
	}
}

var errTaken = errors.New("the key is held")

var compareAndDelete = redis.NewScript(`if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0`)

func (b *bareCaller) lock(ctx context.Context, key string) (held, error) {
	token := crypto.Text()
	for {
		err := b.rdb.SetArgs(ctx, key, token, redis.SetArgs{Mode: "NX", TTL: b.term}).Err()
		switch {
		case err == nil:
			return unlock(func(ctx context.Context) error { return b.unlock(ctx, key, token) }), nil
		case err != redis.Nil:
			return nil, err
		case b.pause == 0:
			return nil, errTaken
		}
		time.Sleep(b.pause/2 + rand.N(b.pause))
	}
}

func (b *bareCaller) unlock(ctx context.Context, key, token string) error {
	n, err := compareAndDelete.Run(ctx, b.rdb, []string{key}, token).Int()
	if err == nil && n != 1 {
		err = fmt.Errorf("%s was lost", key)
	}
	return err
}

func (b *bareCaller) close() { _ = b.end() }

// quorum sends only the commands of a lock on five nodes. It asks all nodes at once, until three
// nodes have granted or three nodes have failed. Unlock also releases grants that came later.
type quorum struct{ nodes []locker }

func openQuorum(ctx context.Context, s stores, term time.Duration) (locker, error) {
	q := &quorum{}
	for _, url := range s.Five {
		l, err := openBare(false, 0)(ctx, stores{One: url}, term)
		if err != nil {
			q.close()
			return nil, err
		}
		q.nodes = append(q.nodes, l)
	}

	return q, nil
}

func (q *quorum) lock(ctx context.Context, key string) (held, error) {
	acquired := make([]chan held, len(q.nodes)) // for each node, it receives the node's grant or nil
	for i := range acquired {
		acquired[i] = make(chan held, 1)
	}
	release := unlock(func(ctx context.Context) error {
		return most(ctx, len(acquired), func(ctx context.Context, i int) error {
			h := <-acquired[i] // wait, because the release must not overtake the acquire
			if h == nil {
				return errTaken
			}
			return h.Unlock(ctx)
		})
	})

	err := most(ctx, len(q.nodes), func(ctx context.Context, i int) error {
		h, err := q.nodes[i].lock(ctx, key)
		acquired[i] <- h
		return err
	})
	if err != nil {
		_ = release(ctx)
		return nil, err
	}
	return release, nil
}

// most calls do for 0 to n-1 at the same time. It returns nil once a majority of the calls has
// succeeded, and errors once a majority is impossible. The other calls go on, even after the end of
// ctx.
func most(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	answers := make(chan error, n)
	for i := range n {
		go func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			defer cancel()
			answers <- do(ctx, i)
		}()
	}

	var yes int
	var no []error
	for {
		if err := <-answers; err == nil {
			yes++
		} else {
			no = append(no, err)
		}
		switch {
		case yes > n/2:
			return nil
		case len(no) >= n-n/2:
			return errors.Join(no...)
		}
	}
}

func (q *quorum) close() {
	for _, n := range q.nodes {
		n.close()
	}
}
