//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package filelock

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

// limited is a process that can write only so many bytes into a file, as on a disk
// that becomes full. It takes one key, and renews and releases others.
func limited(args []string) error {
	bytes, _ := strconv.Atoi(args[1])
	var limit syscall.Rlimit
	set(&limit.Cur, bytes)
	set(&limit.Max, bytes)
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		return err
	}
	d := New(args[0], nil)
	_, err := d.Acquire(context.Background(), claim("free"))
	fmt.Println(err)
	_, err = d.Acquire(context.Background(), fenced(claim("free")))
	fmt.Println(err)
	c := claim("kept")
	c.Token, c.TTL = args[2], time.Hour
	fmt.Println(renew(d, c)[0])
	c.Key, c.Token = "given back", args[3]
	fmt.Println(d.Release(context.Background(), c))
	_, err = d.Acquire(context.Background(), claim("kept"))
	fmt.Println(err)
	return nil
}

// set converts to the type of this platform's limits.
func set[T int64 | uint64](to *T, n int) { *to = T(n) }

func TestWriteThatEndsHalfWay(t *testing.T) {
	for _, bytes := range []int{0, 1, 20, 150} {
		t.Run(fmt.Sprint(bytes, " bytes"), func(t *testing.T) {
			d := New(t.TempDir(), nil)
			kept, back := claim("kept"), claim("given back")
			acquire(t, d, kept)
			acquire(t, d, back)
			before, err := os.ReadFile(d.path("kept"))
			must(t, err)

			c := play(t, "limited", d.dir, strconv.Itoa(bytes), kept.Token, back.Token)
			for _, what := range []string{"acquire", "fenced acquire", "renew"} {
				if line := c.Line(t); !strings.Contains(line, "make room") || !strings.Contains(line, d.dir) {
					t.Errorf("%s: %s", what, line)
				}
			}
			if line := c.Line(t); line != "<nil>" {
				t.Errorf("release: %s", line)
			}
			if line := c.Line(t); !strings.HasPrefix(line, "held by") {
				t.Errorf("acquire of a held key: %s", line)
			}
			c.Finish(t)

			if after, err := os.ReadFile(d.path("kept")); string(after) != string(before) {
				t.Errorf("the record was\n%s\nand is\n%s, %v", before, after, err)
			}
			if i := slices.IndexFunc(files(t, d.dir), func(n string) bool { return strings.HasPrefix(n, "temp-") }); i >= 0 {
				t.Error("a temp file is left")
			}
			acquire(t, d, fenced(claim("free")))
			must(t, renew(d, kept)[0])
			release(t, d, kept)
		})
	}
}

// small mounts a file system of a few pages, or skips the test.
func small(t *testing.T) string {
	dir := t.TempDir()
	if err := mountSmall(dir); err != nil {
		t.Skipf("needs to mount a small file system: %v; TestWriteThatEndsHalfWay covers a file that cannot grow", err)
	}
	t.Cleanup(func() { unmount(t, dir) })
	return filepath.Join(dir, "locks")
}

func TestFullDisk(t *testing.T) {
	d := New(small(t), nil)
	must(t, d.probe(t.Context()))
	kept, back := claim("kept"), claim("given back")
	acquire(t, d, kept)
	acquire(t, d, back)
	filler := filepath.Join(d.dir, "filler")
	fill(t, filler)

	for _, c := range []backend.Claim{claim("free"), fenced(claim("free")), fenced(claim(neighbour("kept")))} {
		_, err := d.Acquire(t.Context(), c)
		outage(t, "acquire", err, d.dir)
		if !strings.Contains(err.Error(), "make room") {
			t.Error(err)
		}
		notHeld(t, d, c.Key)
	}
	longer := kept
	longer.TTL = time.Hour
	outage(t, "renew", renew(d, longer)[0], d.dir)
	outage(t, "open", New(d.dir, nil).probe(t.Context()), d.dir)
	refused(t, d, claim("kept"), backend.ErrHeld)
	if got := left(t, d, "kept"); got > time.Minute || got < time.Second {
		t.Errorf("left %v", got)
	}
	release(t, d, back)

	must(t, os.Remove(filler))
	must(t, renew(d, longer)[0])
	release(t, d, kept)
	acquire(t, d, fenced(claim("free")))
}

// fill writes into path until the disk is full, to the last byte.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	defer f.Close()
	for size := 4096; size > 0; {
		if _, err := f.Write(make([]byte, size)); err != nil {
			size /= 2
		}
	}
}

// A disk that is full for a moment takes no pid into a new stripe, and then a fence.
func TestStripeWithoutAPid(t *testing.T) {
	d := New(t.TempDir(), nil)
	must(t, d.reserveFences(t.Context(), d.clock()))
	g, err := d.lockGuard(t.Context(), stripeOf("k"))
	must(t, err)
	must(t, g.stripe.Truncate(0)) // as if the write of the pid had failed
	_, err = g.drawFence(t.Context(), d.clock())
	must(t, err)
	g.drop()
	acquire(t, d, fenced(claim("k")))
}
