package filelock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

func (d *driver) path(key string) string { return filepath.Join(d.dir, stateName(key)) }

// The method load returns the record that holds the key, or nil, nil if there is no record or its
// term has ended. If the state file has no valid record of the key, the error is not ErrHeld,
// because the key is not free, but its holder is not known.
func (d *driver) load(key string, now instant) (*record, error) {
	path := d.path(key)
	b, fi, err := readFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case errors.Is(err, errNotFile):
		return nil, blocksKey(err)
	case err != nil:
		return nil, err
	}

	r, err := decode(b)
	if errors.Is(err, errTorn) && fromBeforeBoot(fi, now) {
		return nil, nil
	}
	if err == nil && r.key != key {
		err = fmt.Errorf("a record of another key, %+q", r.key)
	}
	if err != nil {
		return nil, blocksKey(fmt.Errorf("%s: %w", path, err))
	}

	if r.left(now) <= 0 {
		return nil, nil
	}
	return r, nil
}

// blocksKey adds advice to the error of a state file that is not a record of its key.
func blocksKey(err error) error {
	return fmt.Errorf("%w (the key is blocked until this file is removed, by break or by hand)", err)
}

// fromBeforeBoot reports whether a torn record was written before this boot. If so, a power failure
// has probably left the name without the content, which was not flushed. The holder has ended with
// that boot. A torn record of this boot was damaged in another way, and its key may be held.
func fromBeforeBoot(fi fs.FileInfo, now instant) bool {
	const slack = time.Second // more than the resolution of file times
	return now.boot != "" && fi.ModTime().Add(slack).Before(now.bootTime())
}

// draft creates a temporary file that has the length of the record's file, and the other files that
// the record needs. The caller has no guard yet, because the creation of a file may take long, and
// a process that is stopped meanwhile must not block the keys of a stripe.
func (d *driver) draft(r *record, fenced bool) (*os.File, error) {
	n := stripeOf(r.key)
	err := d.ensureFile(d.guardFile("guard", n), nil)
	if err == nil && fenced {
		err = d.ensureFile(d.guardFile("stripe", n), encodeFence(0))
	}
	if err != nil {
		return nil, err
	}

	b := r.file()
	if len(b) > maxRecord {
		return nil, fmt.Errorf("%w: key of %d bytes, owner of %d: the file would be longer than %d bytes",
			backend.ErrInvalid, len(r.key), len(r.owner), maxRecord)
	}
	return createTemp(d.dir, b)
}

// publish writes the record r into the draft f, and makes f the file of r's key.
func (g *guard) publish(r *record, f *os.File) error {
	_, err := f.WriteAt(r.file(), 0)
	if err := closeAfter(f, err); err != nil {
		return err
	}

	// The old record has expired. Remove it first, because a rename over a file makes ext4 write
	// the new file to the disk immediately (auto_da_alloc), and other processes wait for the guard.
	path := g.d.path(r.key)
	os.Remove(path)
	return os.Rename(f.Name(), path)
}

// amend gives the record r, which was read from its file, a term that ends after left.
func (g *guard) amend(r *record, now instant, left time.Duration) error {
	r.change++
	r.endIn(now, left)
	f, _, err := openFile(g.d.path(r.key), os.O_WRONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return backend.ErrLost // the record was removed by hand a moment ago, without the guard
	}
	if err != nil {
		return err
	}

	// This copy is the older one, because each change goes to the other copy.
	b := r.encode()
	_, err = f.WriteAt(b, int64(r.change%2)*int64(len(b)))
	return closeAfter(f, err)
}

// mine returns the record of a hold that c has not released. If there is none, the error is
// ErrLost.
func (g *guard) mine(c backend.Claim, now instant) (*record, error) {
	r, err := g.d.load(c.Key, now)
	if err == nil && (r == nil || r.token != c.Token || r.kept) {
		err = backend.ErrLost
	}
	return r, err
}

// refusal returns the error of a caller that wants the key while the record r holds it.
func (r *record) refusal(now instant) error {
	return &backend.HeldError{RetryAfter: r.left(now), Owner: r.owner, Waited: r.waited, Kept: r.kept}
}

// Renew prolongs the terms of cs. If another process has a guard, only the claims of that guard's
// stripe wait.
func (d *driver) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	var mu sync.Mutex // held during each call of the function done, so that no two run at a time
	var wg sync.WaitGroup
	for i, c := range cs {
		wg.Go(func() {
			err := d.guarded(ctx, c.Key, c.Timeout, func(g *guard) error { return g.renew(c) })
			mu.Lock()
			defer mu.Unlock()
			done(i, backend.Grant{}, err)
		})
	}
	wg.Wait() // the function done must not be called after Renew has returned
}

func (g *guard) renew(c backend.Claim) error {
	now := g.d.clock()
	r, err := g.mine(c, now)
	if err != nil {
		return err
	}
	if r.left(now) >= c.TTL {
		return nil // the record lasts long enough, and a renewal never shortens a term
	}
	return g.amend(r, now, c.TTL)
}
