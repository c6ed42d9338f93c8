package filelock

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/gofrs/flock"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

func init() { hasp.Register("filelock", open) }

// open is the opener of filelock://DIR?mode=0770.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	if err := c.Check("mode"); err != nil {
		return nil, err
	}
	if len(c.Nodes) > 1 {
		return nil, fmt.Errorf("%w: filelock takes one directory, not %d", hasp.ErrInvalid, len(c.Nodes))
	}
	dir := ""
	if len(c.Nodes) == 1 {
		var err error
		if dir, err = place(c.Nodes[0]); err != nil {
			return nil, err
		}
	}
	var opts Options
	if s, ok := c.Params["mode"]; ok {
		mode, err := strconv.ParseUint(s, 8, 32)
		if err != nil || mode == 0 {
			return nil, fmt.Errorf("%w: parameter mode=%q: want octal permissions such as 0770", hasp.ErrInvalid, s)
		}
		opts.Mode = fs.FileMode(mode)
	}
	d := New(dir, &opts)
	if err := d.probe(ctx); err != nil {
		return nil, err
	}
	d.sweep(ctx)
	return d, nil
}

// place is the directory that a node names. A path must look like one: of
// filelock://var/lock/app nobody can tell whether a slash is missing, and two
// processes in different working directories would not exclude each other.
func place(node string) (string, error) {
	if runtime.GOOS == "windows" && len(node) > 2 && node[0] == '/' && node[2] == ':' {
		node = node[1:] // filelock:///C:/locks
	}
	path := filepath.ToSlash(node)
	switch {
	case strings.Contains(node, "://"):
		return "", fmt.Errorf("%w: filelock has no transport: want filelock:///DIRECTORY", hasp.ErrInvalid)
	case filepath.IsAbs(node), path == ".", path == "..", strings.HasPrefix(path, "./"), strings.HasPrefix(path, "../"):
		return node, nil
	}
	return "", fmt.Errorf("%w: directory %q is neither absolute nor begins with ./ (want filelock:///%[2]s or filelock://./%[2]s)", hasp.ErrInvalid, node)
}

// userDir is where the state of this user's programs belongs, by the XDG Base
// Directory Specification: https://specifications.freedesktop.org/basedir
func userDir() (string, error) {
	if state := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(state) {
		return filepath.Join(state, "hasp"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil || !filepath.IsAbs(home) {
		return "", fmt.Errorf("%w: filelock: no directory is named, and there is no home directory: set XDG_STATE_HOME or name one, as in filelock:///var/lock/app", backend.ErrInvalid)
	}
	return filepath.Join(home, ".local", "state", "hasp"), nil
}

// probe makes sure that the directory is there, that files can be made in it
// and that they can be locked, so that what is wrong is said at once.
func (d *Driver) probe(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if d.bad != nil {
		return d.bad
	}
	if err := d.makeDir(); err != nil {
		return explain(err)
	}
	f, err := os.CreateTemp(d.dir, probePrefix)
	if err != nil {
		return explain(err)
	}
	defer os.Remove(f.Name())
	_, err = f.WriteString("filelock can write here\n")
	if e := f.Close(); err == nil {
		err = e
	}
	if err != nil {
		return explain(err)
	}
	l := flock.New(f.Name(), flock.SetFlag(os.O_RDWR))
	if _, err := l.TryLock(); err != nil {
		return explain(err)
	}
	return l.Unlock()
}
