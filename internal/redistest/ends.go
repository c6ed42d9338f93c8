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
	Name     string
	deadline bool // the call must return the error of a deadline
	Start    func(context.Context) (context.Context, context.CancelFunc)
}

// Match reports whether err fits this way of ending.
func (e Ending) Match(err error) bool {
	if e.deadline {
		return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded)
	}
	return errors.Is(err, context.Canceled)
}

const moment = 50 * time.Millisecond

// Endings are the ways to end a context.
var Endings = []Ending{
	{"cancelled", false, func(ctx context.Context) (context.Context, context.CancelFunc) {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		time.AfterFunc(moment, cancel)
		return ctx, cancel
	}},
	{"cancelled without a deadline", false, func(
		ctx context.Context,
	) (context.Context, context.CancelFunc) {
		ctx, cancel := context.WithCancel(ctx)
		time.AfterFunc(moment, cancel)
		return ctx, cancel
	}},
	{"deadline", true, func(ctx context.Context) (context.Context, context.CancelFunc) {
		return context.WithTimeout(ctx, moment)
	}},
	{"lazy deadline", true, func(ctx context.Context) (context.Context, context.CancelFunc) {
		c := calls.WithTimeout(ctx, nil, moment)
		return c, c.End
	}},
	{"quit", false, func(ctx context.Context) (context.Context, context.CancelFunc) {
		quit, cancel := context.WithTimeout(ctx, moment)
		c := calls.WithTimeout(ctx, quit, time.Minute)
		return c, func() {
			c.End()
			cancel()
		}
	}},
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
