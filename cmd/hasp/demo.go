package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// Bounds of the demo's flags, so that it stays something to look at.
const (
	maxWorkers    = 64
	maxIncrements = 100_000
)

// demo is what hasp demo is asked for.
type demo struct {
	workers    int
	increments int // of each worker
	ttl        time.Duration
	work       time.Duration
	noLock     bool
	svg        string
	json       bool

	store   hasp.Config
	place   string // the store, for people
	ordered bool   // the store keeps a queue, and can tell of it
	key     string
	file    string
}

func (a *app) demoCommand() *cobra.Command {
	var d demo
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Watch several processes take turns at one lock",
		Long: `demo starts worker processes that increment a number in a plain file: each reads
it, thinks, and writes it back. One lock keeps them from writing over each
other. On the way one of them is killed with SIGKILL while it holds the lock:
the others wait until its term has run out, then one takes over, and a new
process does what the dead one left undone. At the end the number must be right.
Of a strategy that serves waiters in order, it shows who is next.

Without --url, --config or HASP_URL the lock is a file in a temporary directory.
With --no-lock the workers do the same without a lock, and the number goes wrong.

The exit code is 0 if the number is right and 1 if it is wrong.`,
		Example: `  hasp demo
  hasp demo --no-lock
  hasp demo --svg demo.svg --url spinlock+redis://localhost:6379`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := d.check(); err != nil {
				return err
			}
			return a.demo(cmd, &d)
		},
	}
	f := cmd.Flags()
	f.IntVar(&d.workers, "workers", 5, "how many processes")
	f.IntVar(&d.increments, "increments", 20, "how many increments each of them makes")
	f.DurationVar(&d.ttl, "ttl", 1500*time.Millisecond, "term of the lock: how long it outlives the killed holder")
	f.DurationVar(&d.work, "work", 20*time.Millisecond, "about how long each increment takes")
	f.BoolVar(&d.noLock, "no-lock", false, "do without the lock, and see the number go wrong")
	f.StringVar(&d.svg, "svg", "", "write the timeline to this file, as a picture")
	f.BoolVar(&d.json, "json", false, "print nothing but a summary, as JSON")
	must(cmd.MarkFlagFilename("svg", "svg"))
	return cmd
}

// check refuses what the demo cannot show.
func (d *demo) check() error {
	switch {
	case d.workers < 1 || d.workers > maxWorkers:
		return usagef("--workers %d: want 1 to %d", d.workers, maxWorkers)
	case d.increments < 1 || d.increments > maxIncrements:
		return usagef("--increments %d: want 1 to %d", d.increments, maxIncrements)
	case d.ttl < hasp.MinTTL:
		return usagef("--ttl %v: want %v or more", d.ttl, hasp.MinTTL)
	case d.work < 0:
		return usagef("--work cannot be negative")
	}
	return nil
}

// expected is the number at the end if no increment is lost.
func (d *demo) expected() int { return d.workers * d.increments }

// demo runs the demo: prepare, watch, verify.
func (a *app) demo(cmd *cobra.Command, d *demo) error {
	if err := d.tryPicture(); err != nil {
		return codeError{exitFailed, fmt.Errorf("--svg: %w", err)}
	}
	dir, err := os.MkdirTemp("", "hasp-demo-")
	if err != nil {
		return codeError{exitFailed, err}
	}
	defer os.RemoveAll(dir)
	if err := a.prepare(cmd, d, dir); err != nil {
		return err
	}
	ctx, stop := interruptible(cmd.Context())
	defer stop()
	if err := a.tryStore(ctx, d); err != nil {
		return causeOf(ctx, err)
	}
	// "hasp demo | head": with SIGPIPE caught, a write is told that nobody
	// reads, instead of ending the demo with its workers and files left over.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	v := a.view(d, func() { cancel(signalError{syscall.SIGPIPE}) })
	r := &referee{demo: d, view: v}
	err = r.referee(ctx)
	v.close()
	if err != nil {
		return causeOf(ctx, err)
	}
	number, err := readNumber(d.file)
	if err != nil {
		return err
	}
	sum := r.summary(number)
	if d.svg != "" {
		if err := writeSVG(d, &r.timeline, sum); err != nil {
			return codeError{exitFailed, fmt.Errorf("--svg: %w", err)}
		}
	}
	if d.json {
		err = a.printJSON(sum)
	} else {
		a.report(d, sum)
	}
	if !sum.OK {
		a.code = exitFailed
	}
	return err
}

// prepare chooses the store and the key, and writes the number's first value.
func (a *app) prepare(cmd *cobra.Command, d *demo, dir string) error {
	d.key = "hasp-demo-" + rand.Text()
	d.file = filepath.Join(dir, "number")
	var err error
	switch {
	case d.noLock:
		d.place = "no lock at all"
	case a.store.given() || cmd.Flag("url").Changed || cmd.Flag("config").Changed:
		if d.store, err = a.config(cmd); err != nil {
			return err
		}
		d.place = d.store.Strategy
		// By their owners the workers are told apart in the queue.
		d.store.Params = maps.Clone(d.store.Params)
		delete(d.store.Params, "owner")
	default:
		d.store = hasp.Config{Strategy: "filelock", Nodes: []string{filepath.Join(dir, "locks")}}
		d.place = "filelock, no server"
	}
	for _, s := range described {
		if s.Name == d.store.Strategy && s.Reach == backend.Process.String() {
			return usagef("%s excludes the callers of one process, and the demo starts several; leave --url out, or name another strategy", s.Name)
		}
	}
	return writeNumber(d.file, 0)
}

// tryStore finds out whether the store works before any process is started.
func (a *app) tryStore(ctx context.Context, d *demo) error {
	if d.noLock {
		return nil
	}
	client, err := d.store.Open(ctx, &hasp.Options{Owner: owner("hasp demo")})
	if err != nil {
		return err
	}
	defer client.Close()
	driver, err := d.store.Driver(ctx)
	if err != nil {
		return err
	}
	defer driver.Close()
	_, tells := driver.(backend.Inspector)
	d.ordered = tells && driver.Traits().Ordered
	lease, err := client.TryLock(ctx, d.key, hasp.WithTTL(d.ttl))
	if err != nil {
		return err
	}
	return lease.Unlock(ctx)
}

// tryPicture finds out whether the picture can be written, before anything runs.
func (d *demo) tryPicture() error {
	if d.svg == "" {
		return nil
	}
	f, err := os.OpenFile(d.svg, os.O_WRONLY|os.O_CREATE, 0o666)
	if err != nil {
		return err
	}
	return f.Close()
}

// writeSVG writes the picture, or says why not.
func writeSVG(d *demo, t *timeline, sum summary) error {
	f, err := os.Create(d.svg)
	if err != nil {
		return err
	}
	return errors.Join(drawSVG(f, d, t, sum), f.Close())
}
