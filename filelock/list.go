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

// named returns the record in the file with that name, or nil if the file has no valid record.
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

// recordIn does what named does, without the guard.
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

// mayBegin reports whether the file with that name may have the record of a key that begins with
// prefix. If the key is long, its file's name does not tell.
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
