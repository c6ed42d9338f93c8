package redlock

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/hashicorp/go-multierror"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

var errClosed = errors.New("the driver is closed")

// outage is the error of a quorum that cannot be had: a *multierror.Error with
// one error for each node that does not vote, which names it.
func outage(errs []error) error {
	n := len(errs)
	m := &multierror.Error{ErrorFormat: func(errs []error) string {
		lines := make([]string, 0, len(errs)+1)
		lines = append(lines, fmt.Sprintf("no quorum: %d of %d nodes do not vote", len(errs), n))
		for _, err := range errs {
			lines = append(lines, err.Error())
		}
		return strings.Join(lines, "\n")
	}}
	for _, err := range errs {
		if err != nil {
			m.Errors = append(m.Errors, err)
		}
	}
	return m
}

// plain is err as the error of one node of several. It matches none of the
// definite errors and no context's: what one node says is not the verdict.
func (n *node) plain(err error, took time.Duration) error {
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%s: no answer within %v: %w", n.name, took.Round(time.Millisecond), os.ErrDeadlineExceeded)
	case definite(err):
		return fmt.Errorf("%v", err)
	}
	return err
}

// isTimeout reports whether err says that nobody has answered. The deadline of
// a connection may pass a moment before that of the context which it is from.
func isTimeout(err error) bool {
	var late net.Error
	return errors.As(err, &late) && late.Timeout()
}

// unsent reports whether err says that a command has not been sent.
func unsent(err error) bool {
	var op *net.OpError
	return errors.As(err, new(*redisstore.DialError)) || errors.As(err, &op) && op.Op == "dial"
}

// definite reports whether err says what the store did, which is nothing.
func definite(err error) bool {
	return errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrLost) || errors.Is(err, backend.ErrInvalid) || errors.Is(err, errors.ErrUnsupported)
}
