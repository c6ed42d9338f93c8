package s3kv_test

import (
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/caslock/internal/adaptertest"
	"github.com/hasplock/hasp/internal/await"
)

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
		adaptertest.Invalid(t, at, words...)
	}
}

// The server is real.
func TestServer(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	other := strings.Replace(at(s.addr, ""), "bucket", "other", 1)
	adaptertest.Fails(t, other, "NoSuchBucket", "create it")
	adaptertest.Fails(t, at(s.addr, "region=eu-1"), "us-east-1", "another region")
	adaptertest.Fails(t, strings.Replace(at(s.addr, ""), "http:", "https:", 1), "no TLS", "http://")

	// A Config works, and Close leaves no connection.
	c := hasp.Config{
		Strategy: "s3",
		Nodes:    []string{"s3://bucket/a/b/"},
		Params:   map[string]string{"endpoint": "http://" + s.addr, "ttl": "10s", "clock": "true"},
	}
	client := await.Value(c.Open(t.Context(), nil))
	l := await.Value(client.Lock(t.Context(), "key"))
	await.Must(t, errors.Join(l.Unlock(t.Context()), client.Close()))
}

func TestCredentials(t *testing.T) {
	s := startServer(t)
	t.Setenv("AWS_SECRET_ACCESS_KEY", "hunter2x")
	adaptertest.Fails(t, at(s.addr, ""), "SignatureDoesNotMatch", "check AWS_ACCESS_KEY_ID")
	t.Setenv("AWS_ACCESS_KEY_ID", "nobody")
	adaptertest.Fails(t, at(s.addr, ""), "No user exists", "check AWS_ACCESS_KEY_ID")
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	adaptertest.Fails(t, at(s.addr, ""), "no credentials", "profile")
}

// Each server is a fake that gives one answer to all requests.
func TestAnswers(t *testing.T) {
	t.Parallel()
	lacks := fakeServer(t, func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, http.StatusNotImplemented, "NotImplemented")
	})
	adaptertest.Invalid(t, at(lacks, ""), "lacks a condition")

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
			adaptertest.Fails(t, at(fakeServer(t, answer.serve), ""), answer.words...)
		})
	}
}

func TestNobodyThere(t *testing.T) {
	t.Parallel()
	// Port 1 belongs to tcpmux, and the kernel gives it to no socket by chance.
	adaptertest.Fails(t, at("127.0.0.1:1", ""), "is the server running there?")

	silent := await.Value(net.Listen("tcp", "127.0.0.1:0"))
	defer silent.Close()
	adaptertest.Fails(t, at(silent.Addr().String(), "timeout=300ms"), "no answer")

	// The certificate is for another host, and of an unknown authority.
	f := httptest.NewTLSServer(nil)
	defer f.Close()
	adaptertest.Fails(t, "s3://bucket?endpoint="+f.URL, "certificate", "AWS_CA_BUNDLE")
}
