// Package filefence guards files of one host by a fence; see package fence. All writers must run on
// that host, as one user.
//
// The fence of the file PATH is in PATH.fence. A lock of the kernel on PATH.fence.lock, which ends
// with the process, lets one writer in at a time. Neither file is ever removed, because without
// PATH.fence, a guard would accept a write with any fence.
package filefence

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/gofrs/flock"

	"github.com/hasplock/hasp/fence"
)

// poll is the sleep between two tries to lock a file. No call blocks in the kernel, because that
// could not be cancelled.
const poll = 5 * time.Millisecond

// Do calls write, unless path, a file or a directory, has seen a larger fence than the one of ctx.
// No two writes for a path run at the same time. If ctx ends before the writes of others have
// ended, Do returns ctx's cause. A write that fails also raises the fence. All writers must use the
// same path: through a link, a file has another guard.
func Do(ctx context.Context, path string, write func(context.Context) error) error {
	f, err := fence.Of(ctx)
	if err != nil {
		return err
	}

	path = filepath.Clean(path) // a directory may be given with a slash at its end
	lock := flock.New(path + ".fence.lock")
	if _, err := lock.TryLockContext(ctx, poll); err != nil {
		return cmp.Or(context.Cause(ctx), err)
	}
	defer lock.Unlock() // also if write panics

	seen, err := read(path + ".fence")
	if err == nil {
		err = fence.Compare(path, f, seen)
	}
	if err == nil && f > seen {
		// Raise the fence before the write. If the process dies between them, nothing is written.
		err = replace(path+".fence", f)
	}
	if err != nil {
		return err
	}
	return write(ctx)
}

func read(path string) (uint64, error) {
	text, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return 0, nil
	case err != nil:
		return 0, err
	}

	seen, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("filefence: %s has no fence: %w", path, err)
	}
	return seen, nil
}

// replace puts the fence on the disk, in one step.
func replace(path string, f uint64) error {
	temp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}

	_, err = fmt.Fprintln(temp, f)
	err = errors.Join(err, temp.Sync(), temp.Close())
	if err == nil {
		err = os.Rename(temp.Name(), path)
	}
	if err != nil {
		os.Remove(temp.Name())
	}
	return err
}
