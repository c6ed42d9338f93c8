//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package filelock

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// limited runs in a process that can write only args[1] bytes into a file, as on a disk that
// becomes full. It takes one key, and renews and releases others.
func limited(args []string) error {
	bytes, _ := strconv.Atoi(args[1])
	var limit syscall.Rlimit
	set(&limit.Cur, bytes)
	set(&limit.Max, bytes)
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		return err
	}
	d := on(args[0], nil)
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
	fmt.Println(d.explain(syscall.ENOSPC)) // the error of a full disk, which the limit does not cause
	return nil
}

// set converts n to the type that this platform has for limits.
func set[T int64 | uint64](to *T, n int) { *to = T(n) }

func TestWriteThatEndsHalfWay(t *testing.T) {
	for _, bytes := range []int{0, 1, 20, 150} {
		t.Run(fmt.Sprint(bytes, " bytes"), func(t *testing.T) {
			d := on(t.TempDir(), nil)
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
			if line := c.Line(t); !strings.Contains(line, "make room") {
				t.Errorf("full disk: %s", line)
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
