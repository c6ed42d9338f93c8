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

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

func init() { hasp.Register("filelock", open, "mode") }

// open returns a driver for c, which comes from a URL of this strategy. The directory then exists,
// can be used, and was swept.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	if len(c.Nodes) > 1 {
		return nil, fmt.Errorf("%w: filelock takes one directory, not %d",
			hasp.ErrInvalid, len(c.Nodes))
	}

	dir := ""
	if len(c.Nodes) == 1 { // without a node, newDriver uses this user's directory
		var err error
		if dir, err = parseDir(c.Nodes[0]); err != nil {
			return nil, err
		}
	}

	var opts Options
	if s, ok := c.Params["mode"]; ok {
		mode, err := strconv.ParseUint(s, 8, 32)
		if err != nil || mode == 0 { // 0 would mean the default; newDriver checks the other values
			return nil, fmt.Errorf("%w: parameter mode=%q: want octal permissions such as 0770",
				hasp.ErrInvalid, s)
		}
		opts.Mode = fs.FileMode(mode)
	}

	d, err := newDriver(dir, &opts)
	if err != nil {
		return nil, err
	}
	if err := d.probe(ctx); err != nil {
		return nil, err
	}
	d.sweeper.sweep(ctx, openFiles)
	return d, nil
}

// parseDir returns the directory that a node names: an absolute path, or a path that begins with ./
// or ../. It refuses other relative paths. In such a path the first slash was probably forgotten,
// and processes with different working directories would not exclude each other.
func parseDir(node string) (string, error) {
	hasDrive := len(node) > 2 && node[0] == '/' && node[2] == ':'
	if runtime.GOOS == "windows" && hasDrive {
		node = node[1:] // filelock:///C:/locks
	}
	first, _, _ := strings.Cut(filepath.ToSlash(node), "/")
	isURL := strings.Contains(node, "://") // newDriver refuses it
	if filepath.IsAbs(node) || first == "." || first == ".." || isURL {
		return node, nil
	}
	return "", fmt.Errorf("%w: directory %q is neither absolute nor begins with ./: "+
		"use filelock:///%[2]s or filelock://./%[2]s", hasp.ErrInvalid, node)
}

// userDir returns the directory for locks of this user, as in the XDG Base Directory Specification,
// https://specifications.freedesktop.org/basedir
func userDir() (string, error) {
	if state := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(state) {
		return filepath.Join(state, "hasp"), nil
	}

	home, err := os.UserHomeDir()
	if err != nil || !filepath.IsAbs(home) {
		return "", fmt.Errorf("%w: filelock: no directory is given, and this user has no home directory: "+
			"set XDG_STATE_HOME, or give a directory, as in filelock:///var/lib/app/locks",
			backend.ErrInvalid)
	}
	return filepath.Join(home, ".local", "state", "hasp"), nil
}
