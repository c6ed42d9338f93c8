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
// died with keys nobody asked for again. What cannot be swept is left for
// another time, and for the call that needs it to complain about.
func (d *Driver) sweep(ctx context.Context) {
	dir, err := os.Open(d.dir)
	if err != nil {
		return
	}
	defer dir.Close()
	es, _ := dir.ReadDir(sweepFiles)
	for _, e := range es {
		if !strings.HasSuffix(e.Name(), ".lock") || ctx.Err() != nil {
			continue
		}
		b, _, err := readFile(filepath.Join(d.dir, e.Name()))
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
