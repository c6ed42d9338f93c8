//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package filelock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
)

// nobody is the user of the child process if the test runs as root, so that permissions apply to
// it.
const nobody = 65534

func beNobody() error {
	if os.Getuid() != 0 {
		return nil
	}
	return errors.Join(syscall.Setgroups(nil), syscall.Setgid(nobody), syscall.Setuid(nobody))
}

// become prints the error of becoming another user, or nil.
func become([]string) error { fmt.Println(beNobody()); return nil }

// user prints what Acquire, Inspect, Release and probe return to a user that is not root.
func user(args []string) error {
	if err := beNobody(); err != nil {
		return err
	}
	d, c, ctx := on(args[0], nil), claim(args[1]), context.Background()
	_, acquired := d.Acquire(ctx, c)
	_, inspected := d.Inspect(ctx, c.Key)
	fmt.Printf("%v\n%v\n%v\n%v\n", acquired, inspected, d.Release(ctx, c), d.probe(ctx))
	return nil
}

// asUser returns what each call to d returns to a user that is not root.
func asUser(t *testing.T, d *driver, key string) map[string]string {
	t.Helper()
	c := play(t, "user", d.folder.path, key)
	answers := map[string]string{}
	for _, call := range []string{"acquire", "inspect", "release", "open"} {
		answers[call] = c.Line(t)
	}
	c.Finish(t)
	return answers
}

// reachable creates a directory that any user can reach. It skips the test if root cannot become
// another user, or other users cannot reach temporary files.
func reachable(t *testing.T, mode fs.FileMode) string {
	t.Helper()
	if os.Getuid() == 0 {
		c := play(t, "nobody", t.TempDir())
		if answer := c.Line(t); answer != "<nil>" {
			t.Skipf("needs to become another user: %s", answer)
		}
		c.Finish(t)
		for up := filepath.Clean(os.TempDir()); ; up = filepath.Dir(up) {
			fi := await.Value(os.Stat(up))
			if fi.Mode().Perm()&1 == 0 {
				t.Skipf("needs temporary files that every user can get to, and %s has mode %v", up, fi.Mode())
			}
			if up == filepath.Dir(up) {
				break
			}
		}
	}
	dir := filepath.Join(t.TempDir(), "locks")
	for up := filepath.Dir(dir); len(up) > len(os.TempDir()); up = filepath.Dir(up) {
		must(t, os.Chmod(up, 0o755))
	}
	must(t, os.Mkdir(dir, 0o700))
	must(t, os.Chmod(dir, mode))
	t.Cleanup(func() { os.Chmod(dir, 0o700) })
	return dir
}

func TestWhatCannotBeReadOrWrittenIsNotGranted(t *testing.T) {
	for name, test := range map[string]struct {
		directory fs.FileMode
		record    bool   // the record exists, and has mode 0
		allowed   string // the only call that succeeds
	}{
		"directory that cannot be used":    {},
		"directory that cannot be entered": {directory: 0o444},
		"directory that cannot be written": {directory: 0o555, allowed: "inspect"},
		"record that cannot be read":       {directory: 0o777, record: true, allowed: "open"},
	} {
		t.Run(name, func(t *testing.T) {
			d := on(reachable(t, test.directory), nil)
			path := d.folder.path
			if test.record {
				path = d.folder.recordFile("k")
				acquire(t, d, claim("k"))
				must(t, os.Chmod(path, 0))
			}
			before := await.Value(os.Lstat(path))
			for call, answer := range asUser(t, d, "k") {
				const says = "must be readable and writable"
				denied := strings.Contains(answer, path) && strings.Contains(answer, says)
				if call == test.allowed && answer != "<nil>" || call != test.allowed && !denied {
					t.Errorf("%s: %s", call, answer)
				}
			}
			if after, err := os.Lstat(path); err != nil || !os.SameFile(before, after) {
				t.Errorf("the file was replaced: %v, %v", after, err)
			}
		})
	}
}

// A user that may write in the directory may lock, whatever the umask is and whichever user created
// the files.
func TestUsersShareADirectory(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to be two users")
	}
	defer syscall.Umask(syscall.Umask(0o077))
	d := on(reachable(t, 0o777), nil)
	c := fenced(claim("k"))
	acquire(t, d, c)
	while := func(state, acquired, released string) {
		t.Helper()
		got := asUser(t, d, "k")
		for call, want := range map[string]string{
			"acquire": acquired,
			"release": released,
			"inspect": "<nil>",
			"open":    "<nil>",
		} {
			if !strings.HasPrefix(got[call], want) {
				t.Errorf("%s, %s: %s, want %s", state, call, got[call], want)
			}
		}
	}
	while("held", "held by", backend.ErrLost.Error())
	release(t, d, c)
	for range 2 {
		while("free", "<nil>", "<nil>")
		acquire(t, d, c)
		release(t, d, c)
	}
	for _, name := range files(t, d.folder.path) {
		fi, err := os.Stat(filepath.Join(d.folder.path, name))
		if err != nil || fi.Mode().Perm() != 0o666 {
			t.Errorf("%s: %v, %v", name, fi.Mode(), err)
		}
	}
}

// The umask changes no mode. If it did, a file that its owner could not open would block its keys.
func TestFilesHaveTheModeOfTheDirectory(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0))
	for _, c := range []struct {
		umask           int
		mode, dir, file fs.FileMode
	}{
		{0o027, 0, fs.ModeDir | 0o700, 0o600},
		{0o027, 0o770, fs.ModeDir | fs.ModeSetgid | 0o770, 0o660},
		{0o027, 0o755, fs.ModeDir | 0o755, 0o644},
		{0o777, 0, fs.ModeDir | 0o700, 0o600},
	} {
		dir := filepath.Join(t.TempDir(), "parent", "locks")
		d := on(dir, &Options{Mode: c.mode})
		syscall.Umask(0o027)
		must(t, d.folder.ensure())
		syscall.Umask(c.umask)
		must(t, d.probe(t.Context()))
		claim := fenced(claim("k"))
		acquire(t, d, claim)
		must(t, renew(d, claim)[0])

		modes := map[string]fs.FileMode{filepath.Dir(dir): fs.ModeDir | 0o700, dir: c.dir}
		for _, name := range files(t, dir) {
			modes[filepath.Join(dir, name)] = c.file
		}
		for path, want := range modes {
			if fi, err := os.Stat(path); err != nil || fi.Mode() != want {
				t.Errorf("mode %O, umask %O: %s has %v, want %v (%v)", c.mode, c.umask, path, fi.Mode(), want, err)
			}
		}
		syscall.Umask(0)
	}
}

// There may be another kind of file with the name of one of filelock's files. The open of a FIFO
// must not block, and its content must not count as an empty file from before this boot. The target
// of a link must not be overwritten.
func TestWhatIsNoFileInPlaceOfAFile(t *testing.T) {
	target := filepath.Join(t.TempDir(), "precious")
	write(t, target, []byte("precious"))
	dir, n := t.TempDir(), stripeOf("k")
	d := on(dir, nil)
	acquire(t, d, fenced(claim("k")))
	for _, plant := range []func(path string) error{
		func(path string) error { return syscall.Mkfifo(path, 0o700) },
		func(path string) error { return os.Mkdir(path, 0o700) },
		func(path string) error { return os.Symlink(target, path) },
		func(path string) error { return os.Symlink(target+" 2", path) },
	} {
		for _, path := range []string{d.folder.recordFile("k"), d.folder.fenceFile(n), d.folder.guardFile(n)} {
			must(t, os.RemoveAll(path))
			must(t, plant(path))
			if err := noGrant(t, d, fenced(claim("k")), path); !errors.Is(err, errNotFile) {
				t.Error(err)
			}
			must(t, os.Remove(path))
		}
	}
	b, err := os.ReadFile(target)
	if _, made := os.Stat(target + " 2"); string(b) != "precious" || !errors.Is(made, fs.ErrNotExist) {
		t.Errorf("the target of a link is now %q, %v, and the other one %v", b, err, made)
	}
}
