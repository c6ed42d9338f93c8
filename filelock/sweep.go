package filelock

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	sweepFiles = 1000      // looked at in one sweep
	sweepAge   = time.Hour // past the end of the term; until then the file tells who died
)

// sweep removes records whose terms ended long ago: those of holders that
// died with keys that no caller asked for again. It also removes the temporary
// files of processes that died while they made a file. If sweep cannot remove a
// file, it leaves the file; a call that needs the file reports the error.
func (d *Driver) sweep(ctx context.Context) {
	dir, err := os.Open(d.dir)
	if err != nil {
		return
	}
	defer dir.Close()
	es, _ := dir.ReadDir(sweepFiles)
	for _, e := range es {
		if ctx.Err() != nil {
			return
		}
		path := filepath.Join(d.dir, e.Name())
		if strings.HasPrefix(e.Name(), probePrefix) || strings.HasPrefix(e.Name(), newPrefix) {
			// A process that still needs the file makes another.
			if fi, err := e.Info(); err == nil && d.clock().wall.Sub(fi.ModTime()) > sweepAge {
				os.Remove(path)
			}
			continue
		}
		if !strings.HasSuffix(e.Name(), ".lock") {
			continue
		}
		b, _, err := readFile(path)
		if err != nil {
			continue
		}
		r, err := decode(b)
		if err == nil && stateName(r.key) == e.Name() && r.left(d.clock()) < -sweepAge {
			d.forget(ctx, r.key)
		}
	}
}

// forget removes the record of key if it holds nothing, as whoever takes the
// key next would.
func (d *Driver) forget(ctx context.Context, key string) {
	g, err := d.try(ctx, stripeOf(key))
	if g == nil || err != nil {
		return
	}
	defer g.drop()
	if r, err := d.load(key, d.clock()); r == nil && err == nil {
		os.Remove(d.path(key))
	}
}
