package filelock

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Bounds of a sweep.
const (
	sweepFiles = 1000      // how many files one sweep checks
	sweepAge   = time.Hour // how long a file is kept: it tells people which holder died
)

// sweep removes two kinds of files that are older than sweepAge. The first are
// records of holders that died, if no caller has asked for the key since. The
// second are temporary files of processes that died. If sweep cannot remove a file,
// it leaves the file. A call that needs the file reports the error.
func (d *Driver) sweep(ctx context.Context) {
	dir, err := os.Open(d.dir)
	if err != nil {
		return
	}
	defer dir.Close()
	entries, _ := dir.ReadDir(sweepFiles)
	for _, e := range entries {
		if ctx.Err() != nil {
			return
		}
		d.sweepFile(ctx, e)
	}
}

func (d *Driver) sweepFile(ctx context.Context, e os.DirEntry) {
	path := filepath.Join(d.dir, e.Name())
	if strings.HasPrefix(e.Name(), probePrefix) || strings.HasPrefix(e.Name(), newPrefix) {
		// If the process was only stopped, it notices that the file is missing.
		if fi, err := e.Info(); err == nil && d.clock().wall.Sub(fi.ModTime()) > sweepAge {
			os.Remove(path)
		}
		return
	}

	if !strings.HasSuffix(e.Name(), ".lock") {
		return
	}
	b, _, err := readFile(path)
	if err != nil {
		return
	}
	r, err := decode(b)
	if err == nil && stateName(r.key) == e.Name() && r.left(d.clock()) < -sweepAge {
		d.removeExpired(ctx, r.key)
	}
}

// removeExpired removes the record of key if its term has ended.
func (d *Driver) removeExpired(ctx context.Context, key string) {
	g, err := d.tryGuard(ctx, stripeOf(key))
	if g == nil || err != nil {
		return
	}
	defer g.drop()

	// The record was read without the guard. Another process may have taken the key
	// since.
	if r, err := d.load(key, d.clock()); r == nil && err == nil {
		os.Remove(d.path(key))
	}
}
