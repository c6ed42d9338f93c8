package main

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

// bugs are the names of all bugs.
var bugs = []string{"release", "renewal", "wake-up", oneTooMany, "reply", queued}

// oneTooMany is the bug "slots": the callers ask for one slot too many. It is no bug of a
// driver.
const oneTooMany = "slots"

// queued is the bug "queue": see acquireInLine and renewInLine.
const queued = "queue"

// plant puts a bug into a driver whose locks are on the servers at addrs or in dir. It shows
// that the harness finds such bugs.
func plant(name string, addrs []string, dir string, d backend.Driver) (backend.Driver, error) {
	if name == "" || name == oneTooMany {
		return d, nil
	}
	b := buggy{Driver: d, ground: newGround(addrs, dir), acquire: d.Acquire, renew: d.Renew, release: d.Release}
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
	case "reply":
		b.acquire, b.renew = b.acquireLate, b.renewFromReply
		wait = b.waitPolling
	case queued:
		line := make(chan struct{}, 1)
		b.acquire, b.renew = b.acquireInLine(line), b.renewInLine(line)
		wait = b.waitPolling
	default:
		return nil, fmt.Errorf("unknown bug %q", name)
	}
	if wait == nil {
		return b, nil
	}
	return buggyWaiter{b, wait}, nil
}

// buggy is a driver some of whose functions have a bug, with access to its store.
type buggy struct {
	backend.Driver
	ground  ground
	acquire waitFunc
	renew   renewFunc
	release func(context.Context, backend.Claim) error
}

func (b buggy) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return b.acquire(ctx, c)
}

func (b buggy) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	b.renew(ctx, cs, done)
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

type (
	waitFunc  func(context.Context, backend.Claim) (backend.Grant, error)
	renewFunc func(context.Context, []backend.Claim, func(int, backend.Grant, error))
)

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
	return b.poll(ctx, c, func() <-chan time.Time {
		if rand.IntN(100) == 0 {
			return nil
		}
		return time.After(pollEvery)
	})
}

const pollEvery = 5 * time.Millisecond

// waitPolling is a Wait without a bug of its own.
func (b buggy) waitPolling(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return b.poll(ctx, c, func() <-chan time.Time { return time.After(pollEvery) })
}

// poll asks for the key until it gets it. Between two attempts it waits for what next
// returned before the first of them.
func (b buggy) poll(ctx context.Context, c backend.Claim, next func() <-chan time.Time) (backend.Grant, error) {
	for {
		again := next()
		g, err := b.Acquire(ctx, c)
		if err == nil {
			return g, nil
		}
		select {
		case <-ctx.Done():
			return g, err
		case <-again:
		}
	}
}

// late counts a grant's term from the reply, not from the request that was sent at began.
func late(g backend.Grant, c backend.Claim, began time.Time) backend.Grant {
	if g.Until.IsZero() {
		g.Until = began.Add(c.TTL - backend.Drift(c.TTL))
	}
	g.Until = g.Until.Add(time.Since(began))
	return g
}

// acquireLate and renewFromReply are the bug "reply".
func (b buggy) acquireLate(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	began := time.Now()
	g, err := b.Driver.Acquire(ctx, c)
	return late(g, c, began), err
}

func (b buggy) renewFromReply(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	began := time.Now()
	b.Driver.Renew(ctx, cs, func(i int, g backend.Grant, err error) { done(i, late(g, cs[i], began), err) })
}

// acquireInLine and renewInLine are the bug "queue": a renewal waits behind the acquires
// of its Client.
func (b buggy) acquireInLine(line chan struct{}) waitFunc {
	return func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
		select {
		case line <- struct{}{}:
		case <-ctx.Done():
			return backend.Grant{}, ctx.Err()
		}
		defer func() { <-line }()
		return b.Driver.Acquire(ctx, c)
	}
}

func (b buggy) renewInLine(line chan struct{}) renewFunc {
	return func(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
		select {
		case line <- struct{}{}:
		case <-ctx.Done():
			return // the outcome of all claims is unknown
		}
		defer func() { <-line }()
		b.Driver.Renew(ctx, cs, done)
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
		g.rdbs = append(g.rdbs, redis.NewClient(clientOptions(addr)))
	}
	return g
}

func clientOptions(addr string) *redis.Options {
	return &redis.Options{Addr: addr, ContextTimeoutEnabled: true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}}
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
