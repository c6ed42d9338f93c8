package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/hasplock/hasp/backend"
)

// plants are the bugs that can be planted, to see that they are found. They
// are for strategies on one Redis.
var plants = map[string]string{
	"release": "a release frees the key, whoever holds it",
	"renewal": "a renewal is still sent after the release",
	"wake-up": "a waiter misses the release that falls between its look and its listening",
}

// plant spoils a driver.
func plant(name, addr string, d backend.Driver) (backend.Driver, error) {
	if name == "" {
		return d, nil
	}
	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}})
	s := spoilt{d, rdb}
	switch name {
	case "release":
		d = anyRelease{s}
	case "renewal":
		d = lateRenewal{s}
	case "wake-up":
		return deaf{s}, nil
	default:
		return nil, fmt.Errorf("no bug is called %q", name)
	}
	return spoiltWaiter(d, s), nil
}

// spoilt is a driver with a connection of its own.
type spoilt struct {
	backend.Driver
	rdb *redis.Client
}

func (s spoilt) Traits() backend.Traits {
	t := s.Driver.Traits()
	t.Ends = backend.EndsSometime
	return t
}

func (s spoilt) Close() error {
	s.rdb.Close()
	return s.Driver.Close()
}

// spoiltWaiter is a Waiter if the sound driver was one.
func spoiltWaiter(d backend.Driver, s spoilt) backend.Driver {
	if w, ok := s.Driver.(backend.Waiter); ok {
		return struct {
			backend.Driver
			waits
		}{d, waits{w}}
	}
	return d
}

type waits struct{ w backend.Waiter }

func (w waits) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return w.w.Wait(ctx, c)
}

type anyRelease struct{ spoilt }

func (a anyRelease) Release(ctx context.Context, c backend.Claim) error {
	n, err := a.rdb.Del(ctx, c.Key).Result()
	if err == nil && n == 0 {
		return backend.ErrLost
	}
	return err
}

type lateRenewal struct{ spoilt }

func (l lateRenewal) Release(ctx context.Context, c backend.Claim) error {
	err := l.Driver.Release(ctx, c)
	if err == nil && rand.IntN(4) == 0 {
		time.AfterFunc(c.TTL/50, func() {
			l.rdb.Set(context.WithoutCancel(ctx), c.Key, c.Token+"#"+c.Owner, c.TTL)
		})
	}
	return err
}

type deaf struct{ spoilt }

func (d deaf) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	for {
		g, err := d.Acquire(ctx, c)
		if err == nil {
			return g, nil
		}
		sleep := 5 * time.Millisecond
		if rand.IntN(100) == 0 {
			sleep = time.Hour
		}
		select {
		case <-ctx.Done():
			return g, err
		case <-time.After(sleep):
		}
	}
}
