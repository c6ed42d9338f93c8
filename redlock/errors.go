package redlock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// nodeError returns err as the error of one node of several. The result matches no definite
// error and no context error, because one node does not decide the outcome of a call.
func (n *node) nodeError(err error, took time.Duration) error {
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%s: no answer within %v: %w", n.name, took.Round(time.Millisecond), os.ErrDeadlineExceeded)
	case backend.Definite(err):
		// Do not wrap err, so that callers do not take it for the verdict of a quorum.
		return fmt.Errorf("%v", err)
	}
	return err
}

// notSent reports whether err says that a command has not been sent.
func notSent(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// disconnected reports whether err says that the connection was closed.
func disconnected(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrClosedPipe) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// voteAfter returns the vote of a node whose call failed with err.
func voteAfter(err error) vote {
	if resp.IsReply(err) || notSent(err) {
		return failed
	}

	// The node may have executed the command, which may have been sent.
	return unknown
}
