package cli

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/cli/text"
	"github.com/hasplock/hasp/internal/cli/ui"
)

// demo has the settings of a call of hasp demo.
type demo struct {
	Increments int           // how many each worker makes
	TTL        time.Duration // the term of the lock
	Work       time.Duration // about how long an increment takes
	NoLock     bool
	Store      hasp.Config
	Key        string
	File       string // the file with the number
	Began      time.Time
}

// The demo starts demoWorkers workers. The constant victim is the number of the one that it kills.
const demoWorkers, victim = 5, 2

func (a *app) demoCommand() *cobra.Command {
	var d demo
	var page bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Watch several processes take turns at one lock",
		Long: `demo starts five worker processes that increment a number in a file. Each of them
reads the number, pauses, and writes it back. Two workers that do so at the same
time overwrite each other's increments, and the lock prevents that.

On the way, a worker is killed with SIGKILL while it holds the lock. The key
stays locked until its term ends; then another worker takes over. A new process
makes the increments that the killed worker had left. At the end the number must
be right. The workers print a line for each increment.

Without --url, --config or HASP_URL the lock is a file in a temporary directory.
With --no-lock there is no lock, and the number goes wrong.

With --ui, demo waits until a browser has opened the page of "hasp ui", and works
slowly enough to be followed there. The page stays until Ctrl-C.

The exit code is 0 if the number is right, and 1 if it is wrong.`,
		Example: `  hasp demo
  hasp demo --no-lock
  hasp demo --ui
  hasp demo --url spinlock+redis://localhost:6379`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d.Work = 20 * time.Millisecond
			if page {
				d.Work = 300 * time.Millisecond // long enough for a person to follow each hold
			}
			if page && !cmd.Flag("increments").Changed {
				d.Increments = 8
			}
			return a.demo(cmd, &d, page)
		},
	}

	f := cmd.Flags()
	f.IntVar(&d.Increments, "increments", 20, "increments that each worker makes")
	d.TTL = 1500 * time.Millisecond
	f.Var((*duration)(&d.TTL), "ttl",
		"term of the lock: how long the key stays locked after the kill (default: 1.5s)")
	f.BoolVar(&d.NoLock, "no-lock", false, "use no lock, and see the number go wrong")
	f.BoolVar(&page, "ui", false, "show the lock on a web page, as hasp ui does")
	cmd.MarkFlagsMutuallyExclusive("ui", "no-lock")
	return cmd
}

// demo runs the demo, and sets the exit code to exitFailed if the number is wrong. If page is true,
// it also serves the page until Ctrl-C.
func (a *app) demo(cmd *cobra.Command, d *demo, page bool) error {
	if d.Increments < 1 {
		return usagef("--increments %d: want 1 or more", d.Increments)
	}

	// In "hasp demo | head", a write raises SIGPIPE. Catch it, so that the demo cleans up.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	dir, err := os.MkdirTemp("", "hasp-demo-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)

	d.Key = "hasp-demo-" + rand.Text()
	d.File = filepath.Join(dir, "number")
	if err := writeNumber(d.File, 0); err != nil {
		return err
	}

	ctx := cmd.Context()
	place := "no lock at all"
	if !d.NoLock {
		d.Store, err = a.demoStore(cmd, dir)
		if err != nil {
			return err
		}
		place = d.Store.Strategy

		// Use the store once, to report its errors before a process is started.
		client, err := d.Store.Open(ctx, &hasp.Options{Owner: ownerOf(d.Store, cmd.CommandPath())})
		if err != nil {
			return err
		}
		defer client.Close()
		if err := hasp.Do(ctx, client, d.Key, doNothing, hasp.WithTTL(d.TTL)); err != nil {
			return err
		}
		if page {
			end, err := a.demoPage(ctx, d, client)
			if err != nil {
				return err
			}
			defer end()
		}
	}

	fmt.Fprintf(a.out, "%d processes, one number in a file, %s\n", demoWorkers, place)
	d.Began = time.Now()
	if err := a.runWorkers(ctx, d); err != nil {
		return err
	}

	number, err := readNumber(d.File)
	if err != nil {
		return err
	}
	a.reportDemo(d, number)
	if page {
		fmt.Fprintln(a.out, "the page stays until Ctrl-C")
		<-ctx.Done()
	}
	return nil
}

// demoStore returns the store that the flags or the environment name. If they name none, it returns
// a store of files in the directory dir.
func (a *app) demoStore(cmd *cobra.Command, dir string) (hasp.Config, error) {
	_, isInEnv := os.LookupEnv("HASP_URL")
	isGiven := isInEnv || cmd.Flag("url").Changed || cmd.Flag("config").Changed
	if !isGiven {
		return hasp.Config{Strategy: "filelock", Nodes: []string{filepath.Join(dir, "locks")}}, nil
	}

	c, err := a.config(cmd)
	if err != nil {
		return c, err
	}
	if describe(c.Strategy).Reach == backend.Process {
		return c, usagef("%s excludes the callers of one process, and the demo starts several; "+
			"name another strategy, or no store", c.Strategy)
	}
	return c, nil
}

// reportDemo prints what the number at the end shows, and sets the exit code if it is wrong.
func (a *app) reportDemo(d *demo, number int) {
	want := demoWorkers * d.Increments
	say := func(format string, args ...any) { fmt.Fprintf(a.out, "  "+format+"\n", args...) }
	if number != want {
		a.code = exitFailed
		say("WRONG: the number is %d, and %d increments were made.", number, want)
	}

	switch {
	case d.NoLock && number == want:
		say("ok: %d of %d, by luck: no lock kept the workers apart. Try it again.", number, want)
	case d.NoLock:
		say("Workers overwrote increments of each other. A lock prevents that: hasp demo")
	case number == want:
		say("ok: the number is %d after %d increments by %d processes, in %.1fs.", number, want,
			demoWorkers, time.Since(d.Began).Seconds())
		say("Worker %d was killed while it held the lock. "+
			"Another one took over when its term of %s had ended.", victim, text.Duration(d.TTL))
		say("The same without the lock: hasp demo --no-lock")
	}
}

// demoPage serves the page of hasp ui until the caller calls the function end. It returns when a
// browser has opened the page, or with an error when ctx ends first. After an error, the caller
// need not call end.
func (a *app) demoPage(ctx context.Context, d *demo, client *hasp.Client) (end func(), err error) {
	ln, err := listenAt(ctx, "127.0.0.1:0")
	if err != nil {
		return nil, err
	}

	s := ui.New(client, ui.Options{
		Store:   d.Store.Strategy,
		Ordered: describe(d.Store.Strategy).Order == InOrder,
		Prefix:  d.Key,
		Every:   100 * time.Millisecond, // often enough to show each hold
		Listen:  ln.Addr().String(),
		Redact:  a.store.redact,
	})
	serving, cancel := context.WithCancel(ctx)
	var page sync.WaitGroup
	page.Go(func() { _ = s.Serve(serving, ln) }) // if Serve fails, the browser shows that
	end = func() {
		cancel()
		page.Wait()
	}

	_, err = fmt.Fprintf(a.out, "open http://%s/#%s to see the lock; the demo begins then\n",
		ln.Addr(), ui.ID(d.Key))
	if err == nil {
		err = s.AwaitBrowser(ctx)
	}
	if err != nil {
		end()
	}
	return end, err
}

// workerEnv names the environment variable that makes a process a worker.
const workerEnv = "HASP_DEMO_WORKER"

// runWorkers returns when the workers have made all increments, or returns the error of the first
// worker that failed. In both cases no worker runs any more.
func (a *app) runWorkers(ctx context.Context, d *demo) error {
	working, cancel := context.WithCancel(ctx)
	var live sync.WaitGroup
	defer live.Wait()
	defer cancel() // kills the workers

	results := make(chan error, demoWorkers+1) // room for all workers, so that none blocks
	start := func(w worker) error {
		wait, err := a.startWorker(working, w)
		if err != nil {
			return err
		}
		live.Go(func() { results <- wait() })
		return nil
	}

	lastTurn := d.Increments/3 + 1 // of the victim
	for number := 1; number <= demoWorkers; number++ {
		w := worker{demo: *d, Number: number, Turns: d.Increments}
		if number == victim && !d.NoLock {
			w.Dies = lastTurn
		}
		if err := start(w); err != nil {
			return err
		}
	}

	for left := demoWorkers; left > 0; left-- {
		err := <-results
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, errKilled):
			fmt.Fprintf(a.out, "%s  worker %d starts in its place\n", d.clock(), demoWorkers+1)
			left++ // for the new worker

			// The victim was killed before it made the increment of its last turn.
			turns := d.Increments - lastTurn + 1
			err = start(worker{demo: *d, Number: demoWorkers + 1, Turns: turns})
		}

		if err != nil {
			return err
		}
	}

	return nil
}

// startWorker starts the process of w, which ends when ctx ends. The caller must call the function
// wait, which sends w to the process, and returns the process's error when it has ended.
func (a *app) startWorker(ctx context.Context, w worker) (wait func() error, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}

	// Do not use a.out for stdout. Each worker would then have a pipe of its own, and the lines of
	// the workers would lose their order.
	var stderr strings.Builder
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), workerEnv+"=1")
	cmd.Stdout = a.stdout
	cmd.Stderr = &stderr
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, err
	}

	return func() error {
		// An error of Encode means that the worker has ended. The pipe stays open, because a worker
		// ends when its stdin ends.
		_ = json.NewEncoder(in).Encode(w)
		err := cmd.Wait()
		return workerError(cmd, err, w.Number, stderr.String())
	}, nil
}

var errKilled = errors.New("killed, as it should be")

// workerError returns the error of a worker that has ended, given the error of cmd.Wait and what
// the worker has written to stderr. It is errKilled if the worker is the victim and was killed as
// planned.
func workerError(cmd *exec.Cmd, err error, number int, stderr string) error {
	ws, _ := cmd.ProcessState.Sys().(syscall.WaitStatus)
	switch {
	case err == nil:
		return nil
	case stderr == "" && number == victim: // a worker that fails says why
		return errKilled
	case stderr == "" && ws.Signaled(): // SIGPIPE, if no process reads the output any more
		return signalError(ws.Signal())
	}

	code := max(cmd.ProcessState.ExitCode(), exitFailed) // ExitCode is -1 after a signal
	why := strings.TrimPrefix(cmp.Or(stderr, err.Error()), "hasp: ")
	return codeError{code, fmt.Errorf("worker %d: %s", number, why)}
}

// clock formats, for a line of output, the time since the start of the demo.
func (d *demo) clock() string { return fmt.Sprintf("%8.3fs", time.Since(d.Began).Seconds()) }

// worker is one process of the demo. To increment the number in a file, it reads, pauses, and
// writes. Only the lock prevents two workers from writing the same number. A worker prints a line
// while it holds the lock, so that the lines are in order. It receives this type as JSON.
type worker struct {
	demo
	Number int // from 1
	Turns  int // how many increments it makes
	Dies   int // the turn in which it is killed, or 0
}

// workDemo is the main function of a worker. It returns the exit code.
func workDemo(ctx context.Context) int {
	// Ctrl-C reaches the whole process group. Ignore it, because the parent ends its workers.
	signal.Ignore(os.Interrupt, syscall.SIGQUIT)

	err := new(worker).work(ctx)
	if err != nil {
		fmt.Fprint(os.Stderr, err)
	}
	return exitCode(err)
}

// work receives w from the parent and makes the increments.
func (w *worker) work(ctx context.Context) error {
	if err := json.NewDecoder(os.Stdin).Decode(w); err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // wait until the parent has ended
		os.Exit(exitFailed)
	}()

	var client *hasp.Client
	if !w.NoLock {
		var err error
		if client, err = w.Store.Open(ctx, nil); err != nil {
			return err
		}
		defer client.Close()
	}

	for i := range w.Turns {
		time.Sleep(about(w.Work)) // stands for work that needs no lock
		if err := w.turn(ctx, client, i+1 == w.Dies); err != nil {
			return err
		}
	}

	return nil
}

// turn makes one increment under the lock. If the lock is lost before the number is written, turn
// tries again. If dies is true, the worker kills itself instead, while it holds the lock.
func (w *worker) turn(ctx context.Context, client *hasp.Client, dies bool) error {
	if w.NoLock {
		return w.increment(func() error { return nil }, "")
	}
	for {
		hasWritten := false
		began := time.Now()
		err := hasp.Do(ctx, client, w.Key, func(_ context.Context, lease *hasp.Lease) error {
			if dies {
				fmt.Printf("%s  worker %d (pid %d) is killed while it holds the lock; "+
					"the key stays locked until its term ends\n", w.clock(), w.Number, os.Getpid())
				self, _ := os.FindProcess(os.Getpid())
				_ = self.Kill()
				select {} // until the signal has arrived
			}

			err := w.increment(lease.Err, " after waiting "+text.Duration(time.Since(began)))
			hasWritten = err == nil
			return err
		}, hasp.WithTTL(w.TTL))

		if !errors.Is(err, hasp.ErrLost) {
			return err // nil, or an error other than a loss
		}
		if hasWritten {
			return nil // the lease was lost only afterwards, so do not repeat the turn
		}
	}
}

// increment reads, pauses and writes. Just before it writes, it calls the function valid, because
// the lease may be lost during the pause. If valid returns an error, increment returns that and
// does not write. The argument how is the end of the line that increment prints.
func (w *worker) increment(valid func() error, how string) error {
	n, err := readNumber(w.File)
	if err != nil {
		return err
	}
	time.Sleep(about(w.Work))
	if err := valid(); err != nil {
		return err
	}
	if err := writeNumber(w.File, n+1); err != nil {
		return err
	}
	_, err = fmt.Printf("%s  worker %d writes %d of %d%s\n", w.clock(), w.Number, n+1,
		demoWorkers*w.Increments, how)
	return err
}

// about returns a random duration between d/2 and 3d/2.
func about(d time.Duration) time.Duration { return d/2 + mathrand.N(d+1) }

// readNumber returns the number in the file.
func readNumber(file string) (n int, err error) {
	b, err := os.ReadFile(file)
	if err == nil {
		_, err = fmt.Sscan(string(b), &n)
	}
	return n, err
}

// writeNumber replaces the file in one step. So a worker without the lock never reads half a
// number.
func writeNumber(file string, n int) error {
	tmp := fmt.Sprintf("%s.%d", file, os.Getpid())
	if err := os.WriteFile(tmp, []byte(strconv.Itoa(n)+"\n"), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, file)
}
