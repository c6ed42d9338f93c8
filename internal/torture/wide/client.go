package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/redis/go-redis/v9/logging"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/hostclock"
)

// kept is how many leases a client keeps.
const kept = 20

// leastTerm is the shortest term that hasp grants.
const leastTerm = backend.MinTTL

// order is a message to a client.
type order struct {
	Op  string // "lone", "contend" or "keep"
	URL string
	N   int           // for lone: how many keys
	For time.Duration // for contend and keep
	TTL time.Duration // for keep
}

// reply is the answer to an order.
type reply struct {
	Err   string
	Holds []hold
	Lost  int // leases
}

// hold is one turn of a key. Its times are of hostclock, which all processes share.
type hold struct {
	Asked, Got   int64 // Lock was called, and returned
	Ended, Freed int64 // Unlock was called, and returned
}

// work obeys orders until the parent ends.
func work(parent *crew.Pipe) {
	logging.Disable()
	for {
		var o order
		if parent.Receive(&o) != nil {
			os.Exit(0)
		}
		var r reply
		if err := o.do(&r); err != nil {
			r.Err = err.Error()
		}
		_ = parent.Send(r) // if the parent has ended, Receive fails
	}
}

func (o *order) do(r *reply) error {
	ctx := context.Background()
	c, err := hasp.Open(ctx, o.URL, &hasp.Options{TTL: o.TTL})
	if err != nil {
		return err
	}
	defer c.Close()
	if err := o.turn(ctx, c, "warm", 0, &reply{}); err != nil { // connects, and loads the scripts
		return err
	}

	switch o.Op {
	case "lone":
		for i := range o.N {
			if err := o.turn(ctx, c, fmt.Sprint("lone-", i), 0, r); err != nil {
				return err
			}
		}
		return nil
	case "contend":
		for end := time.Now().Add(o.For); time.Now().Before(end); {
			if err := o.turn(ctx, c, "contended", 5*time.Millisecond, r); err != nil {
				return err
			}
		}
		return nil
	}
	return o.keep(ctx, c, r)
}

// turn locks a key for a while.
func (o *order) turn(ctx context.Context, c *hasp.Client, key string, lasts time.Duration, r *reply) error {
	h := hold{Asked: hostclock.Now()}
	l, err := c.Lock(ctx, key)
	if err != nil {
		return err
	}
	h.Got = hostclock.Now()
	time.Sleep(lasts)
	h.Ended = hostclock.Now()
	err = l.Unlock(ctx)
	h.Freed = hostclock.Now()
	r.Holds = append(r.Holds, h)
	return err
}

// keep keeps leases, and counts those that are lost.
func (o *order) keep(ctx context.Context, c *hasp.Client, r *reply) error {
	var all []*hasp.Lease
	for i := range kept {
		l, err := c.Lock(ctx, fmt.Sprint("kept-", i))
		if err != nil {
			return err
		}
		all = append(all, l)
	}
	time.Sleep(o.For)
	for _, l := range all {
		if l.Err() != nil {
			r.Lost++
		}
		_ = l.Unlock(ctx)
	}
	return nil
}
