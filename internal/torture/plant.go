package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/hasplock/hasp/backend"
)

// plants are the bugs that can be planted in every strategy. They show that the
// harness finds bugs.
var plants = map[string]string{
	"release": "a release frees the key for any caller",
	"renewal": "a renewal is sent after the release",
	"wake-up": "a waiter misses a release between its check and its subscription",
}

// plant puts a bug into a driver, whose locks are on the servers at addrs or in
// dir.
func plant(name string, addrs []string, dir string, d backend.Driver) (backend.Driver, error) {
	if name == "" {
		return d, nil
	}
	s := buggy{d, ground{dir: dir}}
	for _, addr := range addrs {
		s.ground.rdbs = append(s.ground.rdbs, redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true,
			MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}}))
	}
	switch name {
	case "release":
		d = anyRelease{s}
	case "renewal":
		d = lateRenewal{s}
	case "wake-up":
		return deaf{s}, nil
	default:
		return nil, fmt.Errorf("unknown bug %q", name)
	}
	if w, ok := s.Driver.(backend.Waiter); ok {
		return waits{d, w}, nil
	}
	return d, nil
}

// ground is the store of the locks, without the driver.
type ground struct {
	rdbs []*redis.Client
	dir  string
}

func (g ground) file(key string) string { return filepath.Join(g.dir, "key-"+key+".lock") }

// free removes the record of a key, and reports whether there was one.
func (g ground) free(ctx context.Context, key string) (held bool, err error) {
	if g.dir != "" {
		err := os.Remove(g.file(key))
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		return err == nil, err
	}
	for _, rdb := range g.rdbs {
		n, e := rdb.Del(ctx, key).Result()
		held = held || n > 0
		err = errors.Join(err, e)
	}
	return held, err
}

// save returns a function that restores the record of a key as it is now.
func (g ground) save(ctx context.Context, key string, ttl time.Duration) (restore func()) {
	if g.dir != "" {
		record, err := os.ReadFile(g.file(key))
		return func() {
			if err == nil {
				_ = os.WriteFile(g.file(key), record, 0o600)
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

// buggy is a driver with access to its store.
type buggy struct {
	backend.Driver
	ground ground
}

func (s buggy) Traits() backend.Traits {
	t := s.Driver.Traits()
	t.Ends = backend.EndsSometime
	return t
}

func (s buggy) Close() error {
	for _, rdb := range s.ground.rdbs {
		rdb.Close()
	}
	return s.Driver.Close()
}

// waits is a buggy driver with the Wait of the sound one.
type waits struct {
	backend.Driver
	sound backend.Waiter
}

func (w waits) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return w.sound.Wait(ctx, c)
}

type anyRelease struct{ buggy }

func (a anyRelease) Release(ctx context.Context, c backend.Claim) error {
	err := a.Driver.Release(ctx, c)
	if !errors.Is(err, backend.ErrLost) {
		return err
	}
	if held, err := a.ground.free(ctx, c.Key); err != nil || held {
		return err
	}
	return backend.ErrLost
}

type lateRenewal struct{ buggy }

func (l lateRenewal) Release(ctx context.Context, c backend.Claim) error {
	restore := l.ground.save(ctx, c.Key, c.TTL)
	err := l.Driver.Release(ctx, c)
	if err == nil && rand.IntN(4) == 0 {
		time.AfterFunc(c.TTL/50, restore)
	}
	return err
}

type deaf struct{ buggy }

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
