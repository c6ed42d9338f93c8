package redistest

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/calls"
)

// Ending is one way to end the context of a call after a moment.
type Ending struct {
	Name   string
	Start  func(context.Context) (context.Context, context.CancelFunc)
	errors []error // the call must return one of these
}

// Match reports whether err fits this way of ending.
func (e Ending) Match(err error) bool {
	for _, want := range e.errors {
		if errors.Is(err, want) {
			return true
		}
	}
	return false
}

// Endings are the ways to end a context.
var Endings = []Ending{
	{"cancelled", func(ctx context.Context) (context.Context, context.CancelFunc) {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		time.AfterFunc(50*time.Millisecond, cancel)
		return ctx, cancel
	}, []error{context.Canceled}},
	{"cancelled without a deadline", func(ctx context.Context) (context.Context, context.CancelFunc) {
		ctx, cancel := context.WithCancel(ctx)
		time.AfterFunc(50*time.Millisecond, cancel)
		return ctx, cancel
	}, []error{context.Canceled}},
	{"deadline", func(ctx context.Context) (context.Context, context.CancelFunc) {
		return context.WithTimeout(ctx, 50*time.Millisecond)
	}, []error{context.DeadlineExceeded, os.ErrDeadlineExceeded}},
	{"lazy deadline", func(ctx context.Context) (context.Context, context.CancelFunc) {
		c := calls.WithTimeout(ctx, nil, 50*time.Millisecond)
		return c, c.End
	}, []error{context.DeadlineExceeded, os.ErrDeadlineExceeded}},
	{"quit", func(ctx context.Context) (context.Context, context.CancelFunc) {
		quit, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
		c := calls.WithTimeout(ctx, quit, time.Minute)
		return c, func() {
			c.End()
			cancel()
		}
	}, []error{context.Canceled}},
}

// EachURL runs f once for each kind of URL. It passes a server with a URL of that kind, and the
// parameters that the URL needs.
func EachURL(t *testing.T, f func(t *testing.T, srv *Server, params map[string]string)) {
	for name, o := range map[string]*Options{
		"tcp": {Own: true}, "tls": {Own: true, TLS: true, User: "ann", Password: "s3cret"},
		"unix": {Own: true, Unix: true, Password: "p@/w"}, "password": {Password: "p@ss/w%rd?&#:"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := Start(t, o)
			f(t, srv, srv.Params())
		})
	}
}
