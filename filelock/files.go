package filelock

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// Names of files and directories that are not ready for use.
const (
	probePrefix = "temp-open-"     // in the directory, while it is opened by URL
	newPrefix   = "temp-new-"      // in the directory: a file before it gets its name
	dirPrefix   = ".filelock-new-" // beside the directory: the directory before it gets its name
)

// openFile opens a regular file, and nothing else that bears its name.
func openFile(path string, flag int, perm fs.FileMode) (*os.File, error) {
	if openFlags == 0 {
		if err := irregular(path); err != nil {
			return nil, err
		}
	}
	f, err := os.OpenFile(path, flag|openFlags, perm)
	if err != nil {
		return nil, plainer(path, err)
	}
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = kindError(path, fi)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// irregular returns an error if path is something else than a file.
func irregular(path string) error {
	if fi, err := os.Lstat(path); err == nil && !fi.Mode().IsRegular() {
		return kindError(path, fi)
	}
	return nil
}

// plainer is err, or what stands at path if that explains it better than "too
// many levels of symbolic links".
func plainer(path string, err error) error {
	if kind := irregular(path); kind != nil {
		return kind
	}
	return err
}

var errNotFile = errors.New("not a regular file")

func kindError(path string, fi fs.FileInfo) error {
	return fmt.Errorf("%s: %w (mode %v)", path, errNotFile, fi.Mode())
}

// readFile returns what a file of ours says, and when that was written.
func readFile(path string) ([]byte, fs.FileInfo, error) {
	f, err := openFile(path, os.O_RDONLY, 0)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	// One byte more than any record has, so that a huge file is noticed
	// without being read.
	b := make([]byte, 0, min(fi.Size(), maxRecord)+1)
	for len(b) < cap(b) {
		n, err := f.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, nil, err
		}
	}
	return b, fi, nil
}

// create makes a new file with the directory's mode, whatever the umask of this
// process is. The file gets its mode after its name. A process killed in between
// leaves a file that other users cannot open, so path must be a temporary name.
func create(path string) (*os.File, error) {
	dir, err := os.Stat(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	perm := dir.Mode().Perm() & 0o666
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, perm)
	if err == nil && perm&0o077 != 0 {
		if err = f.Chmod(perm); err != nil {
			f.Close()
			os.Remove(path)
		}
	}
	return f, err
}

// replace puts content into the file at path, at once and as a whole: whoever
// opens path finds the old content or the new, also if this process is killed
// at any point. The caller has the guard to which temp belongs, so that a
// temp file found there was left by a process that died.
//
// With flush the content is on the disk before the file bears its name.
func (d *Driver) replace(path, temp string, content []byte, flush bool) error {
	f, err := create(temp)
	if errors.Is(err, fs.ErrExist) {
		if err = os.Remove(temp); err == nil {
			f, err = create(temp)
		}
	}
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil && flush {
		err = f.Sync()
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = swap(temp, path)
	}
	if err != nil {
		os.Remove(temp)
	}
	return err
}

// touch makes an empty file at path, and the directory if it does not exist. It
// does not change a file that exists.
func (d *Driver) touch(path string) error {
	err := makeFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = d.makeDir(); err == nil {
			err = makeFile(path)
		}
	}
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// makeFile makes an empty file at path, which must not exist.
func makeFile(path string) error {
	temp := filepath.Join(filepath.Dir(path), newPrefix+rand.Text())
	f, err := create(temp)
	if err != nil {
		return err
	}
	defer os.Remove(temp)
	if err := f.Close(); err != nil {
		return err
	}

	// A rename would replace a file that another process has made and locked
	// meanwhile. A link fails instead.
	err = os.Link(temp, path)
	if err == nil || errors.Is(err, fs.ErrExist) || errors.Is(err, fs.ErrNotExist) {
		return err
	}

	// File systems without hard links (FAT) have no owners either.
	if f, err = create(path); err != nil {
		return err
	}
	return f.Close()
}

// makeDir creates the directory if it is not there.
func (d *Driver) makeDir() error {
	if err := os.MkdirAll(filepath.Dir(d.dir), 0o700); err != nil {
		return err
	}
	fi, err := os.Stat(d.dir)
	if err == nil && !fi.IsDir() {
		err = &fs.PathError{Op: "open", Path: d.dir, Err: syscall.ENOTDIR}
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if fi, e := os.Lstat(d.dir); e == nil && fi.Mode()&fs.ModeSymlink != 0 {
		return err // the link leads nowhere
	}
	return d.newDir()
}

// newDir creates the directory, unless another process is faster.
func (d *Driver) newDir() error {
	// The umask takes bits away, so the mode is set afterwards. A process that
	// is killed in between must not leave a directory that other users cannot
	// enter: the directory gets its mode first and its name last.
	temp, err := os.MkdirTemp(filepath.Dir(d.dir), dirPrefix)
	if err != nil {
		var path *fs.PathError
		if errors.As(err, &path) {
			path.Path = d.dir // the name that the user knows
		}
		return err
	}

	mode := d.mode
	if mode&0o020 != 0 {
		// What one member of the group creates belongs to the directory's
		// group, or the others could not use it.
		mode |= fs.ModeSetgid
	}
	err = os.Chmod(temp, mode)
	if err == nil {
		// A directory may be renamed over an empty one, which another process
		// made meanwhile and is about to use. So none is ever empty.
		err = makeFile(filepath.Join(temp, filepath.Base(d.name("guard", fenceGuard))))
	}
	if err == nil {
		err = os.Rename(temp, d.dir)
	}
	if err == nil {
		return nil
	}

	os.RemoveAll(temp)
	if fi, e := os.Stat(d.dir); e == nil && fi.IsDir() {
		return nil // another process was faster
	}
	return err
}

// explain says what to do about an error of the file system.
func explain(err error) error {
	is := func(targets []error) bool {
		for _, t := range targets {
			if errors.Is(err, t) {
				return true
			}
		}
		return false
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w (the directory and the files in it must be readable and writable for this user)", err)
	case is(fullErrors):
		return fmt.Errorf("%w (nothing was changed; make room)", err)
	case is(noLockErrors):
		return fmt.Errorf("%w (locks need a directory on a local file system)", err)
	}
	return err
}
