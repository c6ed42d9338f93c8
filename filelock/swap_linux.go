package filelock

import (
	"os"

	"golang.org/x/sys/unix"
)

// swap gives the file temp the name path, in one step. If path exists the two
// change names, and the old one is removed as temp: a plain rename over a file
// makes ext4 start writing the new one to the disk (auto_da_alloc), which
// costs five times as much as all the rest of a renewal. To be killed before
// the removal leaves a temp file, as at any other point.
func swap(temp, path string) error {
	if unix.Renameat2(unix.AT_FDCWD, temp, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE) == nil {
		os.Remove(temp)
		return nil
	}
	// There is no file at path, or the kernel or file system cannot swap.
	return os.Rename(temp, path)
}
