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

// oneTooMany is the bug "slots": the callers ask for one slot too many. It is no bug of a
// driver.
const oneTooMany = "slots"

// queued is the bug "queue": a renewal waits behind the acquires of its Client.
const queued = "queue"

// plant puts a bug into a driver whose locks are on the servers at addrs or in dir. It shows
// that the harness finds such bugs.
func plant(bug string, addrs []string, dir string, d backend.Driver) (backend.Driver, error) {
	if bug == "" || bug == oneTooMany {
		return d, nil
	}
	b := buggy{Driver: d, bug: bug, ground: newGround(addrs, dir), line: make(chan struct{}, 1)}
	if w, ok := d.(backend.Waiter); ok && (bug == "release" || bug == "renewal") {
		return buggyWaiter{b, w.Wait}, nil
	}
	if w, ok := d.(backend.Waker); ok && (bug == "release" || bug == "renewal") {
		return buggyWaker{b, w}, nil
	}
	switch bug {
	case "release", "renewal":
		return b, nil
	case "wake-up", "reply", queued:
		return buggyWaiter{b, b.poll}, nil
	}
	return nil, fmt.Errorf("unknown bug %q", bug)
}

// buggy is a driver with a bug, and with access to its store.
type buggy struct {
	backend.Driver
	bug    string
	ground ground
	line   chan struct{} // is full while an acquire or a renewal of the bug "queue" is under way
}

// Acquire of the bug "reply" counts the term from the reply.
func (b buggy) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if !b.enter(ctx) {
		return backend.Grant{}, ctx.Err()
	}
	defer b.leave()
	began := time.Now()
	g, err := b.Driver.Acquire(ctx, c)
	return b.late(g, c, began), err
}

func (b buggy) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	if !b.enter(ctx) {
		return // the outcome of all claims is unknown
	}
	defer b.leave()
	began := time.Now()
	b.Driver.Renew(ctx, cs, func(i int, g backend.Grant, err error) { done(i, b.late(g, cs[i], began), err) })
}

// enter waits for the end of other calls, if the bug is "queue".
func (b buggy) enter(ctx context.Context) bool {
	if b.bug != queued {
		return true
	}
	select {
	case b.line <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

func (b buggy) leave() {
	if b.bug == queued {
		<-b.line
	}
}

// late counts a grant's term from the reply, not from the request that was sent at began, if
// the bug is "reply".
func (b buggy) late(g backend.Grant, c backend.Claim, began time.Time) backend.Grant {
	if b.bug != "reply" {
		return g
	}
	if g.Until.IsZero() {
		g.Until = began.Add(c.TTL - backend.Drift(c.TTL))
	}
	g.Until = g.Until.Add(time.Since(began))
	return g
}

// Release of the bug "release" frees the key for any caller. After that of the bug "renewal",
// a renewal follows now and then.
func (b buggy) Release(ctx context.Context, c backend.Claim) error {
	var restore func()
	if b.bug == "renewal" {
		restore = b.ground.save(ctx, c.Key, c.TTL)
	}
	err := b.Driver.Release(ctx, c)
	if b.bug == "renewal" && err == nil && rand.IntN(4) == 0 {
		time.AfterFunc(c.TTL/50, restore)
	}
	if b.bug == "release" && errors.Is(err, backend.ErrLost) {
		err = b.Driver.(backend.Inspector).Break(ctx, c.Key)
	}
	return err
}

func (b buggy) Traits() backend.Traits {
	t := b.Driver.Traits()
	t.Cancellation = backend.CancelNone
	return t
}

func (b buggy) Close() error {
	for _, rdb := range b.ground.rdbs {
		rdb.Close()
	}
	return b.Driver.Close()
}

// buggyWaiter is a buggy driver that can wait.
type buggyWaiter struct {
	buggy
	wait func(context.Context, backend.Claim) (backend.Grant, error)
}

func (w buggyWaiter) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return w.wait(ctx, c)
}

// buggyWaker is a buggy driver that wakes callers.
type buggyWaker struct {
	buggy
	waker backend.Waker
}

func (w buggyWaker) Listen(ctx context.Context, c backend.Claim) (<-chan struct{}, func(), error) {
	return w.waker.Listen(ctx, c)
}

// poll asks for the key until it gets it. A waiter of the bug "wake-up" sometimes misses a
// release between its check and its subscription.
func (b buggy) poll(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	for {
		again := time.After(5 * time.Millisecond)
		if b.bug == "wake-up" && rand.IntN(100) == 0 {
			again = nil
		}
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
			if err == nil { // not in place, because this process may be killed meanwhile
				temp := fmt.Sprint(g.dir, os.Getpid(), key)
				_ = os.WriteFile(temp, record, 0o600)
				_ = os.Rename(temp, name)
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
