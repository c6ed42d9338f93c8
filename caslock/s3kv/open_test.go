package s3kv_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
)

// refused opens a URL, and checks that the error is one line with the words, and without the
// password hunter2. The flag invalid says whether it must be ErrInvalid.
func refused(t *testing.T, at string, invalid bool, words ...string) {
	t.Helper()
	c, err := hasp.Open(t.Context(), at, &hasp.Options{Timeout: 20 * time.Second})
	if err == nil {
		c.Close()
		t.Errorf("%s: opened", at)
		return
	}

	text := err.Error()
	t.Log(text)
	if got := errors.Is(err, hasp.ErrInvalid); got != invalid {
		t.Errorf("%s: %s: ErrInvalid %t, want %t", at, text, got, invalid)
	}
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%s: %q, want %q in it", at, text, word)
		}
	}
	if strings.Contains(text, "hunter2") || strings.Contains(text, "\n") || len(text) > 900 {
		t.Errorf("%s: the error has a password, or is long: %q", at, text)
	}
}

func TestBadURL(t *testing.T) {
	t.Parallel()
	for at, words := range map[string][]string{
		"s3://":                               {"want one node"},
		"s3:///locks":                         {"no bucket"},
		"s3+http://key:hunter2@host/b":        {"AWS_ACCESS_KEY_ID", "endpoint"},
		"s3://key:hunter2@bucket/p":           {"AWS_ACCESS_KEY_ID"},
		"s3://bucket?endpoint=host:9000":      {"endpoint", "https://host:9000"},
		"s3://bucket?endpoint=ftp://host":     {"endpoint", "https://host:9000"},
		"s3://bucket?use_path_style=maybe":    {"use_path_style", "true or false"},
		"s3://bucket?clock=1s":                {"clock", "true or false"},
		"s3://bucket?bucket=a":                {"unknown parameter", "use_path_style"},
		"s3://bucket":                         {"no region", "AWS_REGION"},
		"s3://bucket?profile=nobody&region=a": {"nobody", "~/.aws"},
	} {
		refused(t, at, true, words...)
	}
}

// The server is real.
func TestServer(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	other := strings.Replace(at(s.addr, ""), "bucket", "other", 1)
	refused(t, other, false, "NoSuchBucket", "create it")
	refused(t, at(s.addr, "region=eu-1"), false, "us-east-1", "another region")
	refused(t, strings.Replace(at(s.addr, ""), "http:", "https:", 1), false, "no TLS", "http://")

	// A Config works, and Close leaves no connection.
	c := hasp.Config{
		Strategy: "s3",
		Nodes:    []string{"s3://bucket/a/b/"},
		Params:   map[string]string{"endpoint": "http://" + s.addr, "ttl": "10s", "clock": "true"},
	}
	client := await.Value(c.Open(t.Context(), nil))
	err := hasp.Do(t.Context(), client, "key", func(context.Context, *hasp.Lease) error { return nil })
	if err := errors.Join(err, client.Close()); err != nil {
		t.Error(err)
	}
}

func TestCredentials(t *testing.T) {
	s := startServer(t)
	t.Setenv("AWS_SECRET_ACCESS_KEY", "hunter2x")
	refused(t, at(s.addr, ""), false, "SignatureDoesNotMatch", "check AWS_ACCESS_KEY_ID")
	t.Setenv("AWS_ACCESS_KEY_ID", "nobody")
	refused(t, at(s.addr, ""), false, "No user exists", "check AWS_ACCESS_KEY_ID")
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	refused(t, at(s.addr, ""), false, "no credentials", "profile")
}

// Each server is a fake that gives one answer to all requests.
func TestAnswers(t *testing.T) {
	t.Parallel()
	page := "<!DOCTYPE html>\n<html><body>Please log in &nbsp;<br></body>\n</html>"
	html := func(status int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			w.WriteHeader(status)
			_, _ = w.Write([]byte(page))
		}
	}
	s3Error := func(status int, code string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Amz-Bucket-Region", "eu-1")
			refuse(w, status, code)
		}
	}
	empty := func(status int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }
	}
	for name, answer := range map[string]struct {
		serve http.HandlerFunc
		words []string
	}{
		"a page":           {html(200), []string{"that is no S3 server", "endpoint"}},
		"a page, 403":      {html(403), []string{"is that an S3 server", "endpoint"}},
		"a page, 404":      {html(404), []string{"is that an S3 server", "endpoint"}},
		"a page, 502":      {html(502), []string{"is that an S3 server", "endpoint"}},
		"a redirect":       {s3Error(301, "PermanentRedirect"), []string{"region=eu-1"}},
		"a redirect, 307":  {s3Error(307, "TemporaryRedirect"), []string{"region=eu-1"}},
		"an empty 301":     {empty(301), []string{"another region"}},
		"denied":           {s3Error(403, "AccessDenied"), []string{"s3:ListBucket"}},
		"expired":          {s3Error(400, "ExpiredToken"), []string{"log in again"}},
		"a wrong clock":    {s3Error(403, "RequestTimeTooSkewed"), []string{"clock of this machine"}},
		"an empty 403":     {empty(403), []string{"s3:ListBucket"}},
		"an empty 404":     {empty(404), []string{"is that an S3 server"}},
		"no method":        {s3Error(405, "MethodNotAllowed"), []string{"endpoint"}},
		"an unknown error": {s3Error(500, "InternalError"), []string{"InternalError"}},
	} {
		t.Run(name, func(t *testing.T) {
			refused(t, at(fakeServer(t, answer.serve), ""), false, answer.words...)
		})
	}
}

func TestNobodyThere(t *testing.T) {
	t.Parallel()
	// Port 1 belongs to tcpmux, and the kernel gives it to no socket by chance.
	refused(t, at("127.0.0.1:1", ""), false, "nobody listens")

	silent := await.Value(net.Listen("tcp", "127.0.0.1:0"))
	defer silent.Close()
	refused(t, at(silent.Addr().String(), "timeout=300ms"), false, "no answer")

	// The certificate is for another host, and of an unknown authority.
	f := httptest.NewTLSServer(nil)
	defer f.Close()
	refused(t, "s3://bucket?endpoint="+f.URL, false, "certificate", "AWS_CA_BUNDLE")
}
