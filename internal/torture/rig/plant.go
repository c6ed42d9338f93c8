package rig

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/hasplock/hasp/backend"
)

// oneTooMany is the bug "slots": the callers ask for one slot too many. It is no bug of a
// driver.
const oneTooMany = "slots"

// plant puts a bug into a driver, whose locks are on the servers at addrs or in
// dir. It shows that the harness finds such bugs.
func plant(name string, addrs []string, dir string, d backend.Driver) (backend.Driver, error) {
	if name == "" || name == oneTooMany {
		return d, nil
	}
	b := buggy{Driver: d, ground: newGround(addrs, dir), release: d.Release}
	var wait waitFunc
	if w, ok := d.(backend.Waiter); ok {
		wait = w.Wait
	}
	switch name {
	case "release":
		b.release = b.releaseAny
	case "renewal":
		b.release = b.renewLate
	case "wake-up":
		wait = b.waitDeaf
	default:
		return nil, fmt.Errorf("unknown bug %q", name)
	}
	if wait == nil {
		return b, nil
	}
	return buggyWaiter{b, wait}, nil
}

// buggy is a driver with another Release, and with access to its store.
type buggy struct {
	backend.Driver
	ground  ground
	release func(context.Context, backend.Claim) error
}

func (b buggy) Release(ctx context.Context, c backend.Claim) error { return b.release(ctx, c) }

func (b buggy) Traits() backend.Traits {
	t := b.Driver.Traits()
	t.Ends = backend.EndsSometime
	return t
}

func (b buggy) Close() error {
	for _, rdb := range b.ground.rdbs {
		rdb.Close()
	}
	return b.Driver.Close()
}

type waitFunc func(context.Context, backend.Claim) (backend.Grant, error)

// buggyWaiter is a buggy driver that can wait.
type buggyWaiter struct {
	buggy
	wait waitFunc
}

func (w buggyWaiter) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return w.wait(ctx, c)
}

// releaseAny is the bug "release": it frees the key for any caller.
func (b buggy) releaseAny(ctx context.Context, c backend.Claim) error {
	err := b.Driver.Release(ctx, c)
	if errors.Is(err, backend.ErrLost) {
		err = b.Driver.(backend.Inspector).Break(ctx, c.Key)
	}
	return err
}

// renewLate is the bug "renewal": now and then a renewal follows the release.
func (b buggy) renewLate(ctx context.Context, c backend.Claim) error {
	restore := b.ground.save(ctx, c.Key, c.TTL)
	err := b.Driver.Release(ctx, c)
	if err == nil && rand.IntN(4) == 0 {
		time.AfterFunc(c.TTL/50, restore)
	}
	return err
}

// waitDeaf is the bug "wake-up": a waiter sometimes misses a release between its
// check and its subscription.
func (b buggy) waitDeaf(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	for {
		g, err := b.Acquire(ctx, c)
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

// ground is the store of the locks, without the driver.
type ground struct {
	rdbs []*redis.Client
	dir  string
}

func newGround(addrs []string, dir string) ground {
	g := ground{dir: dir}
	for _, addr := range addrs {
		g.rdbs = append(g.rdbs, redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true,
			MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}}))
	}
	return g
}

// save returns a function that restores the record of a key as it is now.
func (g ground) save(ctx context.Context, key string, ttl time.Duration) (restore func()) {
	if g.dir != "" {
		name := filepath.Join(g.dir, "key-"+key+".lock")
		record, err := os.ReadFile(name)
		return func() {
			if err == nil {
				_ = os.WriteFile(name, record, 0o600)
			}
		}
	}
	values := make([]string, len(g.rdbs))
	for i, rdb := range g.rdbs {
		values[i] = rdb.Dump(ctx, key).Val()
	}
	return func() {
		for i, rdb := range g.rdbs {
			if values[i] != "" {
				rdb.RestoreReplace(context.WithoutCancel(ctx), key, ttl, values[i])
			}
		}
	}
}
