package main

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
)

// ringName is the name of the contestant that only hands over a message. This message goes round a
// ring, in which each process publishes the message to the next process by a script. No lock in
// Redis can hand over faster.
const ringName = "bare-publish"

// ring is the member of the ring in this process. To lock means to wait for the message, and to
// unlock means to publish it.
type ring struct {
	rdb  *redis.Client
	sub  *redis.PubSub
	next string // the channel of the next member
}

var publish = redis.NewScript(`return redis.call('PUBLISH', ARGV[1], 'next')`)

func openRing(ctx context.Context, s stores, _ time.Duration) (locker, error) {
	rdb, err := connect(s.One)
	if err == nil {
		err = publish.Load(ctx, rdb).Err()
	}
	return &ring{rdb: rdb}, err
}

// join subscribes the member to the channel of its place in a new ring. The first member sends the
// first message to itself.
func (r *ring) join(ctx context.Context, o order) error {
	if r.sub != nil {
		r.sub.Close()
	}
	channel := func(place int) string { return fmt.Sprint(o.Key, "-", place%o.Places) }
	own := channel(o.Place)
	r.sub = r.rdb.Subscribe(ctx, own)
	r.next = channel(o.Place + 1)
	_, err := r.sub.Receive(ctx) // wait for the confirmation
	if err == nil && o.Place == 0 {
		err = r.rdb.Publish(ctx, own, "next").Err()
	}
	return err
}

func (r *ring) lock(ctx context.Context, _ string) (held, error) {
	sub := r.sub
	defer context.AfterFunc(ctx, func() { sub.Close() })()
	_, err := sub.ReceiveMessage(context.WithoutCancel(ctx))
	return r, err
}

func (r *ring) Unlock(ctx context.Context) error {
	return publish.EvalSha(ctx, r.rdb, nil, r.next).Err()
}

func (r *ring) close() { r.rdb.Close() }
