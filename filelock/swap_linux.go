package filelock

import (
	"os"

	"golang.org/x/sys/unix"
)

// swap renames the file temp to path in one step. If path exists, the two files exchange their
// names, and swap then removes the old file. If this process dies in between, the next call of
// replace removes the old file. A plain rename over a file would make ext4 write the new file to
// the disk immediately (auto_da_alloc), which takes five times as long as the rest of a renewal.
func swap(temp, path string) error {
	if unix.Renameat2(unix.AT_FDCWD, temp, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE) == nil {
		os.Remove(temp)
		return nil
	}
	// There is no file at path, or the kernel or the file system cannot exchange names.
	return os.Rename(temp, path)
}
