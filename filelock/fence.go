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
	"strings"
	"time"
)

// A fence is the larger of two numbers: the wall clock in microseconds, and the last fence of the
// stripe + 1. Fences must grow across releases, expiries and kills, and across power failures of a
// machine whose clock starts in 1970. After a power failure only flushed data is left. But a flush
// may take many milliseconds, and calls of other keys should not wait for it. So two files share
// the work:
//
//   - "fence" has the ceiling: no fence above it was ever given. The ceiling is raised by a minute
//     at a time, and flushed before a fence below it is given. So there are at most two flushes a
//     minute for all keys together. The file also has the floor, which is the ceiling at the start
//     of this boot: no fence of an earlier boot is above the floor.
//   - Each stripe's file has the last fence of the stripe. It is written under the stripe's guard,
//     before the record that has the fence. It is not flushed, so it counts only in this boot, while
//     processes read it from the page cache. If the stripe gave no fence in this boot, its fences
//     begin at the floor. If the file is damaged, they begin at the ceiling.
//
// On platforms where boots have no identifier, only flushed data counts, so each fence is a new
// ceiling and waits for the disk.

// ceiling is the content of the file "fence".
type ceiling struct {
	boot  string // the boot in which the ceiling was last raised
	floor uint64 // no fence of an earlier boot is above floor
	top   uint64 // no fence is above top
}

// fenceReserve is how far the ceiling is raised above the fence that is needed, in microseconds.
const fenceReserve = uint64(time.Minute / time.Microsecond)

const ceilingHeader = "hasp filelock fence 1\n"

var errCeiling = errors.New("not the file in which filelock keeps its fences")

// minFence returns the smallest fence that may be given at now.
func minFence(now instant) uint64 { return uint64(max(now.wall.UnixMicro(), 0)) }

// reserveFences raises the ceiling above the fences of the next half minute. It is called without a
// stripe's guard, so that other callers do not wait for the flush.
func (d *driver) reserveFences(ctx context.Context, now instant) error {
	if now.boot == "" {
		return nil // each fence raises the ceiling itself
	}
	return d.raiseCeiling(ctx, now, minFence(now)+fenceReserve/2, fenceReserve/2)
}

// If the ceiling is below least, raiseCeiling raises it to least + reserve or more.
func (d *driver) raiseCeiling(ctx context.Context, now instant, least, reserve uint64) error {
	// The ceiling was read before, but is still a lower bound, because a ceiling only grows.
	if c := d.ceiling.Load(); c.boot == now.boot && c.top >= least {
		return nil
	}

	g, err := d.lockGuard(ctx, fenceGuard)
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
			// At the first raise of a boot, set floor to top, because all fences so far are of
			// earlier boots.
			c.boot, c.floor = now.boot, c.top
		}
		c.top = max(least, c.top) + reserve
		content := seal(fmt.Appendf(nil, ceilingHeader+"boot %+q\nfloor %d\ntop %d\n", c.boot, c.floor, c.top))
		if err := d.replace(d.ceilingPath(), d.guardFile("temp", fenceGuard), content, true); err != nil {
			return err
		}
	}

	// Make the name durable as well, even if another process wrote the file, because that process
	// may have died before it did so.
	if err := syncDir(d.dir); err != nil {
		return err
	}
	d.ceiling.Store(&c)
	return nil
}

func (d *driver) ceilingPath() string { return filepath.Join(d.dir, "fence") }

// readCeiling returns the ceiling. It fails if the file cannot be read, because a guess might be
// too small. A crash does not damage the file, which is flushed before it has its name.
func (d *driver) readCeiling() (ceiling, error) {
	path := d.ceilingPath()
	b, _, err := readFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return *d.ceiling.Load(), nil // no file yet, or it was removed by hand
	}
	if err != nil {
		return ceiling{}, err
	}

	body, err := unseal(b, ceilingHeader, errCeiling)
	p := fields{rest: body}
	c := ceiling{boot: p.text("boot"), floor: p.unsigned("floor"), top: p.unsigned("top")}
	if err == nil && (!p.complete() || c.floor > c.top) {
		err = errCeiling
	}
	if err != nil {
		return ceiling{}, fmt.Errorf("%s: %w (fences are refused until this file is removed, which is safe unless the clock was set back)", path, err)
	}
	return c, nil
}

// drawFence returns a fence above all earlier fences of the stripe's keys, and below all later
// ones, even after a crash.
func (g *guard) drawFence(ctx context.Context, now instant) (uint64, error) {
	stripe, err := g.openStripe()
	if err != nil {
		return 0, err
	}
	defer stripe.Close()
	last, err := g.lastFence(stripe, now)
	if err != nil {
		return 0, err
	}

	fence, reserve := max(minFence(now), last+1), fenceReserve
	if now.boot == "" {
		reserve = 0
	}
	if err := g.d.raiseCeiling(ctx, now, fence, reserve); err != nil {
		return 0, err
	}

	// The line is overwritten in place. If this process is killed meanwhile, the line has a wrong
	// checksum, and the next process uses the ceiling instead.
	_, err = stripe.WriteAt(fenceLine{fence, now.boot}.encode(), 0)
	return fence, err
}

// lastFence returns the last fence of the stripe, or a number that is not below it.
func (g *guard) lastFence(stripe *os.File, now instant) (uint64, error) {
	line, whole, err := readFenceLine(stripe)
	if err != nil {
		return 0, err
	}
	if whole && line.boot == now.boot && now.boot != "" {
		return line.fence, nil
	}

	// If the stripe gave no fence in this boot, the floor is enough. A line without an identifier
	// of a boot may be of this boot.
	c := *g.d.ceiling.Load()
	ofEarlierBoot := line == fenceLine{} || line.boot != ""
	if whole && ofEarlierBoot && c.boot == now.boot && now.boot != "" {
		return c.floor, nil
	}
	c, err = g.d.readCeiling()
	return c.top, err
}

func (g *guard) openStripe() (f *os.File, err error) {
	path := g.d.guardFile("stripe", g.n)
	err = g.d.withFile(path, func() (err error) {
		f, err = openFile(path, os.O_RDWR, 0)
		return err
	})
	return f, err
}

// fenceLine is the content of the stripe's file. It is zero if the file is empty.
type fenceLine struct {
	fence uint64 // the last fence of the stripe
	boot  string // the boot in which it was given; empty if boots have no identifier
}

func (l fenceLine) encode() []byte {
	return seal(fmt.Appendf(nil, "fence %020d boot %+q ", l.fence, l.boot))
}

// maxStripe is larger than any stripe's file, which has one line.
const maxStripe = 512

var errStripe = errors.New("not the file in which filelock keeps a stripe's last fence")

// readFenceLine returns the line, and whether it is whole. Only this file is changed in place, so a
// foreign file with its name is refused: it may be a hard link to a file that has another name
// elsewhere.
func readFenceLine(stripe *os.File) (line fenceLine, whole bool, err error) {
	b := make([]byte, maxStripe)
	n, err := stripe.ReadAt(b, 0)
	if err != nil && err != io.EOF {
		return line, false, err
	}
	if n == 0 {
		return line, true, nil // no fence was given yet
	}

	// A full disk may leave a part of the line. A power failure may leave zeros.
	const word = "fence "
	text := string(bytes.TrimRight(b[:n], "\x00"))
	if n == maxStripe || !strings.HasPrefix(text, word) && !strings.HasPrefix(word, text) {
		return line, false, fmt.Errorf("%s: %w (its keys get no fence until this file is removed)", stripe.Name(), errStripe)
	}
	text, _, _ = strings.Cut(text, "\n")
	if _, err := fmt.Sscanf(text, "fence %d boot %q ", &line.fence, &line.boot); err != nil {
		return line, false, nil
	}
	return line, text+"\n" == string(line.encode()), nil
}
