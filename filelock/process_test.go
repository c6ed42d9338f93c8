//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package filelock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/crew"
)

func TestMain(m *testing.M) {
	crew.Main(crew.Roles{"work": work, "guard": holdGuard, "limited": limited, "user": user, "nobody": become, "take": take})
	os.Exit(m.Run())
}

// take takes a key for a minute, and ends.
func take(args []string) error {
	_, err := on(args[0], nil).Acquire(context.Background(), claim(args[1]))
	return err
}

// play starts a process that has a role in a directory.
func play(t *testing.T, role, dir string, args ...string) *crew.Child {
	t.Helper()
	return crew.Test(t, role, append([]string{dir}, args...)...)
}

// work takes, renews and releases until it is killed. It prints each fence before it
// goes on.
func work(args []string) error {
	d := on(args[0], nil)
	for {
		for _, key := range args[1:] {
			c := fenced(claim(key))
			c.TTL = backend.MinTTL
			g, err := d.Acquire(context.Background(), c)
			if errors.Is(err, backend.ErrHeld) {
				continue
			}
			if err != nil {
				return err
			}
			fmt.Println(key, g.Fence)
			for range 3 {
				if err := renew(d, c)[0]; err != nil && !errors.Is(err, backend.ErrLost) {
					return err
				}
			}
			if err := d.Release(context.Background(), c); err != nil && !errors.Is(err, backend.ErrLost) {
				return err
			}
		}
	}
}

// holdGuard holds the guard of a key.
func holdGuard(args []string) error {
	g, err := on(args[0], nil).lockGuard(context.Background(), stripeOf(args[1]))
	if err != nil {
		return err
	}
	defer g.drop()
	fmt.Println("ready")
	crew.AwaitEnd()
	return nil
}

// Whatever a process was doing when it was killed, the next one reads what it left, and gets a
// larger fence.
func TestProcessesThatAreKilledLeaveWhatOthersCanRead(t *testing.T) {
	dir := t.TempDir()
	d := on(dir, nil)
	keys := []string{"a", "b", neighbour("a")}
	last := map[string]uint64{}
	for round := range 20 {
		c := play(t, "work", dir, keys...)
		for range 1 + round%7 { // so it is killed at various points
			note(t, last, c.Line(t))
		}
		must(t, c.Kill())
		for _, line := range c.Rest(t) { // its output before it died
			note(t, last, line)
		}
		for _, key := range keys {
			if _, err := d.Inspect(t.Context(), key); err != nil {
				t.Fatalf("round %d: what was left of %q: %v", round, key, err)
			}
		}
		key := keys[round%3]
		cl := fenced(claim(key))
		var g backend.Grant
		await.Until(t, "the end of a term", func() (granted bool) {
			var err error
			if g, err = d.Acquire(t.Context(), cl); !errors.Is(err, backend.ErrHeld) {
				must(t, err)
				granted = true
			}
			return granted
		})
		note(t, last, fmt.Sprint(key, " ", g.Fence))
		release(t, d, cl)
	}
}

// note checks that the fence of a line "key fence" is above the last one of key.
func note(t *testing.T, last map[string]uint64, line string) {
	t.Helper()
	i := strings.LastIndexByte(line, ' ')
	key := line[:i]
	fence, err := strconv.ParseUint(line[i+1:], 10, 64)
	if err != nil || fence <= last[key] {
		t.Errorf("fence of %q after %d, %v", line, last[key], err)
	}
	last[key] = fence
}
