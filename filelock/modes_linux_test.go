package filelock

import (
	"bytes"
	"encoding/binary"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// A process may be killed between any two system calls. If a file has its name already, other users
// of the directory must be able to use it.
func TestAFileHasItsModeBeforeItsName(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))
	parent := t.TempDir()
	dir := filepath.Join(parent, "locks")
	d := on(dir, &Options{Mode: 0o770})

	changed := watchModes(t, parent)
	must(t, d.folder.ensure())
	for _, name := range changed() {
		if !strings.HasPrefix(name, dirPrefix) {
			t.Errorf("the mode of %s was set after it had its name", name)
		}
	}

	changed = watchModes(t, dir)
	c := fenced(claim("k"))
	acquire(t, d, c)
	must(t, renew(d, c)[0])
	release(t, d, c)
	names := changed()
	for _, name := range names {
		if !strings.HasPrefix(name, "temp-") {
			t.Errorf("the mode of %s was set after it had its name", name)
		}
	}
	if len(names) == 0 {
		t.Error("no mode was set at all")
	}
}

// watchModes watches for changes of the modes of files in dir. It returns a function that ends the
// watch and returns the names of these files.
func watchModes(t *testing.T, dir string) func() []string {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	must(t, err)
	_, err = unix.InotifyAddWatch(fd, dir, unix.IN_ATTRIB)
	must(t, err)
	return func() (names []string) {
		defer unix.Close(fd)
		b := make([]byte, 1<<20) // room for far more events than there are
		n, err := unix.Read(fd, b)
		if err != nil && err != unix.EAGAIN {
			t.Fatal(err)
		}
		for b = b[:max(n, 0)]; len(b) > 0; {
			size := binary.NativeEndian.Uint32(b[12:]) // the size of the name; wd, mask and cookie precede it
			name := b[unix.SizeofInotifyEvent:][:size]
			if name = bytes.TrimRight(name, "\x00"); len(name) > 0 { // an event without a name is about dir itself
				names = append(names, string(name))
			}
			b = b[unix.SizeofInotifyEvent+size:]
		}
		return names
	}
}

// Each file that a call has opened is closed at its end, also if the call fails.
func TestCallsLeaveNoFileOpen(t *testing.T) {
	count := func() int { return len(files(t, "/proc/self/fd")) }
	d := on(t.TempDir(), nil)
	c := claim("k")
	acquire(t, d, c)
	before := count()

	damaged := fenced(claim(stranger("k")))
	file := d.folder.fenceFile(stripeOf(damaged.Key))
	write(t, file, []byte("seven\n"))
	noGrant(t, d, damaged, file)
	must(t, renew(d, c)[0])
	listed(t, d, "")
	g := anothersGuard(t, d.folder.path, "k")
	if mine, err := d.guards.try(stripeOf("k")); mine != nil || err != nil {
		t.Errorf("the guard of another process: %v, %v", mine, err)
	}
	g.unlock()
	release(t, d, c) // needs the turn that the method try has given back
	d.sweeper.sweep(t.Context(), 1)
	must(t, d.Close())
	if after := count(); after > before {
		t.Errorf("%d files are open, and %d were before", after, before)
	}
}
