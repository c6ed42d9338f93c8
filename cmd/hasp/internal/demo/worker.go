package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hasplock/hasp"
)

// WorkerCommand is the command of hasp that runs Work.
const WorkerCommand = "demo-worker"

// order is the first line of a worker's standard input. It is not in the
// arguments, which other users can read, because the nodes may hold a password.
type order struct {
	Owner  string        `json:"owner"` // the label of its locks
	Store  hasp.Config   `json:"store"`
	NoLock bool          `json:"no_lock"`
	Key    string        `json:"key"`
	TTL    time.Duration `json:"ttl"`
	File   string        `json:"file"`  // has the number in it
	Turns  int           `json:"turns"` // how many increments to make
	Stall  int           `json:"stall"` // the turn, from 1, in which it stops while it holds the lock; 0 is none
	Work   time.Duration `json:"work"`  // about how long a turn holds the lock
}

// event is a report of a worker: a line on its standard output.
type event struct {
	Kind   string    `json:"kind"`
	At     time.Time `json:"at"`
	Number int       `json:"number,omitempty"` // the number it wrote
}

// Kinds of events.
const (
	isReady  = "ready"
	isWaits  = "waits"
	isHolds  = "holds"
	isStalls = "stalls" // holds the lock, and does nothing more
	isWrote  = "wrote"
	isFrees  = "frees" // is about to unlock
)

// worker is one process of the demo. It increments a number in a file without
// any care: it reads, pauses, and writes. Only the lock keeps two workers from
// writing the same number.
type worker struct {
	order
	client *hasp.Client
	out    *json.Encoder
}

// Work is a worker process of a demo. It reads its order from in. When in ends, it
// ends the process, because the referee has ended.
func Work(ctx context.Context, in io.Reader, out io.Writer) error {
	w := &worker{out: json.NewEncoder(out)}
	lines := bufio.NewReader(in)
	line, err := lines.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("%w: %s can only be started by hasp demo", hasp.ErrInvalid, WorkerCommand)
	}
	if err := json.Unmarshal(line, &w.order); err != nil {
		return err
	}
	// Ctrl-C reaches the whole process group. The referee ends its workers
	// itself.
	signal.Ignore(os.Interrupt, syscall.SIGQUIT)
	if !w.NoLock {
		if w.client, err = w.Store.Open(ctx, &hasp.Options{Owner: w.Owner}); err != nil {
			return err
		}
		defer w.client.Close()
	}

	w.report(event{Kind: isReady})
	if _, err := lines.ReadByte(); err != nil { // the start
		return nil
	}
	go func() {
		_, _ = io.Copy(io.Discard, lines)
		os.Exit(exitFailed)
	}()
	for i := range w.Turns {
		time.Sleep(about(w.Work)) // work that needs no lock
		if err := w.turn(ctx, i+1 == w.Stall); err != nil {
			return err
		}
	}
	return nil
}

// turn makes one increment. If the lock is lost before the number is written,
// turn repeats it.
func (w *worker) turn(ctx context.Context, stall bool) error {
	if w.NoLock {
		w.report(event{Kind: isHolds})
		defer w.report(event{Kind: isFrees})
		return w.increment(func() error { return nil })
	}
	for {
		w.report(event{Kind: isWaits})
		lease, err := w.client.Lock(ctx, w.Key, hasp.WithTTL(w.TTL))
		if err != nil {
			return err
		}
		w.report(event{Kind: isHolds})
		if stall {
			w.report(event{Kind: isStalls})
			select {} // until the referee kills it
		}

		err = w.increment(lease.Err)
		w.report(event{Kind: isFrees})
		unlockErr := lease.Unlock(ctx)
		switch {
		case errors.Is(err, hasp.ErrLost): // the number is not written
			continue
		case err != nil:
			return err
		case errors.Is(unlockErr, hasp.ErrLost):
			// The lease was lost after increment checked it. The number is
			// written, so the turn is not repeated.
			return nil
		}
		return unlockErr
	}
}

// increment reads, pauses and writes. It calls valid just before it writes,
// because the lease may be lost during the pause.
func (w *worker) increment(valid func() error) error {
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
	w.report(event{Kind: isWrote, Number: n + 1})
	return nil
}

func (w *worker) report(e event) {
	e.At = time.Now()
	_ = w.out.Encode(e) // if the referee has ended, standard input ends as well
}

// about returns a random duration between d/2 and 3d/2.
func about(d time.Duration) time.Duration {
	return d/2 + rand.N(d+1)
}

func readNumber(file string) (int, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0, fmt.Errorf("%s does not hold a number: %w", file, err)
	}
	return n, nil
}

// writeNumber replaces the whole file at once. So a worker that reads without
// the lock reads an old number, never half of one.
func writeNumber(file string, n int) error {
	tmp := fmt.Sprintf("%s.%d", file, os.Getpid())
	if err := os.WriteFile(tmp, []byte(strconv.Itoa(n)+"\n"), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, file)
}
