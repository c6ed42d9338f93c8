package main

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

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
)

// order is what a worker of the demo is told, on standard input and not in
// its arguments, since the nodes may hold a password.
type order struct {
	Worker int           `json:"worker"` // from 1
	Store  hasp.Config   `json:"store"`
	NoLock bool          `json:"no_lock"`
	Key    string        `json:"key"`
	TTL    time.Duration `json:"ttl"`
	File   string        `json:"file"` // of the number
	Turns  int           `json:"turns"`
	Stall  int           `json:"stall"` // the turn in which it hangs while holding, from 1; 0 for none
	Work   time.Duration `json:"work"`  // about how long a turn holds the lock
}

// event is what a worker tells, one a line on standard output.
type event struct {
	What   string    `json:"what"`
	At     time.Time `json:"at"`
	Number int       `json:"number,omitempty"` // wrote
	Text   string    `json:"text,omitempty"`   // failed: why
	Code   int       `json:"code,omitempty"`   // failed: the exit code for it

	worker int // who told it; the referee's
}

// What a worker tells.
const (
	isReady  = "ready"
	isWaits  = "waits"
	isHolds  = "holds"
	isStalls = "stalls" // holds, and will do nothing more
	isWrote  = "wrote"
	isFrees  = "frees" // is about to unlock
	isFailed = "failed"
)

// worker is one process of the demo. It increments a number in a file, and
// does it as badly as it can: it reads, thinks, and writes. Only the lock
// keeps two from writing the same number.
type worker struct {
	order
	client *hasp.Client
	out    *json.Encoder
}

func (a *app) workerCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "demo-worker",
		Hidden: true,
		Args:   noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			w := &worker{out: json.NewEncoder(a.out)}
			err := w.run(cmd.Context(), a.in)
			if err != nil && w.Worker > 0 {
				w.tell(event{What: isFailed, Text: message(err), Code: exitCode(err)})
			}
			return err
		},
	}
}

// run does what in says. It ends when in does: then the referee is gone.
func (w *worker) run(ctx context.Context, in io.Reader) error {
	lines := bufio.NewReader(in)
	text, err := lines.ReadBytes('\n')
	if err != nil {
		return usagef("demo-worker is started by hasp demo, and by nobody else")
	}
	if err := json.Unmarshal(text, &w.order); err != nil {
		return err
	}
	// Ctrl-C reaches the whole group; the referee ends its workers itself.
	signal.Ignore(os.Interrupt, syscall.SIGQUIT)
	if !w.NoLock {
		o := &hasp.Options{Owner: owner(doing(w.Worker))}
		if w.client, err = w.Store.Open(ctx, o); err != nil {
			return err
		}
		defer w.client.Close()
	}
	w.tell(event{What: isReady})
	if _, err := lines.ReadByte(); err != nil { // the start
		return nil
	}
	go func() {
		_, _ = io.Copy(io.Discard, lines)
		os.Exit(exitFailed)
	}()
	for i := range w.Turns {
		time.Sleep(about(w.Work)) // a life outside the lock
		if err := w.turn(ctx, i+1 == w.Stall); err != nil {
			return err
		}
	}
	return nil
}

// doing is what the owner of a worker's locks says after host and pid.
func doing(worker int) string { return "hasp demo worker " + strconv.Itoa(worker) }

// turn is one increment.
func (w *worker) turn(ctx context.Context, stall bool) error {
	if w.NoLock {
		w.tell(event{What: isHolds})
		defer w.tell(event{What: isFrees})
		return w.increment(func() error { return nil })
	}
	for {
		w.tell(event{What: isWaits})
		lease, err := w.client.Lock(ctx, w.Key, hasp.WithTTL(w.TTL))
		if err != nil {
			return err
		}
		w.tell(event{What: isHolds})
		if stall {
			w.tell(event{What: isStalls})
			select {} // until it is killed
		}
		err = w.increment(lease.Err)
		w.tell(event{What: isFrees})
		uerr := lease.Unlock(ctx)
		switch {
		case errors.Is(err, hasp.ErrLost): // nothing was written
			continue
		case err != nil:
			return err
		case errors.Is(uerr, hasp.ErrLost): // it was written, and in time as far as anybody can tell
			return nil
		}
		return uerr
	}
}

// increment reads, thinks and writes. It asks valid in the last moment: a
// lease may be lost while one thinks.
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
	w.tell(event{What: isWrote, Number: n + 1})
	return nil
}

func (w *worker) tell(e event) {
	e.At = time.Now()
	_ = w.out.Encode(e) // if the referee is gone, standard input tells
}

// about returns a duration between a half of d and one and a half.
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

// writeNumber replaces the file as a whole, so that a reader without the lock
// finds an old number and never half of one.
func writeNumber(file string, n int) error {
	tmp := fmt.Sprintf("%s.%d", file, os.Getpid())
	if err := os.WriteFile(tmp, []byte(strconv.Itoa(n)+"\n"), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, file)
}
