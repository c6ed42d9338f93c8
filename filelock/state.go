package filelock

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/hasplock/hasp/backend"
)

// path is the state file of key.
func (d *Driver) path(key string) string { return filepath.Join(d.dir, stateName(key)) }

// load returns the record that holds key, or nil if nobody does: there is
// none, or its term has ended. Whatever else the state file is, is an error,
// so that it neither frees the key nor passes for contention.
func (d *Driver) load(key string, now instant) (*record, error) {
	path := d.path(key)
	b, fi, err := readFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if errors.Is(err, errNotFile) {
		return nil, stuck(err)
	}
	if err != nil {
		return nil, err
	}
	r, err := decode(b)
	switch {
	case errors.Is(err, errTorn) && leftover(fi, now):
		return nil, nil
	case err == nil && r.key != key:
		err = fmt.Errorf("a record of another key, %+q", r.key)
		fallthrough
	case err != nil:
		return nil, stuck(fmt.Errorf("%s: %w", path, err))
	}
	if r.left(now) <= 0 {
		return nil, nil
	}
	return r, nil
}

// stuck says what to do about a state file that is not a record of its key.
func stuck(err error) error {
	return fmt.Errorf("%w (nobody gets this key until the file is removed, by break or by hand)", err)
}

// leftover reports whether a torn record is what a power failure left. A
// record is whole before it bears its name, but it is not flushed: a kernel
// that stopped at once may have saved the name and not the content. All
// holders ended with that kernel, so a torn record that was last written
// before this boot holds nothing. Any other torn record was damaged by
// somebody, and may be held.
func leftover(fi fs.FileInfo, now instant) bool {
	const slack = time.Second // the coarseness of file times, and more
	return now.clock != "" && fi.ModTime().Add(slack).Before(now.started())
}

// store makes r the record of its key.
func (g *guard) store(r *record) error {
	b := r.encode()
	if len(b) > maxRecord {
		return fmt.Errorf("%w: key of %d bytes, owner of %d: the record would be longer than %d bytes",
			backend.ErrInvalid, len(r.key), len(r.owner), maxRecord)
	}
	return g.d.replace(g.d.path(r.key), g.d.name("temp", g.n), b, false)
}

// refusal is what the next one hears while r holds the key.
func (r *record) refusal(now instant) error {
	return &backend.HeldError{RetryAfter: r.left(now), Owner: r.owner}
}
