package filelock

import (
	"context"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"iter"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

// listFiles is how many names List reads from the directory at a time.
const listFiles = 256

// List yields the keys whose records are in the directory, in no particular order. It leaves out
// damaged and foreign files, although they may block keys. If the directory does not exist, List
// yields no key.
func (d *driver) List(ctx context.Context, prefix string, timeout time.Duration) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		if err := d.listDir(ctx, prefix, timeout, func(e backend.Entry) bool { return yield(e, nil) }); err != nil {
			yield(backend.Entry{}, d.explain(err))
		}
	}
}

func (d *driver) listDir(ctx context.Context, prefix string, timeout time.Duration, f func(backend.Entry) bool) error {
	if err := d.check(ctx); err != nil {
		return err
	}
	dir, err := os.Open(d.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()

	for {
		names, err := dir.Readdirnames(listFiles)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, name := range names {
			if !mayBegin(name, prefix) {
				continue
			}
			if err := d.check(ctx); err != nil {
				return err
			}
			r, err := d.named(ctx, name, timeout)
			if err != nil {
				return err
			}
			now := d.clock()
			if r == nil || !strings.HasPrefix(r.key, prefix) || r.left(now) <= 0 {
				continue
			}
			if !f(backend.Entry{Key: r.key, Status: r.status(now)}) {
				return nil
			}
		}
	}
}

// The method named returns the record in the given file, or nil if that file has no valid record.
func (d *driver) named(ctx context.Context, name string, timeout time.Duration) (*record, error) {
	if !readsNeedNoGuard {
		stripe, ok := stripeOfName(name)
		if !ok {
			return nil, nil
		}
		within, cancel := withTimeout(ctx, timeout)
		defer cancel()
		g, err := d.lockGuard(within, stripe)
		if err != nil {
			return nil, err
		}
		defer g.drop()
	}

	return d.recordIn(name)
}

// recordIn does what the method named does, but without the guard.
func (d *driver) recordIn(name string) (*record, error) {
	b, _, err := readFile(filepath.Join(d.dir, name))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errNotFile) {
		return nil, nil // the file was removed meanwhile, or is no record
	}
	if err != nil {
		return nil, err
	}
	r, err := decode(b)
	if err != nil || stateName(r.key) != name {
		return nil, nil
	}
	return r, nil
}

// mayBegin reports whether the file with that name may contain the record of a key that begins with
// prefix. If the key is long, the name does not show how the key begins, and mayBegin returns true.
func mayBegin(name, prefix string) bool {
	if escaped, ok := strings.CutPrefix(name, plainPrefix); ok {
		return strings.HasSuffix(name, suffix) && strings.HasPrefix(escaped, escape(prefix))
	}
	return strings.HasPrefix(name, sumPrefix) && strings.HasSuffix(name, suffix)
}

// stripeOfName returns the stripe of a key, given the name of the key's state file.
func stripeOfName(name string) (stripe int, ok bool) {
	name, _ = strings.CutSuffix(name, suffix)
	if sum, ok := strings.CutPrefix(name, sumPrefix); ok {
		b, err := hex.DecodeString(sum)
		if err != nil || len(b) == 0 {
			return 0, false
		}
		return int(b[0] % stripes), true
	}

	key, err := url.PathUnescape(strings.TrimPrefix(name, plainPrefix))
	return stripeOf(key), err == nil
}

const (
	sweepFiles = 256  // how many files one sweep checks
	sweepEvery = 128  // how many keys a driver takes between two sweeps
	openFiles  = 1000 // how many files Open by URL sweeps
)

// sweepOften calls the method sweep before d takes its first key, and before each 128th key
// (sweepEvery) after that. A sweep checks twice as many files as d has created since the last
// sweep, so at most about half of the files contain expired records.
func (d *driver) sweepOften(ctx context.Context) {
	if d.taken.Add(1)%sweepEvery == 1 {
		d.sweep(ctx, sweepFiles)
	}
}

// sweep checks the next n files of the directory, and removes records whose terms have ended. It
// ignores an error of a file, because a later call that needs the file reports that error.
func (d *driver) sweep(ctx context.Context, n int) {
	if !d.sweeping.TryLock() {
		return // another call of this driver sweeps
	}
	defer func() {
		d.sweeping.Unlock()
		if d.closed.Load() {
			d.closeDir()
		}
	}()

	if d.check(ctx) != nil {
		return
	}
	if d.unswept == nil {
		var err error
		if d.unswept, err = os.Open(d.dir); err != nil {
			return
		}
	}

	names, err := d.unswept.Readdirnames(n)
	for _, name := range names {
		if ctx.Err() != nil {
			break
		}
		if strings.HasPrefix(name, tempPrefix) {
			removeLeftover(filepath.Join(d.dir, name))
		}
		if !strings.HasSuffix(name, suffix) {
			continue
		}
		if r, err := d.recordIn(name); r != nil && err == nil && r.left(d.clock()) <= 0 {
			d.removeExpired(ctx, r.key)
		}
	}
	if err != nil || len(names) < n {
		d.unswept.Close()
		d.unswept = nil
	}
}

// removeLeftover removes a temporary file whose process has probably died. A process that is only
// slow gets an error when it gives the file its final name.
func removeLeftover(path string) {
	if fi, err := os.Lstat(path); err == nil && time.Since(fi.ModTime()) > time.Hour {
		os.Remove(path)
	}
}

// removeExpired removes the record of the given key if the term of that record has ended.
func (d *driver) removeExpired(ctx context.Context, key string) {
	g, err := d.tryGuard(ctx, stripeOf(key))
	if g == nil || err != nil {
		return
	}
	defer g.drop()

	// Read the record again under the guard, because another process may have just taken the key.
	if r, err := d.load(key, d.clock()); r == nil && err == nil {
		os.Remove(d.path(key))
	}
}
