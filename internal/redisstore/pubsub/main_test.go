package pubsub_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }

func open(t *testing.T, node string, params map[string]string) (*redisstore.Store, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	s, err := redisstore.Open(ctx, node, params)
	if s != nil {
		t.Cleanup(func() { s.Close() })
	}
	return s, err
}

// soon is what a call may take that is to end within a moment: much longer
// than any machine needs, much shorter than any other bound here.
const soon = 20 * time.Second

// stores opens a server by every kind of URL.
func stores(t *testing.T, f func(t *testing.T, s *redisstore.Store, srv *redistest.Server)) {
	for name, o := range map[string]*redistest.Options{
		"tcp": {Own: true}, "tls": {Own: true, TLS: true}, "unix": {Own: true, Unix: true}, "password": {Password: "secret"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := redistest.Start(t, o)
			params := map[string]string{}
			if srv.CAFile != "" {
				params["ca"] = srv.CAFile
			}
			s, err := open(t, srv.URL(), params)
			if err != nil {
				t.Fatal(err)
			}
			f(t, s, srv)
		})
	}
}

// ended fails unless f returns soon.
func ended(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(soon):
		t.Fatalf("%s goes on", what)
	}
}

// endings are how the context of a call ends after a moment, and the errors
// that say so.
var endings = []struct {
	name   string
	start  func(context.Context) (context.Context, context.CancelFunc)
	errors []error
}{
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

func isOneOf(err error, all []error) bool {
	for _, e := range all {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

type hook struct{ err error }

func (hook) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (h hook) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(context.Context, []redis.Cmder) error { return h.err }
}
