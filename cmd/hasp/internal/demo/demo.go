// Package demo shows a lock at work for "hasp demo": several processes
// increment a number in a file, and one of them is killed while it holds the
// lock.
package demo

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// Demo says what to show.
type Demo struct {
	Workers    int           // processes; at least 1
	Increments int           // of each worker; at least 1
	TTL        time.Duration // the term of the lock
	Work       time.Duration // about how long an increment takes
	NoLock     bool          // increment without the lock
	SVG        string        // write the timeline to this file as a picture, unless it is empty
	Store      hasp.Config   // where the lock is kept; the zero Config is a temporary directory

	// Run sets these.
	place   string // describes the store
	ordered bool   // the store serves waiters in order, and Inspect returns the queue
	key     string
	file    string // has the number in it
}

// Error is a failure of the demo itself or of one of its workers, not of the
// store.
type Error struct {
	Code int // the exit code for it
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// Exit codes of an Error. That of a worker is the worker's own.
const (
	exitFailed = 1
	exitUnread = 128 + int(syscall.SIGPIPE) // no process reads the output any more
)

// failed returns err as an Error, or nil.
func failed(err error) error {
	if err == nil {
		return nil
	}
	return &Error{exitFailed, err}
}

// expected is the number at the end if no increment is lost.
func (d *Demo) expected() int { return d.Workers * d.Increments }

// Run runs the demo and shows it on out, unless out is nil. When Run returns, it
// has left no process and no temporary file. A wrong number is not an error; see
// Summary.OK.
//
// The program must run Work when it is started as "hasp demo-worker".
func (d *Demo) Run(ctx context.Context, out io.Writer) (Summary, error) {
	if err := d.tryPicture(); err != nil {
		return Summary{}, failed(err)
	}
	dir, err := os.MkdirTemp("", "hasp-demo-")
	if err != nil {
		return Summary{}, failed(err)
	}
	defer os.RemoveAll(dir)
	if err := d.prepare(ctx, dir); err != nil {
		return Summary{}, err
	}

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	v := d.view(out, func(err error) { cancel(&Error{exitUnread, err}) })
	r := &referee{Demo: d, view: v}
	err = r.run(ctx)
	v.close()
	if err != nil {
		return Summary{}, err
	}

	number, err := readNumber(d.file)
	if err != nil {
		return Summary{}, failed(err)
	}
	s := r.summary(number)
	if err := d.writePicture(&r.timeline, s); err != nil {
		return s, failed(err)
	}
	if out != nil {
		d.report(out, s)
	}
	return s, nil
}

// prepare chooses the store and the key, writes the first number, and checks
// that the store works.
func (d *Demo) prepare(ctx context.Context, dir string) error {
	d.key = "hasp-demo-" + rand.Text()
	d.file = filepath.Join(dir, "number")
	if err := writeNumber(d.file, 0); err != nil {
		return failed(err)
	}

	switch {
	case d.NoLock:
		d.place = "no lock at all"
		return nil
	case d.Store.Strategy == "":
		d.Store = hasp.Config{Strategy: "filelock", Nodes: []string{filepath.Join(dir, "locks")}}
		d.place = "filelock, no server"
	default:
		d.place = d.Store.Strategy
		// The referee knows the workers in the queue by their owners.
		d.Store.Params = maps.Clone(d.Store.Params)
		delete(d.Store.Params, "owner")
	}
	return d.tryStore(ctx)
}

// tryStore locks and unlocks the key, so that a store that does not work is
// reported before any process is started.
func (d *Demo) tryStore(ctx context.Context) error {
	client, err := d.Store.Open(ctx, nil)
	if err != nil {
		return err
	}
	defer client.Close()
	driver, err := d.Store.Driver(ctx)
	if err != nil {
		return err
	}
	defer driver.Close()
	_, inspects := driver.(backend.Inspector)
	d.ordered = inspects && driver.Traits().Ordered

	lease, err := client.TryLock(ctx, d.key, hasp.WithTTL(d.TTL))
	if err != nil {
		return err
	}
	return lease.Unlock(ctx)
}

// tryPicture checks that the picture can be written, before anything runs.
func (d *Demo) tryPicture() error {
	if d.SVG == "" {
		return nil
	}
	f, err := os.OpenFile(d.SVG, os.O_WRONLY|os.O_CREATE, 0o666)
	if err != nil {
		return fmt.Errorf("--svg: %w", err)
	}
	return f.Close()
}

// writePicture writes the picture, if one is wanted.
func (d *Demo) writePicture(t *timeline, s Summary) error {
	if d.SVG == "" {
		return nil
	}
	f, err := os.Create(d.SVG)
	if err != nil {
		return fmt.Errorf("--svg: %w", err)
	}
	return errors.Join(drawSVG(f, d, t, s), f.Close())
}
