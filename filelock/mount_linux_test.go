package filelock

import (
	"syscall"
	"testing"
)

func mountSmall(dir string) error {
	return syscall.Mount("none", dir, "tmpfs", 0, "size=64k,nr_inodes=200")
}

func unmount(t *testing.T, dir string) { must(t, syscall.Unmount(dir, 0)) }
