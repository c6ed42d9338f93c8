package filelock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/gofrs/flock"

	"github.com/hasplock/hasp/backend"
)

// The sleep between two tries to lock a guard doubles from firstPoll to lastPoll.
const (
	firstPoll = 20 * time.Microsecond
	lastPoll  = 5 * time.Millisecond
)

// guards are the guards of a folder's stripes.
type guards struct {
	folder folder

	// turns contains a channel for each guard. Who has sent a value to the channel has this
	// process's turn. The channel has room for one value, so only one goroutine of this process
	// polls the guard's file.
	turns [stripes]chan struct{}
}

func newGuards(f folder) *guards {
	gs := &guards{folder: f}
	for i := range gs.turns {
		gs.turns[i] = make(chan struct{}, 1)
	}
	return gs
}

// lock blocks until it has guard n or ctx ends. It polls the file, because a call that blocks in
// the kernel cannot be cancelled. A guard is usually held for tens of microseconds, so the first
// sleep is short.
func (gs *guards) lock(ctx context.Context, n int) (*guard, error) {
	start := time.Now()
	select {
	case gs.turns[n] <- struct{}{}:
	case <-ctx.Done():
		return nil, gs.busy(ctx, n, start)
	}

	for delay := firstPoll; ; delay = min(2*delay, lastPoll) {
		g, err := gs.tryFlock(n)
		if g != nil {
			return g, nil // the guard has the turn until a call of the method unlock
		}
		if err != nil {
			<-gs.turns[n]
			return nil, err
		}

		select {
		case <-time.After(delay):
		case <-ctx.Done():
			<-gs.turns[n]
			return nil, gs.busy(ctx, n, start)
		}
	}
}

// try locks guard n if it is free. Otherwise it returns nil, nil.
func (gs *guards) try(n int) (*guard, error) {
	select {
	case gs.turns[n] <- struct{}{}:
	default:
		return nil, nil
	}

	g, err := gs.tryFlock(n)
	if g == nil {
		<-gs.turns[n]
	}
	return g, err
}

// tryFlock locks the file of guard n, or returns nil, nil if another process has locked it. The
// caller has this process's turn, which passes to the guard.
func (gs *guards) tryFlock(n int) (*guard, error) {
	path := gs.folder.guardFile(n)
	// Do not pass O_CREATE, because ensureFile creates the file with the right mode. Open the file
	// for writing, because some systems require that for an exclusive lock.
	l := flock.New(path, flock.SetFlag(os.O_RDWR|openFlags))
	locked, err := l.TryLock()
	if errors.Is(err, fs.ErrNotExist) {
		err = gs.folder.ensureFile(path, nil)
		if err == nil {
			locked, err = l.TryLock()
		}
	}
	if err != nil {
		return nil, explainOpen(path, err)
	}
	if !locked {
		return nil, nil
	}

	isCurrent, err := locksFileAt(l, path)
	if err != nil || !isCurrent {
		// If there is no error, the file was removed between the open and the lock. In that case
		// the result nil, nil makes the caller try again, and it locks the new file.
		_ = l.Unlock()
		return nil, err
	}
	return &guard{folder: gs.folder, stripe: n, turn: gs.turns[n], flock: l}, nil
}

// locksFileAt reports whether the file that l has locked still has the given path. If it is not a
// regular file, the error says so.
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
	return os.SameFile(locked, atPath), err // after an error, atPath is nil, and the result is false
}

// busy returns the error of a call that began to wait at start, and whose ctx ended before it had
// locked guard n.
func (gs *guards) busy(ctx context.Context, n int, start time.Time) error {
	path := gs.folder.guardFile(n)
	wait := time.Since(start).Round(time.Millisecond)
	return fmt.Errorf("%s: this file was locked by others for %v; if a process is stopped, "+
		"continue or end it (fuser %[1]s names it); the disk may be slow: %[3]w",
		path, wait, context.Cause(ctx))
}

// guard is the right to change the records of one stripe of the keys. Only one process of the host
// can have it. It is a flock(2) lock, which the kernel ends when the process dies.
//
// The guard's file is never removed. Otherwise a process that had already opened it would lock a
// file without a name, while the next process locks a new file. The last fence is in another file,
// the file of the stripe, because on some platforms the lock ends when the process closes any
// descriptor of the locked file.
type guard struct {
	folder folder
	stripe int
	turn   chan struct{} // this process's turn, which the guard has
	flock  *flock.Flock  // the guard's file, locked
}

// unlock unlocks the guard, and then gives up this process's turn. In the other order, the next
// goroutine could find the file still locked, and would sleep.
func (g *guard) unlock() {
	_ = g.flock.Unlock() // does not fail, because the descriptor is open
	<-g.turn
}

// mine returns the record of a hold that c has not released. If there is none, the error is
// ErrLost.
func (g *guard) mine(c backend.Claim, now instant) (*record, error) {
	r, err := g.folder.load(c.Key, now)
	if err != nil {
		return nil, err
	}
	if r == nil || r.token != c.Token || r.isMinHold {
		return nil, backend.ErrLost
	}
	return r, nil
}

// drawFence returns a fence that is larger than all earlier fences of the stripe's keys, and writes
// it into the stripe's file as the last fence.
func (g *guard) drawFence(now instant) (uint64, error) {
	f, _, err := openFile(g.folder.fenceFile(g.stripe), os.O_RDWR)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	last, err := readFence(f)
	if err != nil {
		return 0, err
	}

	// The file keeps its length, so the write works on a full disk. One short write leaves either
	// the old or the new content.
	fence := max(minFence(now), last+1)
	_, err = f.WriteAt(encodeFence(fence), 0)
	return fence, err
}

// publish writes the record r into the draft f, closes f, and makes it the file of r's key.
func (g *guard) publish(r *record, f *os.File) error {
	_, err := f.WriteAt(r.file(), 0)
	if err := closeAfter(f, err); err != nil {
		return err
	}

	// The old record has expired. Remove it first, because a rename over a file makes ext4 write
	// the new file to the disk immediately (auto_da_alloc), and other processes wait for the guard.
	path := g.folder.recordFile(r.key)
	os.Remove(path) // if there is no old record, this has no effect
	return os.Rename(f.Name(), path)
}

// amend gives the record r, which was read from its file, a term that ends after rest.
func (g *guard) amend(r *record, now instant, rest time.Duration) error {
	r.change++
	r.endIn(now, rest)
	f, _, err := openFile(g.folder.recordFile(r.key), os.O_WRONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return backend.ErrLost // the record was removed by hand a moment ago, without the guard
	}
	if err != nil {
		return err
	}

	// A new file has two copies with change 0. Change 1 goes to the second copy, change 2 to the
	// first one, and so on. So this overwrites the older copy.
	b := r.encode()
	_, err = f.WriteAt(b, int64(r.change%2)*int64(len(b)))
	return closeAfter(f, err)
}
