package filelock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"time"
)

// A fence is max(microseconds of the wall clock, last of the stripe + 1). It
// must grow over releases, expiry and kills, and over power failures of a
// machine whose clock starts in 1970. Only the disk survives the latter, and
// to flush it costs hundreds of microseconds to many milliseconds, which no
// call should spend under a guard that others need. So two files share the
// work:
//
//   - "fence" has the ceiling: no fence above it was ever given. It is raised
//     by a minute at a time, on the disk before a fence below it is given,
//     hence twice a minute at most for all keys together. It also has the
//     floor, which is the ceiling as this boot found it: every fence of an
//     earlier boot is below.
//   - Each stripe's file has the last fence of the stripe. It is written
//     under the stripe's guard, before the record that bears the fence, and
//     not flushed: the next process reads it from the page cache, and with
//     the boot it loses its meaning. A stripe that gave none in this boot
//     begins at the floor; one whose file is damaged, at the ceiling.
//
// Where boots have no identifier nothing that was not flushed counts: each
// fence is the new ceiling, and waits for the disk.

// ceiling is what the file "fence" says.
type ceiling struct {
	boot  string // in which it was raised last
	floor uint64 // no fence of an earlier boot is above
	top   uint64 // no fence is above
}

// fenceReserve is how far the ceiling is raised above the fence in need, in
// fences and so in microseconds.
const fenceReserve = uint64(time.Minute / time.Microsecond)

const ceilingHeader = "hasp filelock fence 1\n"

var errCeiling = errors.New("not the file in which filelock keeps its fences")

// micros is the least fence of now.
func micros(now instant) uint64 { return uint64(max(now.wall.UnixMicro(), 0)) }

// reserve raises the ceiling above the fences of the next half a minute, if
// it is not there. It is called without a stripe's guard, so that those who
// need the guard do not wait for the disk.
func (d *Driver) reserve(ctx context.Context, now instant) error {
	if now.boot == "" {
		return nil
	}
	return d.raise(ctx, now, micros(now)+fenceReserve/2, fenceReserve/2)
}

// raise raises the ceiling to least and reserve more, unless it is at least
// already.
func (d *Driver) raise(ctx context.Context, now instant, least, reserve uint64) error {
	// What this process saw on the disk once stands: a ceiling only grows.
	if c := d.ceiling.Load(); c.boot == now.boot && c.top >= least {
		return nil
	}
	g, err := d.take(ctx, fenceGuard)
	if err != nil {
		return err
	}
	defer g.drop()
	c, err := d.readCeiling()
	if err != nil {
		return err
	}
	if c.boot != now.boot || c.top < least {
		if c.boot != now.boot {
			c.boot, c.floor = now.boot, c.top
		}
		c.top = max(least, c.top) + reserve
		content := seal(fmt.Appendf(nil, ceilingHeader+"boot %+q\nfloor %d\ntop %d\n", c.boot, c.floor, c.top))
		if err := d.replace(d.ceilingPath(), d.name("temp", fenceGuard), content, true); err != nil {
			return err
		}
	}
	// Also if another process wrote it, which may have died before this line.
	if err := syncDir(d.dir); err != nil {
		return err
	}
	d.ceiling.Store(&c)
	return nil
}

func (d *Driver) ceilingPath() string { return filepath.Join(d.dir, "fence") }

// readCeiling returns the ceiling. The file is flushed before it gets its
// name, so no crash damages it; one that cannot be read was damaged otherwise,
// and a guess might be too small.
func (d *Driver) readCeiling() (ceiling, error) {
	path := d.ceilingPath()
	b, _, err := readFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return *d.ceiling.Load(), nil
	}
	if err != nil {
		return ceiling{}, err
	}
	body, err := unseal(b, ceilingHeader, errCeiling)
	var c ceiling
	p := fields{rest: body}
	p.text("boot", &c.boot)
	p.unsigned("floor", &c.floor)
	p.unsigned("top", &c.top)
	if err == nil && (p.bad || p.rest != "" || c.floor > c.top) {
		err = errCeiling
	}
	if err != nil {
		return ceiling{}, fmt.Errorf("%s: %w (no fence is given until the file is removed, which is safe unless the clock was set back)", path, err)
	}
	return c, nil
}

// draw returns a fence above all that were given to keys of the stripe. When
// it returns, that holds for whoever draws next, also after a crash.
func (g *guard) draw(ctx context.Context, now instant) (uint64, error) {
	last, err := g.last(now)
	if err != nil {
		return 0, err
	}
	fence, reserve := max(micros(now), last+1), fenceReserve
	if now.boot == "" {
		reserve = 0
	}
	if err := g.d.raise(ctx, now, fence, reserve); err != nil {
		return 0, err
	}
	// Overwritten in place: who is killed here leaves a line that does not
	// match its sum, for which the ceiling then stands.
	_, err = g.stripe.WriteAt(fenceLine{fence, now.boot}.encode(), int64(pidLen))
	return fence, err
}

// last returns a number that is not below any fence of the stripe.
func (g *guard) last(now instant) (uint64, error) {
	line, whole := g.readLast()
	if whole && line.boot == now.boot && now.boot != "" {
		return line.fence, nil
	}
	c := *g.d.ceiling.Load()
	earlier := line == fenceLine{} || line.boot != "" // a boot that is over, if not this one
	if whole && earlier && c.boot == now.boot && now.boot != "" {
		return c.floor, nil
	}
	c, err := g.d.readCeiling()
	return c.top, err
}

// fenceLine is the second line of the stripe's file; zero if there is none.
type fenceLine struct {
	fence uint64
	boot  string
}

func (l fenceLine) encode() []byte {
	return seal(fmt.Appendf(nil, "fence %020d boot %+q ", l.fence, l.boot))
}

// readLast reads the line, and reports whether it was written whole.
func (g *guard) readLast() (line fenceLine, whole bool) {
	b := make([]byte, 256)
	n, _ := g.stripe.ReadAt(b, int64(pidLen))
	if n == 0 {
		return line, true
	}
	got, _, _ := strings.Cut(string(b[:n]), "\n")
	if _, err := fmt.Sscanf(got, "fence %d boot %q ", &line.fence, &line.boot); err != nil {
		return line, false
	}
	return line, got+"\n" == string(line.encode())
}
