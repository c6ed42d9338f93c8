// Package adaptertest has what the tests of all adapters share.
package adaptertest

import (
	"context"
	"errors"
	"maps"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
)

// Secret is the password in the URLs of tests. No error may contain it.
const Secret = "hunter2"

// Driver opens the driver that a user gets by a URL. It takes as long as a busy machine needs.
func Driver(ctx context.Context, url string) (backend.Driver, error) {
	c, err := hasp.ParseURL(url)
	if err != nil {
		return nil, err
	}
	c.Params = maps.Clone(c.Params)
	if c.Params == nil {
		c.Params = hasp.Params{}
	}
	c.Params["timeout"] = "1m"
	return c.Driver(ctx)
}

// Harness returns a harness for a server on TCP. The function start starts the server, with the data
// that it had or without, and returns its address. The function at returns the URL for an address.
func Harness(
	start func(ctx context.Context, data bool) (addr string, err error), stop func(),
	at func(addr string) string,
) conformance.Harness {
	again := func(ctx context.Context, _ string, data bool) error {
		_, err := start(ctx, data)
		return err
	}
	return conformance.Harness{
		Store: func(ctx context.Context) (string, func(), error) {
			addr, err := start(ctx, false)
			return addr, stop, err
		},
		Open: func(ctx context.Context, addr string) (backend.Driver, error) {
			return Driver(ctx, at(addr))
		},
		Link: func(_ context.Context, addr string) (*conformance.Link, error) {
			return conformance.TCP(addr)
		},
		Stop:  func(context.Context, string) error { stop(); return nil },
		Start: again,
		Kick: func(ctx context.Context, addr string) error {
			stop()
			return again(ctx, addr, true)
		},
	}
}

// Clocks runs the suite without and with the parameter clock.
func Clocks(t *testing.T, harness func(t *testing.T, params string) conformance.Harness) {
	for params, only := range map[string]func(clause string) bool{
		"clock=false": nil,
		"clock=true":  onTerms.MatchString,
	} {
		t.Run(params, func(t *testing.T) {
			t.Parallel()
			h := harness(t, params)
			h.Only = only
			conformance.Run(t, h)
		})
	}
}

// onTerms matches the clauses that a clock of the store may change.
var onTerms = regexp.MustCompile(
	"^(takes|acquire|expiry|deadline|process|wait-d|keep|fence-g|inspect|history-driver)")

// Works opens a URL and takes a lock.
func Works(t *testing.T, url string) {
	t.Helper()
	c, err := hasp.Open(t.Context(), url, nil)
	if err == nil {
		nothing := func(context.Context, *hasp.Lease) error { return nil }
		err = errors.Join(hasp.Do(t.Context(), c, "key", nothing), c.Close())
	}
	if err != nil {
		t.Errorf("%s: %v", url, err)
	}
}

// Rows are URLs, each with words that its error must have.
type Rows [][]string

// Invalid calls the function Invalid for each row.
func (rs Rows) Invalid(t *testing.T) {
	t.Helper()
	for _, row := range rs {
		Invalid(t, row[0], row[1:]...)
	}
}

// Fail calls the function Fails for each row.
func (rs Rows) Fail(t *testing.T) {
	t.Helper()
	for _, row := range rs {
		Fails(t, row[0], row[1:]...)
	}
}

// Invalid opens a URL. The error must be ErrInvalid, and clear.
func Invalid(t *testing.T, url string, words ...string) {
	t.Helper()
	refused(t, url, true, words)
}

// Fails opens a URL. The error must not be ErrInvalid, and it must be clear.
func Fails(t *testing.T, url string, words ...string) {
	t.Helper()
	refused(t, url, false, words)
}

func refused(t *testing.T, url string, invalid bool, words []string) {
	t.Helper()
	c, err := hasp.Open(t.Context(), url, &hasp.Options{Timeout: 20 * time.Second})
	if err == nil {
		_ = c.Close()
	}
	Clear(t, url, err, words...)
	if errors.Is(err, hasp.ErrInvalid) != invalid {
		t.Errorf("%s: want ErrInvalid %v", url, invalid)
	}
}

// Clear fails the test unless err is one line that has the words, and not the Secret.
func Clear(t *testing.T, what string, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("%s: no error", what)
		return
	}

	text := err.Error()
	t.Log(text)
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%s: %q, want %q in it", what, text, word)
		}
	}
	if strings.ContainsAny(text, "\n\r\t") || strings.Contains(text, Secret) || len(text) > 900 {
		t.Errorf("%s: the error is long, or has several lines or the password: %q", what, text)
	}
}
