package filelock

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/gofrs/flock"
)

// guard is the right to change what belongs to one stripe of the keys, among
// all processes of the host. The kernel keeps it, and takes it back when the
// process dies, however it dies.
//
// The file that is locked is never removed: somebody who had it open would
// lock what no longer has a name, while the next one locks a new file. A
// second file beside it, the stripe's, has the holder's pid and the last
// fence; it is not the locked one because some platforms do not let others
// read a locked file, and some drop the lock with any descriptor of it that
// is closed.
type guard struct {
	d      *Driver
	n      int
	lock   *flock.Flock
	stripe *os.File
}

// fenceGuard is the number of the guard of the file "fence".
const fenceGuard = stripes

// name is the name of one of the files that belong to guard n.
func (d *Driver) name(kind string, n int) string {
	if n == fenceGuard {
		return filepath.Join(d.dir, kind+"-fence")
	}
	return filepath.Join(d.dir, fmt.Sprintf("%s-%02x", kind, n))
}

const (
	firstPoll = 20 * time.Microsecond
	lastPoll  = 5 * time.Millisecond
)

// take waits for guard n until ctx ends. It asks again and again, since a
// call that sleeps in the kernel could not be cancelled; a guard is had for
// some ten microseconds at a time, and for the length of a flush at most.
func (d *Driver) take(ctx context.Context, n int) (*guard, error) {
	if err := d.usable(ctx); err != nil {
		return nil, err
	}
	start := time.Now()
	select {
	case d.turns[n] <- struct{}{}:
	case <-ctx.Done():
		return nil, d.busy(ctx, n, start)
	}
	for delay := firstPoll; ; delay = min(2*delay, lastPoll) {
		g, err := d.tryLock(n)
		if err != nil {
			<-d.turns[n]
			return nil, err
		}
		if g != nil {
			return g, nil
		}
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			<-d.turns[n]
			return nil, d.busy(ctx, n, start)
		}
	}
}

// try takes guard n if it is free, and else returns nil.
func (d *Driver) try(ctx context.Context, n int) (*guard, error) {
	if err := d.usable(ctx); err != nil {
		return nil, err
	}
	select {
	case d.turns[n] <- struct{}{}:
	default:
		return nil, nil
	}
	g, err := d.tryLock(n)
	if g == nil {
		<-d.turns[n]
	}
	return g, err
}

// tryLock locks the guard's file if no other process has. The caller has this
// process's turn, and keeps it with the guard.
func (d *Driver) tryLock(n int) (*guard, error) {
	path := d.name("guard", n)
	l, ok, err := flockFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = d.touch(path); err == nil {
			l, ok, err = flockFile(path)
		}
	}
	if err != nil || !ok {
		return nil, err
	}
	g := &guard{d: d, n: n, lock: l}
	switch same, err := lockedIs(l, path); {
	case err != nil:
		g.unlock()
		return nil, err
	case !same:
		// Somebody cleaned the directory between open and lock.
		g.unlock()
		return nil, nil
	}
	if err := g.sign(); err != nil {
		g.unlock()
		return nil, err
	}
	return g, nil
}

func flockFile(path string) (*flock.Flock, bool, error) {
	// Without O_CREATE: see touch. For writing, because some systems lock
	// exclusively only what is open for writing.
	l := flock.New(path, flock.SetFlag(os.O_RDWR|openFlags))
	ok, err := l.TryLock()
	if err != nil {
		err = plainer(path, err)
	}
	return l, ok, err
}

// lockedIs reports whether l has locked the regular file that is at path now.
func lockedIs(l *flock.Flock, path string) (bool, error) {
	locked, err := l.Stat()
	if err != nil {
		return false, err
	}
	if !locked.Mode().IsRegular() {
		return false, kindError(path, locked)
	}
	there, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(locked, there), err
}

// pidLine is the first line of the stripe's file, of one length.
const pidLine = "pid %-10d\n"

var pidLen = len(fmt.Sprintf(pidLine, 0))

// sign opens the stripe's file and leaves the pid there, for whoever waits in
// vain. It costs one write into the page cache, which /proc/locks would save;
// but that exists on one platform only, and names files by numbers that do
// not match those of stat on overlay file systems, where containers live.
func (g *guard) sign() error {
	path := g.d.name("stripe", g.n)
	f, err := openFile(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		if err = g.d.touch(path); err == nil {
			f, err = openFile(path, os.O_RDWR, 0)
		}
	}
	if err != nil {
		return err
	}
	g.stripe = f
	// A disk without room for the line costs a label, not the lock: what is
	// changed next may be a release, which needs no room.
	_, _ = f.WriteAt(fmt.Appendf(nil, pidLine, os.Getpid()), 0)
	return nil
}

// drop gives the guard up.
func (g *guard) drop() {
	g.unlock()
	<-g.d.turns[g.n]
}

func (g *guard) unlock() {
	if g.stripe != nil {
		g.stripe.Close()
	}
	// Unlocking a descriptor that is open does not fail.
	_ = g.lock.Unlock()
}

// busy is the error of a guard that was not to be had before ctx ended.
func (d *Driver) busy(ctx context.Context, n int, start time.Time) error {
	who := "another process"
	if b, _, err := readFile(d.name("stripe", n)); err == nil {
		line, _, _ := bytes.Cut(b, []byte("\n"))
		if pid, err := strconv.Atoi(string(bytes.TrimSpace(bytes.TrimPrefix(line, []byte("pid "))))); err == nil {
			who = fmt.Sprintf("process %d", pid)
		}
	}
	return fmt.Errorf("%s: in use by %s for %v; if that is stopped, let it go on or end it: %w",
		d.name("guard", n), who, time.Since(start).Round(time.Millisecond), context.Cause(ctx))
}
