package filelock

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
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

// create makes a new file that everybody may use who may use the directory:
// its mode is the directory's, whatever the umask of this process.
func (d *Driver) create(path string) (*os.File, error) {
	dir, err := os.Stat(d.dir)
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
	f, err := d.create(temp)
	if errors.Is(err, fs.ErrExist) {
		if err = os.Remove(temp); err == nil {
			f, err = d.create(temp)
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

// makeDir creates the directory if it is not there.
func (d *Driver) makeDir() error {
	if err := os.MkdirAll(filepath.Dir(d.dir), 0o700); err != nil {
		return err
	}
	err := os.Mkdir(d.dir, d.mode)
	if errors.Is(err, fs.ErrExist) {
		fi, err := os.Stat(d.dir)
		if err == nil && !fi.IsDir() {
			err = &fs.PathError{Op: "open", Path: d.dir, Err: syscall.ENOTDIR}
		}
		return err
	}
	if err != nil || d.mode&0o077 == 0 {
		return err
	}
	// The umask took bits away. What one member of the group creates belongs
	// to the directory's group, or the others could not use it.
	mode := d.mode
	if mode&0o020 != 0 {
		mode |= fs.ModeSetgid
	}
	return os.Chmod(d.dir, mode)
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
