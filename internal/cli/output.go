package cli

import (
	"bytes"
	"context"
	"errors"
	"io"
	"syscall"
)

// output is stdout. The first error of a write is the cause of ctx's end, and the error of all
// later writes.
type output struct {
	ctx  context.Context
	fail context.CancelCauseFunc // ends ctx
	to   io.Writer
}

// Write returns early if ctx ends. Otherwise no signal could end hasp while a write blocks, for
// example in a pipe to a program that does not read on.
func (o output) Write(b []byte) (int, error) {
	b = bytes.Clone(b) // the write may go on after Write has returned
	writeErr, err := unlessEnded(o.ctx, func() error {
		_, err := o.to.Write(b)
		return err
	})
	if errors.Is(writeErr, syscall.EPIPE) {
		writeErr = signalError(syscall.SIGPIPE) // no error for the user, as in "hasp demo | head"
	}
	if writeErr != nil {
		o.fail(writeErr)
		err = context.Cause(o.ctx) // of several writes, the first error counts
	}
	if err != nil {
		return 0, err
	}
	return len(b), nil
}

// unlessEnded calls f, which may block in a read or a write, and returns the result. If ctx ends
// first, it returns the cause, and the goroutine that runs f stays until the program ends.
func unlessEnded[T any](ctx context.Context, f func() T) (v T, err error) {
	results := make(chan T, 1)
	go func() { results <- f() }()
	select {
	case v = <-results:
		return v, nil
	case <-ctx.Done():
		return v, context.Cause(ctx)
	}
}
