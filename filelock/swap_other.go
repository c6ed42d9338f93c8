//go:build !linux

package filelock

import "os"

// swap renames the file temp to path in one step.
func swap(temp, path string) error { return os.Rename(temp, path) }
