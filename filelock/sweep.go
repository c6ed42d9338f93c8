package filelock

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	sweepFiles = 256       // how many files one sweep checks
	sweepEvery = 128       // how many keys a driver takes between two sweeps
	openFiles  = 1000      // how many files Open by URL sweeps
	sweepAge   = time.Hour // if a temporary file is older, its process has died
)

// sweepOften calls sweep before d takes its first key, and each sweepEvery-th key after that. A
// sweep checks twice as many files as d has created since the last sweep, so at most about half of
// the files have expired records.
func (d *driver) sweepOften(ctx context.Context) {
	if d.taken.Add(1)%sweepEvery == 1 {
		d.sweep(ctx, sweepFiles)
	}
}

// sweep checks the next n files of the directory. It removes records whose terms have ended, and
// old temporary files of processes that died. It ignores errors: a call that needs the file reports
// them.
func (d *driver) sweep(ctx context.Context, n int) {
	var dir *os.File
	select {
	case dir = <-d.unswept:
	default:
		return // another call of this driver sweeps
	}
	defer func() { d.unswept <- dir }()

	if d.check(ctx) != nil {
		return
	}
	if dir == nil {
		var err error
		if dir, err = os.Open(d.dir); err != nil {
			return
		}
	}

	entries, err := dir.ReadDir(n)
	for _, e := range entries {
		if ctx.Err() != nil {
			break
		}
		d.sweepFile(ctx, e)
	}
	if err != nil || len(entries) < n {
		dir.Close()
		dir = nil
	}
}

func (d *driver) sweepFile(ctx context.Context, e os.DirEntry) {
	path := filepath.Join(d.dir, e.Name())
	if strings.HasPrefix(e.Name(), probePrefix) || strings.HasPrefix(e.Name(), newPrefix) {
		// If the process was only stopped, it gets an error when it goes on, because the file is
		// missing.
		if fi, err := e.Info(); err == nil && d.clock().wall.Sub(fi.ModTime()) > sweepAge {
			os.Remove(path)
		}
		return
	}

	if !strings.HasSuffix(e.Name(), suffix) {
		return
	}
	if r, err := d.recordIn(e.Name()); r != nil && err == nil && r.left(d.clock()) <= 0 {
		d.removeExpired(ctx, r.key)
	}
}

// removeExpired removes the record of key if its term has ended.
func (d *driver) removeExpired(ctx context.Context, key string) {
	g, err := d.tryGuard(ctx, stripeOf(key))
	if g == nil || err != nil {
		return
	}
	defer g.drop()

	// Read the record again under the guard, because another process may have taken the key since.
	if r, err := d.load(key, d.clock()); r == nil && err == nil {
		os.Remove(d.path(key))
	}
}
