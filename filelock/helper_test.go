package filelock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
)

// dial is a clock that tests move.
type dial struct {
	mu  sync.Mutex
	now instant
}

func newDial() *dial {
	return &dial{now: instant{boot: "boot-1", up: time.Hour, wall: time.Date(2031, 1, 2, 3, 4, 5, 0, time.UTC)}}
}

func (c *dial) read() instant {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *dial) pass(d time.Duration) { c.set(func(i *instant) { i.up += d; i.wall = i.wall.Add(d) }) }

func (c *dial) set(f func(*instant)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(&c.now)
}

func (c *dial) on(dir string) *driver {
	d := on(dir, nil)
	d.clock = c.read
	d.sweeper.clock = c.read
	return d
}

var tokens struct {
	sync.Mutex
	n int
}

// claim returns the claim of a new attempt at key, for a minute.
func claim(key string) backend.Claim {
	tokens.Lock()
	defer tokens.Unlock()
	tokens.n++
	return backend.Claim{Key: key, Token: fmt.Sprintf("token-%d-%d", os.Getpid(), tokens.n), Owner: "host/1/test",
		TTL: time.Minute, Timeout: 10 * time.Second}
}

func fenced(c backend.Claim) backend.Claim { c.Fenced = true; return c }

func on(dir string, o *Options) *driver { return await.Value(newDriver(dir, o)) }

func acquire(t *testing.T, d *driver, c backend.Claim) backend.Grant {
	t.Helper()
	g, err := d.Acquire(t.Context(), c)
	must(t, err)
	return g
}

func release(t *testing.T, d *driver, c backend.Claim) {
	t.Helper()
	must(t, d.Release(t.Context(), c))
}

func refused(t *testing.T, d *driver, c backend.Claim, want error) {
	t.Helper()
	if _, err := d.Acquire(t.Context(), c); !errors.Is(err, want) {
		t.Fatalf("acquire %q: %v, want %v", c.Key, err, want)
	}
}

func lost(t *testing.T, what string, err error) {
	t.Helper()
	if !errors.Is(err, backend.ErrLost) {
		t.Errorf("%s: %v, want %v", what, err, backend.ErrLost)
	}
}

func notHeld(t *testing.T, d *driver, key string) {
	t.Helper()
	if s, err := d.Inspect(t.Context(), key); s.Held || err != nil {
		t.Errorf("inspect %.20q: %+v, %v", key, s, err)
	}
}

var must = await.Must

func renew(d *driver, cs ...backend.Claim) []error { return renewIn(context.Background(), d, cs...) }

func renewIn(ctx context.Context, d *driver, cs ...backend.Claim) []error {
	errs := make([]error, len(cs))
	for i := range errs {
		errs[i] = errors.New("not answered")
	}
	d.Renew(ctx, cs, func(i int, _ backend.Grant, err error) { errs[i] = err })
	return errs
}

func left(t *testing.T, d *driver, key string) time.Duration {
	return await.Value(d.Inspect(t.Context(), key)).TTL
}

// holds checks that key is held for exactly that time from now.
func holds(t *testing.T, d *driver, key string, rest time.Duration) {
	t.Helper()
	refused(t, d, claim(key), backend.ErrHeld)
	if got := left(t, d, key); got != rest {
		t.Errorf("%q is held for %v, want %v", key, got, rest)
	}
}

func noTemp(t *testing.T, d *driver) {
	t.Helper()
	if s := strings.Join(files(t, d.folder.path), " "); strings.Contains(s, tempPrefix) {
		t.Errorf("a temporary file is left: %s", s)
	}
}

func files(t *testing.T, dir string) (names []string) {
	for _, e := range await.Value(os.ReadDir(dir)) {
		names = append(names, e.Name())
	}
	return names
}
