// Package adaptertest has what the tests of all adapters share.
package adaptertest

import (
	"context"
	"errors"
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

// Driver opens the driver that a user gets by a URL.
func Driver(ctx context.Context, url string) (backend.Driver, error) {
	c, err := hasp.ParseURL(url)
	if err != nil {
		return nil, err
	}
	return c.Driver(ctx)
}

// Harness returns a harness for stores at TCP addresses. The function at returns the URL for an
// address.
func Harness(at func(addr string) string) conformance.Harness {
	return conformance.Harness{
		Open: func(ctx context.Context, addr string) (backend.Driver, error) {
			return Driver(ctx, at(addr))
		},
		Link: func(_ context.Context, addr string) (*conformance.Link, error) {
			return conformance.TCP(addr)
		},
	}
}

// OnTerms matches the clauses that a clock of the store may change.
var OnTerms = regexp.MustCompile(
	"^(takes|acquire|expiry|deadline|process|wait-d|keep|fence-g|list-held|history-driver)")

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

// Invalid opens a URL. The error must be ErrInvalid, and clear.
func Invalid(t *testing.T, url string, words ...string) {
	t.Helper()
	if err := opened(t, url, words); !errors.Is(err, hasp.ErrInvalid) {
		t.Errorf("%s: want ErrInvalid", url)
	}
}

// Fails opens a URL. The error must not be ErrInvalid, and it must be clear.
func Fails(t *testing.T, url string, words ...string) {
	t.Helper()
	if err := opened(t, url, words); errors.Is(err, hasp.ErrInvalid) {
		t.Errorf("%s: the error is ErrInvalid", url)
	}
}

func opened(t *testing.T, url string, words []string) error {
	t.Helper()
	c, err := hasp.Open(t.Context(), url, &hasp.Options{Timeout: 20 * time.Second})
	if err == nil {
		_ = c.Close()
	}
	Clear(t, url, err, words...)
	return err
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
