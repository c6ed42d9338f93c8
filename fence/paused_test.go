//go:build unix

package fence_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/fence"
	"github.com/hasplock/hasp/filelock"
	"github.com/hasplock/hasp/internal/crew"
)

func init() { roles["holder"] = holder }

// holder takes the lock, and writes when its standard input ends.
func holder(args []string) error {
	c, err := filelock.New(args[0], nil)
	if err != nil {
		return err
	}
	lease, err := c.Lock(context.Background(), "k", hasp.WithFence(), hasp.WithTTL(200*time.Millisecond))
	if err != nil {
		return err
	}
	ctx := context.WithoutCancel(lease.Context())
	fmt.Println("held")
	io.Copy(io.Discard, os.Stdin)
	if err := guards(args[2], args[3], args[4])[args[1]].write(ctx, "late"); !errors.Is(err, fence.ErrStale) {
		return fmt.Errorf("the late write returned %v", err)
	}
	return nil
}

// A process is stopped until another one has the lock and has written.
func TestPausedProcessIsRefused(t *testing.T) {
	for _, kind := range []string{"file", "redis", "http"} {
		t.Run(kind, func(t *testing.T) {
			path, server, web := resources(t)
			dir := t.TempDir()
			child := crew.Test(t, "holder", dir, kind, path, server, web)
			if line := child.Line(t); line != "held" {
				t.Fatal(line)
			}
			must(t, crew.Pause(child.Process.Process))
			c, err := filelock.New(dir, nil)
			must(t, err)
			defer c.Close()
			lease, err := c.Lock(t.Context(), "k", hasp.WithFence()) // when the term of the child has ended
			must(t, err)
			g := guards(path, server, web)[kind]
			must(t, g.write(lease.Context(), "word"))
			must(t, lease.Unlock(t.Context()))
			must(t, crew.Resume(child.Process.Process))
			child.Finish(t)
			if got := fmt.Sprint(g.log()); got != "[word]" {
				t.Errorf("the log is %s", got)
			}
		})
	}
}
