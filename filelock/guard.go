package filelock

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/gofrs/flock"
)

// guard is the right to change the records of one stripe of the keys, among all
// processes of the host. It is a flock(2) of the kernel, which ends when the
// process dies.
//
// The guard's file is never removed. Otherwise a process could lock the old file, which it has
// open, while another locks a new one. The pid and the last fence are in a second file, the
// stripe's, for two reasons. Some platforms do not let other processes read a locked file. Some end
// the lock when the process closes any descriptor of the file.
type guard struct {
	d      *driver
	n      int          // which guard: a stripe, or fenceGuard
	lock   *flock.Flock // the guard's file, locked
	stripe *os.File     // the stripe's file; nil until openStripe
}

// fenceGuard is the number of the guard of the file "fence".
const fenceGuard = stripes

// guardFile returns the path of a file of guard n. Kind is guard, stripe or temp.
func (d *driver) guardFile(kind string, n int) string {
	if n == fenceGuard {
		return filepath.Join(d.dir, kind+"-fence")
	}
	return filepath.Join(d.dir, fmt.Sprintf("%s-%02x", kind, n))
}

// The sleep between two tries to lock a guard doubles from firstPoll to lastPoll.
const (
	firstPoll = 20 * time.Microsecond
	lastPoll  = 5 * time.Millisecond
)

// lockGuard blocks until it has guard n or ctx ends. It polls, because a call that
// blocks in the kernel cannot be cancelled. A guard is held for about ten
// microseconds, or for one flush of the disk.
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
			return g, nil // the guard keeps the turn until drop
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
// caller has this process's turn, which the guard takes over.
func (d *driver) tryFlock(n int) (*guard, error) {
	path := d.guardFile("guard", n)
	var l *flock.Flock
	var ok bool
	err := d.withFile(path, func() (err error) {
		// Do not pass O_CREATE, because ensureFile creates the file with the right mode. Open for
		// writing, which some systems require for an exclusive lock.
		l = flock.New(path, flock.SetFlag(os.O_RDWR|openFlags))
		if ok, err = l.TryLock(); err != nil {
			err = explainOpen(path, err)
		}
		return err
	})
	if err != nil || !ok {
		return nil, err
	}

	g := &guard{d: d, n: n, lock: l}
	same, err := locksFileAt(l, path)
	if err == nil && same {
		err = g.openStripe()
	}
	if err != nil || !same {
		// If err is nil, the file was removed between open and lock. The caller then tries again,
		// and locks the new file.
		g.unlock()
		return nil, err
	}
	return g, nil
}

// locksFileAt reports whether l has locked the file that is at path now. It returns an error if l's
// file is not a regular one.
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

// pidLine is the first line of the stripe's file. Its length does not depend on the
// pid, because the fence line follows at a fixed offset.
const pidLine = "pid %-10d\n"

var pidLen = len(fmt.Sprintf(pidLine, 0))

// maxStripe is larger than any stripe's file, which has two lines.
const maxStripe = 512

// openStripe opens the stripe's file and writes the pid into it, which callers that time out name
// in their error. That costs one write into the page cache. /proc/locks would cost nothing, but
// exists on Linux only, and its file numbers are wrong on the overlay file systems of containers.
func (g *guard) openStripe() error {
	path := g.d.guardFile("stripe", g.n)
	err := g.d.withFile(path, func() (err error) {
		g.stripe, err = openFile(path, os.O_RDWR, 0)
		return err
	})
	if err != nil {
		return err
	}

	// Refuse a foreign file of this name, because this is the only file that is changed in place,
	// and a hard link may have its other name elsewhere.
	b := make([]byte, maxStripe)
	n, err := g.stripe.ReadAt(b, 0)
	if err != nil && err != io.EOF {
		return err
	}
	if !ofStripe(b[:n]) {
		return fmt.Errorf("%s: %w (the keys of its stripe are blocked until this file is removed)", path, errStripe)
	}

	// Ignore the error of a full disk: the guard works without the pid, and a release needs no
	// room.
	if pid := fmt.Appendf(nil, pidLine, os.Getpid()); !bytes.HasPrefix(b, pid) {
		_, _ = g.stripe.WriteAt(pid, 0)
	}
	return nil
}

var errStripe = errors.New("not the file in which filelock keeps a stripe's last fence")

// ofStripe reports whether b can be the content of a stripe's file. A new file is empty. After a
// full disk, the pid line before the fence line may be incomplete or missing. A power failure may
// leave zeros.
func ofStripe(b []byte) bool {
	begins := func(b []byte, word string) bool {
		text := string(bytes.TrimRight(b, "\x00"))
		return strings.HasPrefix(text, word) || strings.HasPrefix(word, text)
	}
	n := min(len(b), pidLen)
	pid, fence := b[:n], b[n:]
	return len(b) < maxStripe && (bytes.HasPrefix(pid, []byte("pid ")) || begins(pid, "pid ") && begins(fence, "fence "))
}

// drop unlocks the guard, and then gives up this process's turn. In the other order the next
// goroutine would find the file locked and sleep.
func (g *guard) drop() {
	g.unlock()
	<-g.d.turns[g.n]
}

func (g *guard) unlock() {
	if g.stripe != nil {
		g.stripe.Close()
	}
	_ = g.lock.Unlock() // does not fail: the descriptor is open
}

// guardBusy returns the error of a call whose ctx ended before it got guard n.
func (d *driver) guardBusy(ctx context.Context, n int, start time.Time) error {
	holder := "another process"
	if b, _, err := readFile(d.guardFile("stripe", n)); err == nil {
		line, _, _ := bytes.Cut(b, []byte("\n"))
		if pid, err := strconv.Atoi(string(bytes.TrimSpace(bytes.TrimPrefix(line, []byte("pid "))))); err == nil {
			holder = fmt.Sprintf("process %d", pid) // perhaps this one
		}
	}
	return fmt.Errorf("%s: locked by %s for %v; if it is stopped, continue or end it; the disk may be slow: %w",
		d.guardFile("guard", n), holder, time.Since(start).Round(time.Millisecond), context.Cause(ctx))
}
