package demo

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/crew"
)

// Role is the role of a worker process. A program must run [Work] if [crew.Role] returns Role.
const Role = "demo worker"

// order is the first message to a worker. Any second message starts the worker's turns.
type order struct {
	Demo
	Turns int // how many increments the worker makes
	Stall int // the turn, from 1, in which the worker stops while it holds the lock; 0 is no turn
}

// event is a message of a worker.
type event struct {
	Kind   string    `json:"kind"`
	At     time.Time `json:"at"`
	Number int       `json:"number,omitempty"` // the number that was written
	Error  string    `json:"error,omitempty"`  // why the worker failed
}

// These are the kinds of events.
const (
	isReady  = "ready"
	isWaits  = "waits"
	isHolds  = "holds"
	isStalls = "stalls" // holds the lock and waits to be killed
	isWrote  = "wrote"
	isFrees  = "frees" // is about to unlock
	isFailed = "failed"
)

// worker is one process of the demo. To increment the number in a file, it reads, pauses, and
// writes. Only the lock prevents two workers from writing the same number.
type worker struct {
	order
	client  *hasp.Client
	referee *crew.Pipe
}

// Work runs a worker process of a demo. If the referee ends, Work ends the process.
func Work(ctx context.Context) error {
	// Ctrl-C reaches the whole process group. Ignore it, because the referee ends its workers.
	signal.Ignore(os.Interrupt, syscall.SIGQUIT)

	w := &worker{referee: crew.Parent()}
	err := w.work(ctx)
	if err != nil {
		w.report(event{Kind: isFailed, Error: err.Error()})
	}
	return err
}

func (w *worker) work(ctx context.Context) (err error) {
	if err := w.referee.Receive(&w.order); err != nil {
		return err
	}
	if !w.NoLock {
		if w.client, err = w.Store.Open(ctx, nil); err != nil {
			return err
		}
		defer w.client.Close()
	}

	var message any
	w.report(event{Kind: isReady})
	if err := w.referee.Receive(&message); err != nil {
		return err
	}
	go func() {
		_ = w.referee.Receive(&message) // returns an error when the referee has ended
		os.Exit(exitFailed)
	}()

	for i := range w.Turns {
		time.Sleep(about(w.Work)) // stands for work that needs no lock
		if err := w.turn(ctx, i+1 == w.Stall); err != nil {
			return err
		}
	}
	return nil
}

// turn makes one increment under the lock. If the lock is lost before the number is written, it
// tries again.
func (w *worker) turn(ctx context.Context, stall bool) error {
	if w.NoLock {
		return w.increment(func() error { return nil }, false)
	}
	for {
		wrote := false
		w.report(event{Kind: isWaits})
		err := hasp.Do(ctx, w.client, w.Key, func(_ context.Context, lease *hasp.Lease) error {
			err := w.increment(lease.Err, stall)
			wrote = err == nil
			return err
		}, hasp.WithTTL(w.TTL))

		// The lease may be lost after increment has checked it and written. Do not repeat such a
		// turn.
		if !errors.Is(err, hasp.ErrLost) {
			return err
		} else if wrote {
			return nil
		}
	}
}

// increment reads, pauses and writes. Just before it writes, it calls valid, because the lease may
// be lost during the pause.
func (w *worker) increment(valid func() error, stall bool) error {
	w.report(event{Kind: isHolds})
	defer w.report(event{Kind: isFrees})
	if stall {
		w.report(event{Kind: isStalls})
		select {} // until the referee kills it
	}

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
	_ = w.referee.Send(e) // an error means that the referee has ended; then work ends the process
}

// about returns a random duration between d/2 and 3d/2.
func about(d time.Duration) time.Duration {
	return d/2 + rand.N(d+1)
}

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
