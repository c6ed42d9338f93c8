// Package demo is "hasp demo". Several processes increment a number in a file under a lock. One of
// them is killed while it holds the lock.
package demo

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/cli/text"
)

// Demo has the settings of a demo.
type Demo struct {
	Workers    int           // how many processes; at least 1
	Increments int           // how many each worker makes; at least 1
	TTL        time.Duration // the term of the lock
	Work       time.Duration // about how long an increment takes
	NoLock     bool          // increment without the lock
	Store      hasp.Config   // where the lock is kept; the zero Config is a temporary directory
	Ordered    bool          // the store serves waiters in order of arrival

	// If Page is not nil, Run calls it before it starts a process. Page shows the lock on a web
	// page until Run calls end. Run calls end only when ctx has ended.
	Page func(ctx context.Context, d *Demo) (end func(), err error) `json:"-"`

	// Run sets these.
	Key   string
	File  string // the file with the number
	place string // describes the store
}

// failure is an error of the demo itself or of a worker. Errors of the store are not failures.
type failure struct {
	error
	code int
}

// ExitCode returns the exit code for the failure. If a worker failed, it is the worker's exit code.
func (f failure) ExitCode() int { return f.code }

const (
	exitFailed = 1
	exitUnread = 128 + int(syscall.SIGPIPE) // no process reads the output any more
)

func failed(err error) error { return failure{err, exitFailed} }

// expected returns the number at the end if no increment is lost.
func (d *Demo) expected() int { return d.Workers * d.Increments }

// Run runs the demo and prints it to out. When Run returns, no process and no temporary file is
// left. A wrong number is not an error; see Summary.OK.
//
// The program must run [Work] in the role [Role].
func (d *Demo) Run(ctx context.Context, out io.Writer) (Summary, error) {
	dir, err := os.MkdirTemp("", "hasp-demo-")
	if err != nil {
		return Summary{}, failed(err)
	}
	defer os.RemoveAll(dir)
	if err := d.prepare(ctx, dir); err != nil {
		return Summary{}, err
	}

	if d.Page != nil {
		end, err := d.Page(ctx, d)
		if err != nil {
			return Summary{}, err
		}
		defer end() // runs before the directory of the locks is removed
	}
	fmt.Fprintf(out, "%s, one number in a file, %s\n", text.Count(d.Workers, "process", "processes"), d.place)
	r := &referee{Demo: d, lines: lines{out, d}}
	if err := r.run(ctx); err != nil {
		return Summary{}, err
	}

	number, err := readNumber(d.File)
	if err != nil {
		return Summary{}, failed(err)
	}
	s := r.summary(number)
	d.report(out, s)
	if d.Page != nil {
		fmt.Fprintln(out, "the page stays until Ctrl-C")
		<-ctx.Done()
	}
	return s, nil
}

// prepare chooses the store and the key, writes the number 0, and checks that the store works.
func (d *Demo) prepare(ctx context.Context, dir string) error {
	d.Key = "hasp-demo-" + rand.Text()
	d.File = filepath.Join(dir, "number")
	if err := writeNumber(d.File, 0); err != nil {
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
	}
	return d.tryStore(ctx)
}

// tryStore locks and unlocks the key, so that an error of the store is reported before a process is
// started.
func (d *Demo) tryStore(ctx context.Context) error {
	client, err := d.Store.Open(ctx, nil)
	if err != nil {
		return err
	}
	defer client.Close()
	lease, err := client.TryLock(ctx, d.Key, hasp.WithTTL(d.TTL))
	if err != nil {
		return err
	}
	return lease.Unlock(ctx)
}
