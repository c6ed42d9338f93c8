package filelock

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	sweepFiles = 256  // how many files one sweep checks
	sweepEvery = 128  // how many keys a driver takes between two sweeps
	openFiles  = 1000 // how many files Open by URL sweeps
)

// sweeper removes the records whose terms have ended, and temporary files that were left behind.
// Each sweep checks some files, and the next sweep goes on where it has ended.
type sweeper struct {
	folder folder
	guards *guards
	clock  clock

	taken  atomic.Uint64 // how many times the driver has tried to take a key
	closed atomic.Bool

	mu  sync.Mutex // held during a sweep; guards dir
	dir *os.File   // the open directory that the next sweep continues to read, or nil
}

// beforeKey sweeps before the driver takes its first key, and before each 128th key (sweepEvery)
// after that. A sweep checks twice as many files as the driver has created since the last sweep, so
// at most about half of the files contain expired records.
func (s *sweeper) beforeKey(ctx context.Context) {
	if s.taken.Add(1)%sweepEvery == 1 {
		s.sweep(ctx, sweepFiles)
	}
}

// sweep checks the next n files of the directory, and removes records whose terms have ended. It
// ignores an error of a file, because a later call that needs the file reports that error.
func (s *sweeper) sweep(ctx context.Context, n int) {
	if !s.mu.TryLock() {
		return // another call of this driver sweeps
	}
	defer func() {
		s.mu.Unlock()
		if s.closed.Load() {
			s.closeDir() // the method close may have left that to this sweep, which had mu
		}
	}()

	if s.mustEnd(ctx) {
		return
	}
	if s.dir == nil {
		var err error
		if s.dir, err = os.Open(s.folder.path); err != nil {
			return
		}
	}

	names, err := s.dir.Readdirnames(n)
	for _, name := range names {
		if s.mustEnd(ctx) {
			break
		}
		s.checkFile(name)
	}

	if err != nil || len(names) < n { // the directory has no more names, or cannot be read
		s.dir.Close()
		s.dir = nil
	}
}

// mustEnd reports whether a sweep must end before it has checked all its files.
func (s *sweeper) mustEnd(ctx context.Context) bool { return ctx.Err() != nil || s.closed.Load() }

// checkFile removes the file with that name if it is a record whose term has ended, or a temporary
// file whose process has probably died.
func (s *sweeper) checkFile(name string) {
	if strings.HasPrefix(name, tempPrefix) {
		removeLeftover(filepath.Join(s.folder.path, name))
	}
	if !strings.HasSuffix(name, suffix) {
		return // not a record
	}

	r, err := s.folder.recordIn(name)
	if r != nil && err == nil && r.rest(s.clock()) <= 0 {
		s.removeExpired(r.key)
	}
}

// removeLeftover removes a temporary file whose process has probably died. A process that is only
// slow gets an error when it gives the file its final name.
func removeLeftover(path string) {
	fi, err := os.Lstat(path)
	if err == nil && time.Since(fi.ModTime()) > time.Hour {
		os.Remove(path)
	}
}

// removeExpired removes the record of the given key if the term of that record has ended.
func (s *sweeper) removeExpired(key string) {
	g, err := s.guards.try(stripeOf(key))
	if g == nil || err != nil {
		return // the guard is in use, so leave the record to a later sweep
	}
	defer g.unlock()

	// Read the record again under the guard, because another process may have just taken the key.
	// The method load returns nil for a record whose term has ended.
	if r, err := s.folder.load(key, s.clock()); r == nil && err == nil {
		os.Remove(s.folder.recordFile(key))
	}
}

// close makes a sweep that runs end soon, and every later one return at once.
func (s *sweeper) close() {
	s.closed.Store(true)
	s.closeDir()
}

// closeDir closes the directory that the next sweep would continue to read. If a sweep runs,
// closeDir does nothing, because the sweep may hang in the file system. That sweep calls closeDir
// at its end.
func (s *sweeper) closeDir() {
	if s.mu.TryLock() {
		s.dir.Close() // returns an error if the directory is nil
		s.dir = nil
		s.mu.Unlock()
	}
}
