//go:build unix

package pglock_test

import (
	"context"
	"os"
	"syscall"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
)

var must, until = await.Must, await.Until

// own gives a file to the owner of another one.
func own(t testing.TB, path string, like os.FileInfo) {
	t.Helper()
	if stat, ok := like.Sys().(*syscall.Stat_t); ok && os.Getuid() == 0 {
		must(t, os.Chown(path, int(stat.Uid), int(stat.Gid)))
	}
}

// locks locks a key of c, unlocks it, and sends the outcome.
func locks(ctx context.Context, c *hasp.Client, key string) <-chan error {
	got := make(chan error, 1)
	go func() {
		lease, err := c.Lock(ctx, key)
		if err == nil {
			err = lease.Unlock(ctx)
		}
		got <- err
	}()
	return got
}
