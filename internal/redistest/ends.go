package redistest

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"
)

// Between fails the test unless an event came in time: at the earliest from after began,
// and at the latest to after it.
func Between(t testing.TB, what string, began time.Time, from, to time.Duration) {
	t.Helper()
	if took := time.Since(began); took < from || took > to {
		t.Errorf("%s: after %v, want %v to %v", what, took, from, to)
	}
}

// Ending is one way in which the context of a call ends after a moment.
type Ending struct {
	Name   string
	Start  func(context.Context) (context.Context, context.CancelFunc)
	errors []error // one of which the call returns
}

// Match reports whether err says that the context has ended in this way.
func (e Ending) Match(err error) bool {
	for _, want := range e.errors {
		if errors.Is(err, want) {
			return true
		}
	}
	return false
}

// Endings are all ways in which a context ends.
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
}

// EachURL runs f with servers that have a URL of each kind, and with the parameters that
// the URL needs.
func EachURL(t *testing.T, f func(t *testing.T, srv *Server, params map[string]string)) {
	for name, o := range map[string]*Options{
		"tcp": {Own: true}, "tls": {Own: true, TLS: true}, "unix": {Own: true, Unix: true}, "password": {Password: "secret"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := Start(t, o)
			f(t, srv, srv.Params())
		})
	}
}
