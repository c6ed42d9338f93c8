//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package filelock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/crew"
)

func TestMain(m *testing.M) {
	crew.Main(crew.Roles{"guard": holdGuard, "limited": limited, "user": user, "nobody": become})
	os.Exit(m.Run())
}

func play(t *testing.T, role, dir string, args ...string) *crew.Child {
	t.Helper()
	return crew.Test(t, role, append([]string{dir}, args...)...)
}

func holdGuard(args []string) error {
	g, err := on(args[0], nil).guards.lock(context.Background(), stripeOf(args[1]))
	if err != nil {
		return err
	}
	defer g.unlock()
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin) // until this process is killed, or the test ends
	return err
}

// limited runs in a process that can write only args[1] bytes into a file, as on a disk that
// becomes full. It tries to take a key, and to renew the key whose token is args[2].
func limited(args []string) error {
	length, _ := strconv.Atoi(args[1])
	var limit syscall.Rlimit
	set(&limit.Cur, length)
	set(&limit.Max, length)
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		return err
	}
	d := on(args[0], nil)
	_, err := d.Acquire(context.Background(), fenced(claim("free")))
	fmt.Println(err)
	c := claim("k")
	c.Token, c.TTL = args[2], 24*time.Hour
	fmt.Println(renew(d, c)[0])
	return nil
}

// set converts n to the type that this platform has for limits.
func set[T int64 | uint64](to *T, n int) { *to = T(n) }

func TestWriteThatEndsHalfWay(t *testing.T) {
	d := on(t.TempDir(), nil)
	c := claim("k")
	c.TTL = time.Hour
	acquire(t, d, c)
	size := int(await.Value(os.Stat(d.folder.recordFile("k"))).Size())
	// The renewals write the second and the first copy of the record in turns.
	for _, length := range []int{0, size/2 - 20, size - 20, 20} {
		before := await.Value(d.folder.load("k", d.clock()))
		p := play(t, "limited", d.folder.path, strconv.Itoa(length), c.Token)
		for _, what := range []string{"acquire", "renew"} {
			if line := p.Line(t); !strings.Contains(line, d.folder.path) || !strings.Contains(line, "file too large") {
				t.Errorf("%s: %s", what, line)
			}
		}
		p.Finish(t)
		if got := await.Value(d.folder.load("k", d.clock())); !reflect.DeepEqual(got, before) {
			t.Errorf("the record was %+v, and is %+v", before, got)
		}
		noTemp(t, d)
		c.TTL += time.Minute
		must(t, renew(d, c)[0])
	}
}

func TestStoppedProcessWithAGuardIsAnOutage(t *testing.T) {
	dir := t.TempDir()
	d := on(dir, nil)
	held := claim("k")
	acquire(t, d, held)
	c := play(t, "guard", dir, "k")
	c.Line(t)
	must(t, c.Pause())

	near := claim(neighbour("k"))
	for what, call := range map[string]func(ctx context.Context) error{
		"acquire": func(ctx context.Context) error { _, err := d.Acquire(ctx, near); return err },
		"release": func(ctx context.Context) error { return d.Release(ctx, held) },
		"break":   func(ctx context.Context) error { return d.Break(ctx, "k") },
	} {
		ctx := await.Timeout(t, 150*time.Millisecond)
		err := call(ctx)
		outage(t, what, err, d.folder.guardFile(stripeOf("k")))
		if !strings.Contains(err.Error(), "if a process is stopped, continue or end it") {
			t.Errorf("%s: %v does not say what to do", what, err)
		}
	}

	// An attempt at a held key needs no guard, and other stripes have other guards.
	refused(t, d, claim("k"), backend.ErrHeld)
	if s, err := d.Inspect(t.Context(), "k"); !s.Held || err != nil {
		t.Errorf("inspect says %+v, %v", s, err)
	}
	acquire(t, d, claim(stranger("k")))

	must(t, c.Kill()) // the kernel ends its guard
	release(t, d, held)
	acquire(t, d, near)
}

// anothersGuard locks the guard of key with another driver, as another process would.
func anothersGuard(t *testing.T, dir, key string) *guard {
	return await.Value(on(dir, nil).guards.lock(t.Context(), stripeOf(key)))
}

func TestStuckGuardDelaysOnlyItsOwnRenewals(t *testing.T) {
	dir := t.TempDir()
	d := on(dir, nil)
	cs := []backend.Claim{claim("k"), claim(neighbour("k"))}
	stuck := len(cs)
	for i := range 40 {
		if key := fmt.Sprint("key ", i); stripeOf(key) != stripeOf("k") {
			cs = append(cs, claim(key))
		}
	}
	for i := range cs {
		acquire(t, d, cs[i])
	}

	g := anothersGuard(t, dir, "k")
	answered := make(chan int, len(cs))
	go func() {
		defer close(answered)
		d.Renew(t.Context(), cs, func(i int, _ backend.Grant, err error) {
			if err != nil {
				t.Errorf("claim %d: %v", i, err)
			}
			answered <- i
		})
	}()
	for range len(cs) - stuck {
		if i := <-answered; i < stuck {
			t.Errorf("claim %d was renewed without its guard", i)
		}
	}
	g.unlock()
	for range answered {
		stuck--
	}
	if stuck != 0 {
		t.Errorf("%d claims were not answered", stuck)
	}
}

func TestCancelEndsTheWaitForAGuardAtOnce(t *testing.T) {
	dir := t.TempDir()
	defer anothersGuard(t, dir, "k").unlock()
	d := on(dir, nil)
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	c := claim("k")
	c.Timeout = time.Hour
	result := make(chan error, 3)
	// One call polls the guard's file, and the other two wait for this process's turn.
	go func() { _, err := d.Acquire(ctx, c); result <- err }()
	go func() { result <- d.Release(ctx, c) }()
	go func() { result <- renewIn(ctx, d, c)[0] }()
	for len(d.guards.turns[stripeOf("k")]) == 0 {
		<-time.After(time.Millisecond)
	}

	await.Until(t, "the file is written before the guard is locked", func() bool {
		return strings.Contains(strings.Join(files(t, dir), " "), tempPrefix)
	})
	cancel(cause)
	for range cap(result) {
		// A call that begins after the cancel does not reach the guard.
		if err := <-result; !errors.Is(err, cause) {
			t.Errorf("got %v", err)
		}
	}
}
