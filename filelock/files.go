package filelock

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// Names of files and directories that are not ready for use.
const (
	tempPrefix = "temp-"          // in the directory: a file before it has its final name
	dirPrefix  = ".filelock-new-" // beside the directory: itself before it has its final name
)

// openFile opens the file at path, which exists. If it is not a regular file, openFile returns an
// error.
func openFile(path string, flag int) (*os.File, fs.FileInfo, error) {
	if openFlags == 0 {
		// On this platform, no flags make it safe to open a file that is not regular. So check the
		// file first. The check below is still needed, because another process may replace the file
		// in between.
		if err := checkRegular(path); err != nil {
			return nil, nil, err
		}
	}

	f, err := os.OpenFile(path, flag|openFlags, 0)
	if err != nil {
		return nil, nil, explainOpen(path, err)
	}
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = kindError(path, fi)
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, fi, nil
}

// checkRegular returns an error if there is something at path that is not a regular file.
func checkRegular(path string) error {
	if fi, err := os.Lstat(path); err == nil && !fi.Mode().IsRegular() {
		return kindError(path, fi)
	}
	return nil
}

// explainOpen returns err, the error of opening path. If path is not a regular file, the result
// says so, and not "too many levels of symbolic links".
func explainOpen(path string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return cmp.Or(checkRegular(path), err)
}

var errNotFile = errors.New("not a regular file")

func kindError(path string, fi fs.FileInfo) error {
	return fmt.Errorf("%s: %w (mode %v)", path, errNotFile, fi.Mode())
}

// readFile returns the content of the file at path, cut after maxRecord+1 bytes, and its FileInfo.
func readFile(path string) ([]byte, fs.FileInfo, error) {
	f, fi, err := openFile(path, os.O_RDONLY)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()

	// Read one byte more than the longest record. So a huge file is refused, but not read as a
	// whole.
	b := make([]byte, min(fi.Size(), maxRecord)+1)
	n, err := f.ReadAt(b, 0)
	if err == io.EOF {
		err = nil
	}
	return b[:n], fi, err
}

// newFile creates a file with the directory's mode, whatever this process's umask is. The argument
// path must be a temporary name, because a process that is killed before it has set
// the mode leaves a file that other users cannot open.
func newFile(path string) (*os.File, error) {
	dir, err := os.Stat(filepath.Dir(path))
	if err != nil {
		return nil, err
	}

	perm := dir.Mode().Perm() & 0o666
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return nil, err
	}

	fi, err := f.Stat()
	if err == nil && perm&^fi.Mode().Perm() != 0 {
		err = f.Chmod(perm) // because the umask has removed permissions
	}
	if err != nil {
		f.Close()
		os.Remove(path)
	}
	return f, err
}

// createTemp creates a file in dir with a temporary name and the given content. The file stays
// open.
func createTemp(dir string, content []byte) (*os.File, error) {
	f, err := newFile(filepath.Join(dir, tempPrefix+rand.Text()))
	if err != nil {
		return nil, err
	}
	if _, err := f.Write(content); err != nil {
		f.Close()
		os.Remove(f.Name())
		return nil, err
	}
	return f, nil
}

// createFile creates a file at path with the given content. If the file system has hard links, no
// other process sees the file without its content. It returns fs.ErrExist if there is a file
// already.
func createFile(path string, content []byte) error {
	f, err := createTemp(filepath.Dir(path), content)
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // after the call of Link, the file has two names
	if err := f.Close(); err != nil {
		return err
	}

	// Use a hard link, which fails if another process has created a file meanwhile. A rename would
	// replace that file, which may be locked.
	err = os.Link(f.Name(), path)
	isFinal := err == nil || errors.Is(err, fs.ErrExist) || errors.Is(err, fs.ErrNotExist)
	if isFinal {
		return err
	}

	// The file system probably has no hard links. Such file systems (FAT) have no owners either, so
	// a file with a wrong mode does no harm, and may be created at its final path.
	if f, err = newFile(path); err != nil {
		return err
	}
	_, err = f.Write(content)
	return closeAfter(f, err)
}

// closeAfter closes f after a write that returned err, and returns the first error. Some file
// systems report a full disk only when a file is closed.
func closeAfter(f *os.File, err error) error {
	if e := f.Close(); err == nil {
		err = e
	}
	return err
}

// explain returns err with advice on errors of the file system.
func explain(err error) error {
	matches := func(target error) bool { return errors.Is(err, target) }
	switch {
	case err == nil:
		return nil
	case matches(fs.ErrPermission):
		return fmt.Errorf("%w (the directory and its files must be readable and writable for this user, "+
			"and the directory not sticky)", err)
	case slices.ContainsFunc(noLockErrors, matches):
		return fmt.Errorf("%w (locks need a directory on a local file system)", err)
	}
	return err
}
