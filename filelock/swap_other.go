//go:build !linux

package filelock

import "os"

// swap gives the file temp the name path, in one step.
func swap(temp, path string) error { return os.Rename(temp, path) }
