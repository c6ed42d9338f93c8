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
	"github.com/hasplock/hasp/internal/crew"
)

func TestMain(m *testing.M) {
	crew.Main(crew.Roles{"count": count, "work": work, "guard": holdGuard, "limited": limited, "user": user, "nobody": become, "take": take})
	os.Exit(m.Run())
}

// take takes a key for a minute, and ends.
func take(args []string) error {
	_, err := New(args[0], nil).Acquire(context.Background(), claim(args[1]))
	return err
}

// play starts a process that has a role in a directory.
func play(t *testing.T, role, dir string, args ...string) *crew.Child {
	t.Helper()
	return crew.Test(t, role, append([]string{dir}, args...)...)
}

// count increments the number in a file. Only the lock protects the file.
func count(args []string) error {
	dir, file := args[0], args[1]
	n, err := strconv.Atoi(args[2])
	d := New(dir, nil)
	for i := 0; i < n && err == nil; i++ {
		c := claim("count")
		if _, err = poll(d, c); err != nil {
			break
		}
		var b []byte
		if b, err = os.ReadFile(file); err != nil {
			break
		}
		v, _ := strconv.Atoi(string(b))
		if err = os.WriteFile(file, []byte(strconv.Itoa(v+1)), 0o600); err != nil {
			break
		}
		err = d.Release(context.Background(), c)
	}
	return err
}

// work takes, renews and releases until it is killed. It prints each fence before it
// goes on.
func work(args []string) error {
	d := New(args[0], nil)
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
	g, err := New(args[0], nil).lockGuard(context.Background(), stripeOf(args[1]))
	if err != nil {
		return err
	}
	defer g.drop()
	fmt.Println("ready")
	crew.AwaitEnd()
	return nil
}

func TestOneHolderAmongProcessesWhileOthersAreKilled(t *testing.T) {
	dir := t.TempDir()
	file := dir + "/number"
	write(t, file, []byte("0"))
	const counters, rounds = 3, 100
	var counting []*crew.Child
	for range counters {
		counting = append(counting, play(t, "count", dir, file, strconv.Itoa(rounds)))
	}

	d := New(dir, nil)
	keys := []string{"count", "a", "b", neighbour("a")}
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
		key := keys[1+round%3]
		cl := fenced(claim(key))
		g, err := poll(d, cl)
		must(t, err)
		note(t, last, fmt.Sprint(key, " ", g.Fence))
		release(t, d, cl)
	}
	for _, c := range counting {
		c.Finish(t)
	}
	if b, err := os.ReadFile(file); string(b) != strconv.Itoa(counters*rounds) {
		t.Errorf("counted %s of %d, %v", b, counters*rounds, err)
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
