package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/cli/demo"
	"github.com/hasplock/hasp/internal/cli/ui"
)

// These bound the flags of the demo, so that a person can follow it.
const (
	maxWorkers    = 64
	maxIncrements = 100_000
)

func (a *app) demoCommand() *cobra.Command {
	var d demo.Demo
	var asJSON, page bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Watch several processes take turns at one lock",
		Long: `demo starts worker processes that increment a number in a file. Each of them
reads the number, pauses, and writes it back. Two workers that do so at the same
time overwrite each other's increments, and the lock prevents that.

On the way, demo kills one worker with SIGKILL while it holds the lock. The key
stays locked until its term ends; then another worker takes over. A new process
makes the increments that the killed worker had left. At the end the number must
be right. demo prints a line for each increment; the page of --ui has a picture of
the same. If the strategy serves waiters in order, demo shows who is next.

Without --url, --config or HASP_URL the lock is a file in a temporary directory.
With --no-lock there is no lock, and the number goes wrong.

With --ui, demo waits until a browser has opened the page of "hasp ui", and works
slowly enough to be followed there. The page stays until Ctrl-C.

The exit code is 0 if the number is right, and 1 if it is wrong.`,
		Example: `  hasp demo
  hasp demo --no-lock
  hasp demo --ui
  hasp demo --url spinlock+redis://localhost:6379`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.demo(cmd, &d, asJSON, page) },
	}
	f := cmd.Flags()
	f.IntVar(&d.Workers, "workers", 5, "number of worker processes")
	f.IntVar(&d.Increments, "increments", 20, "increments that each worker makes")
	f.DurationVar(&d.TTL, "ttl", 1500*time.Millisecond, "term of the lock: how long the key stays locked after the kill")
	f.DurationVar(&d.Work, "work", 20*time.Millisecond, "about how long each increment takes")
	f.BoolVar(&d.NoLock, "no-lock", false, "use no lock, and see the number go wrong")
	f.BoolVar(&page, "ui", false, "show the lock on a web page, as hasp ui does")
	f.BoolVar(&asJSON, "json", false, "print only a summary, as JSON")
	cmd.MarkFlagsMutuallyExclusive("ui", "no-lock")
	cmd.MarkFlagsMutuallyExclusive("ui", "json")
	return cmd
}

func (a *app) demo(cmd *cobra.Command, d *demo.Demo, asJSON, page bool) error {
	if err := a.checkDemo(cmd, d); err != nil {
		return err
	}
	if page {
		a.demoPage(cmd, d)
	}
	// In "hasp demo | head", a write raises SIGPIPE. Catch it, so that the write returns an error
	// and the demo cleans up. Otherwise the signal would end hasp and leave its workers and files
	// behind.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	out := a.out
	if asJSON {
		out = io.Discard
	}

	s, err := d.Run(cmd.Context(), out)
	if err != nil {
		return err
	}
	if !s.OK {
		a.code = exitFailed
	}
	if asJSON {
		return a.printJSON(s)
	}
	return nil
}

// checkDemo returns an error for flags that the demo does not support. It also sets the store.
func (a *app) checkDemo(cmd *cobra.Command, d *demo.Demo) (err error) {
	switch {
	case d.Workers < 1 || d.Workers > maxWorkers:
		return usagef("--workers %d: want 1 to %d", d.Workers, maxWorkers)
	case d.Increments < 1 || d.Increments > maxIncrements:
		return usagef("--increments %d: want 1 to %d", d.Increments, maxIncrements)
	case d.TTL < backend.MinTTL:
		return usagef("--ttl %v: want %v or more", d.TTL, backend.MinTTL)
	case d.Work < 0:
		return usagef("--work %v: want 0 or more", d.Work)
	case d.NoLock || !a.store.given(cmd):
		return nil
	}

	if d.Store, err = a.config(cmd); err != nil {
		return err
	}
	s := describe(d.Store.Strategy)
	if s.Reach == backend.Process {
		return usagef("%s excludes the callers of one process, and the demo starts several; name another strategy, or no store", s.Name)
	}
	d.Ordered = s.Order == InOrder
	return nil
}

// These are defaults with --ui. A person can follow holds of this length, and the page lists often
// enough to show each of them.
const (
	pageWork       = 300 * time.Millisecond
	pageIncrements = 8
	pageEvery      = 100 * time.Millisecond
)

func (a *app) demoPage(cmd *cobra.Command, d *demo.Demo) {
	if !cmd.Flag("work").Changed {
		d.Work = pageWork
	}
	if !cmd.Flag("increments").Changed {
		d.Increments = pageIncrements
	}

	d.Page = func(ctx context.Context, d *demo.Demo) (end func(), err error) {
		src, err := d.Store.Open(ctx, &hasp.Options{Owner: ownerOf(d.Store, cmd.CommandPath())})
		if err != nil {
			return nil, err
		}
		ln, err := listenAt(ctx, "127.0.0.1:0")
		if err != nil {
			src.Close()
			return nil, err
		}
		s := ui.New(src, ui.Options{Store: d.Store.Strategy, Ordered: d.Ordered, Prefix: d.Key, Every: pageEvery,
			Listen: ln.Addr().String(), Redact: a.store.redact})

		serving, cancel := context.WithCancel(ctx)
		var page sync.WaitGroup
		page.Go(func() {
			defer src.Close()
			_ = s.Serve(serving, ln) // if Serve fails, the browser shows that
		})
		end = func() { cancel(); page.Wait() }
		_, err = fmt.Fprintf(a.out, "open http://%s/#%s to see the lock; the demo begins then\n", ln.Addr(), ui.ID(d.Key))
		if err = printed(err); err == nil {
			err = s.AwaitBrowser(ctx)
		}
		if err != nil {
			end()
		}
		return end, err
	}
}
