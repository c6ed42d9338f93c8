package filelock

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/hasplock/hasp/backend"
)

// folder is the directory of the files. It may not exist yet, and may be removed at any time.
type folder struct {
	path string
	mode fs.FileMode // the mode of the directory, if it has to be created
}

// recordFile returns the path of the record of key.
func (f folder) recordFile(key string) string { return filepath.Join(f.path, stateName(key)) }

// guardFile returns the path of the guard of a stripe.
func (f folder) guardFile(stripe int) string { return f.stripeFile("guard", stripe) }

// fenceFile returns the path of the file that has the last fence of a stripe.
func (f folder) fenceFile(stripe int) string { return f.stripeFile("stripe", stripe) }

func (f folder) stripeFile(kind string, stripe int) string {
	return filepath.Join(f.path, fmt.Sprintf("%s-%02x", kind, stripe))
}

// load returns the record that holds the key, or nil, nil if there is no record or its term has
// ended. If the state file has no valid record of the key, the key is not free, but its holder is
// not known. So load returns an error, which is not ErrHeld.
func (f folder) load(key string, now instant) (*record, error) {
	path := f.recordFile(key)
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
		return nil, nil // a power failure has ended the holder
	}
	if err == nil && r.key != key {
		err = fmt.Errorf("a record of another key, %+q", r.key)
	}
	if err != nil {
		return nil, blocksKey(fmt.Errorf("%s: %w", path, err))
	}

	if r.rest(now) <= 0 {
		return nil, nil
	}
	return r, nil
}

// blocksKey adds advice to the error of a state file that is not a record of its key.
func blocksKey(err error) error {
	return fmt.Errorf("%w (the key is blocked until this file is removed, by break or by hand)", err)
}

// fromBeforeBoot reports whether a torn record was written before this boot. If so, a power failure
// has probably left the name without the content, which was not flushed, and has also ended the
// holder. A torn record of this boot was damaged in another way, and its key may be held.
func fromBeforeBoot(fi fs.FileInfo, now instant) bool {
	const slack = time.Second // file times are coarse: a file of this boot may seem a bit too old
	return now.boot != "" && fi.ModTime().Add(slack).Before(now.bootTime())
}

// recordIn returns the record in the file with that name, or nil if the file has no valid record.
func (f folder) recordIn(name string) (*record, error) {
	b, _, err := readFile(filepath.Join(f.path, name))
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

// draft writes the record r, which has no fence and no term yet, to a temporary file, and returns it
// open. The caller completes the record later, and its length stays the same. draft also creates the
// guard's file, and with a fence the file of the stripe's last fence. The caller has no guard yet,
// because the creation of a file may take long, and a process that is stopped meanwhile must not
// block the keys of a stripe.
func (f folder) draft(r *record, withFence bool) (*os.File, error) {
	n := stripeOf(r.key)
	err := f.ensureFile(f.guardFile(n), nil)
	if err == nil && withFence {
		err = f.ensureFile(f.fenceFile(n), encodeFence(0))
	}
	if err != nil {
		return nil, err
	}

	b := r.file()
	if len(b) > maxRecord {
		return nil, fmt.Errorf(
			"%w: key of %d bytes, owner of %d: the file would be longer than %d bytes",
			backend.ErrInvalid, len(r.key), len(r.owner), maxRecord)
	}
	return createTemp(f.path, b)
}

// ensureFile creates a file at path if there is none. It creates the directory if that does not
// exist.
func (f folder) ensureFile(path string, content []byte) error {
	_, err := os.Lstat(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return err // nil if there is a file
	}
	if err := f.ensure(); err != nil {
		return err
	}

	err = createFile(path, content)
	if errors.Is(err, fs.ErrExist) {
		return nil // another process was faster
	}
	return err
}

// ensure creates the directory and its parents if they do not exist. If something else has that
// name, it returns an error.
func (f folder) ensure() error {
	if err := os.MkdirAll(filepath.Dir(f.path), 0o700); err != nil {
		return err
	}

	fi, err := os.Stat(f.path)
	if err == nil && !fi.IsDir() {
		err = &fs.PathError{Op: "open", Path: f.path, Err: syscall.ENOTDIR}
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return f.create()
}

// create creates the directory with the first guard in it. It also returns nil if another process
// is faster.
func (f folder) create() error {
	// The umask removes bits, so set the mode after the creation, and give the directory its name
	// after that. Otherwise a process that is killed in between could leave a directory that other
	// users cannot enter.
	temp, err := os.MkdirTemp(filepath.Dir(f.path), dirPrefix)
	if err != nil {
		var path *fs.PathError
		if errors.As(err, &path) {
			path.Path = f.path // because the user knows this name
		}
		return err
	}

	mode := f.mode
	if mode&0o020 != 0 {
		// Let new files belong to the directory's group, so that other members can use them.
		mode |= fs.ModeSetgid
	}
	err = os.Chmod(temp, mode)
	if err == nil {
		// Put a file into each new directory. A rename replaces an empty directory, and so could
		// replace the directory that another process has just created.
		err = createFile(filepath.Join(temp, filepath.Base(f.guardFile(0))), nil)
	}
	if err == nil {
		err = os.Rename(temp, f.path)
	}
	if err == nil {
		return nil
	}

	os.RemoveAll(temp)
	if fi, e := os.Stat(f.path); e == nil && fi.IsDir() {
		return nil // another process was faster
	}
	return err
}
