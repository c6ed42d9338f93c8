package filelock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/gofrs/flock"
)

// guard is the right to change the records of one stripe of the keys. Only one process of the host
// can have it. It is a flock(2) lock, which the kernel ends when the process dies.
//
// The guard's file is never removed. Otherwise a process that had already opened it would lock a
// file without a name, while the next process locks a new file. The last fence is in another file,
// the file of the stripe, because on some platforms the lock ends when the process closes any
// descriptor of the locked file.
type guard struct {
	d    *driver
	n    int          // the number of a stripe
	lock *flock.Flock // the guard's file, locked
}

// guardFile returns the path of a file of stripe n. The kind is "guard" or "stripe".
func (d *driver) guardFile(kind string, n int) string {
	return filepath.Join(d.dir, fmt.Sprintf("%s-%02x", kind, n))
}

// The sleep between two tries to lock a guard doubles from firstPoll to lastPoll.
const (
	firstPoll = 20 * time.Microsecond
	lastPoll  = 5 * time.Millisecond
)

// lockGuard blocks until it has guard n or ctx ends. It polls, because a call that blocks in the
// kernel cannot be cancelled. A guard is usually held for tens of microseconds.
func (d *driver) lockGuard(ctx context.Context, n int) (*guard, error) {
	if err := d.check(ctx); err != nil {
		return nil, err
	}

	start := time.Now()
	select {
	case d.turns[n] <- struct{}{}:
	case <-ctx.Done():
		return nil, d.guardBusy(ctx, n, start)
	}

	for delay := firstPoll; ; delay = min(2*delay, lastPoll) {
		g, err := d.tryFlock(n)
		if g != nil {
			return g, nil // the guard has the turn until a call of the method drop
		}
		if err != nil {
			<-d.turns[n]
			return nil, err
		}

		select {
		case <-time.After(delay):
		case <-ctx.Done():
			<-d.turns[n]
			return nil, d.guardBusy(ctx, n, start)
		}
	}
}

// tryGuard locks guard n if it is free. Otherwise it returns nil, nil.
func (d *driver) tryGuard(ctx context.Context, n int) (*guard, error) {
	if err := d.check(ctx); err != nil {
		return nil, err
	}

	select {
	case d.turns[n] <- struct{}{}:
	default:
		return nil, nil
	}

	g, err := d.tryFlock(n)
	if g == nil {
		<-d.turns[n]
	}
	return g, err
}

// tryFlock locks the file of guard n, or returns nil, nil if another process has locked it. The
// caller has this process's turn, which passes to the guard.
func (d *driver) tryFlock(n int) (*guard, error) {
	path := d.guardFile("guard", n)
	// Do not pass O_CREATE, because ensureFile creates the file with the right mode. Open the file
	// for writing, because some systems require that for an exclusive lock.
	l := flock.New(path, flock.SetFlag(os.O_RDWR|openFlags))
	ok, err := l.TryLock()
	if errors.Is(err, fs.ErrNotExist) {
		if err = d.ensureFile(path, nil); err == nil {
			ok, err = l.TryLock()
		}
	}
	if err != nil {
		return nil, explainOpen(path, err)
	}
	if !ok {
		return nil, nil
	}

	same, err := locksFileAt(l, path)
	if err != nil || !same {
		// If there is no error, the file was removed between the open and the lock. In that case
		// the caller tries again, and locks the new file.
		_ = l.Unlock()
		return nil, err
	}
	return &guard{d: d, n: n, lock: l}, nil
}

// locksFileAt reports whether l has locked the file that now has the given path. If the locked file
// is not a regular file, the error says so.
func locksFileAt(l *flock.Flock, path string) (bool, error) {
	locked, err := l.Stat()
	if err != nil {
		return false, err
	}
	if !locked.Mode().IsRegular() {
		return false, kindError(path, locked)
	}
	atPath, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(locked, atPath), err
}

// The method drop unlocks the guard, and then gives up this process's turn. In the other order, the
// next goroutine could find the file still locked, and would sleep.
func (g *guard) drop() {
	_ = g.lock.Unlock() // does not fail, because the descriptor is open
	<-g.d.turns[g.n]
}

// guardBusy returns the error of a call whose ctx ended before the call had locked guard n.
func (d *driver) guardBusy(ctx context.Context, n int, start time.Time) error {
	path := d.guardFile("guard", n)
	return fmt.Errorf("%s: this file was locked by others for %v; if a process is stopped, continue or end it (fuser %[1]s names it); the disk may be slow: %[3]w",
		path, time.Since(start).Round(time.Millisecond), context.Cause(ctx))
}
