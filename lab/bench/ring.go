package main

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/hasplock/hasp/internal/hostclock"
)

// ringName is the name of the contestant that only hands over a message. This message goes round a
// ring, in which each member publishes the message to the next member by a script. No lock in Redis
// can hand over faster.
const ringName = "bare-publish"

// link is a member of the ring: its channel and the channel of the next member.
type link struct{ Own, Next string }

type ring struct {
	hold    time.Duration
	members []*member
}

type member struct {
	link
	rdb *redis.Client
	sub *redis.PubSub
}

var publish = redis.NewScript(`return redis.call('PUBLISH', ARGV[1], 'next')`)

// newRing opens the members of a ring in this process, and returns the method run of the ring.
func newRing(ctx context.Context, o order) (run func(context.Context) report, err error) {
	r := &ring{hold: o.Hold}
	for _, l := range o.Ring {
		m := &member{link: l}
		if m.rdb, err = connect(o.Stores.One); err != nil {
			return nil, err
		}
		m.sub = m.rdb.Subscribe(ctx, l.Own)
		if _, err := m.sub.Receive(ctx); err != nil { // wait for the confirmation
			return nil, err
		}
		if err := publish.Load(ctx, m.rdb).Err(); err != nil {
			return nil, err
		}
		r.members = append(r.members, m)
	}
	return r.run, nil
}

// run lets the members pass the message on until ctx ends.
func (r *ring) run(ctx context.Context) (all report) {
	all.Turns = make([][]turn, len(r.members))
	var members errgroup.Group
	for i, m := range r.members {
		members.Go(func() error { return m.pass(ctx, r.hold, &all.Turns[i]) })
	}
	if err := members.Wait(); err != nil {
		all.Err = err.Error()
	}
	return all
}

func (m *member) pass(ctx context.Context, hold time.Duration, turns *[]turn) error {
	defer m.rdb.Close()
	defer context.AfterFunc(ctx, func() { m.sub.Close() })()
	for {
		t := turn{Asked: hostclock.Now()}
		_, err := m.sub.ReceiveMessage(context.WithoutCancel(ctx))
		t.Got = hostclock.Now()
		if err == nil {
			if hold > 0 {
				time.Sleep(hold)
			}
			t.Freed = hostclock.Now()
			*turns = append(*turns, t)
			err = publish.EvalSha(context.WithoutCancel(ctx), m.rdb, nil, m.Next).Err()
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !excused(err, 0, term):
			return err
		}
	}
}
