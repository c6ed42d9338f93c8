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
	adaptertest.Rows{
		{"s3://", "want one node"},
		{"s3:///locks", "no bucket"},
		{"s3+http://key:hunter2@host/b", "AWS_ACCESS_KEY_ID", "endpoint"},
		{"s3://key:hunter2@bucket/p", "AWS_ACCESS_KEY_ID"},
		{"s3://bucket?endpoint=host:9000", "endpoint", "https://host:9000"},
		{"s3://bucket?endpoint=ftp://host", "endpoint", "https://host:9000"},
		{"s3://bucket?use_path_style=maybe", "use_path_style", "true or false"},
		{"s3://bucket?clock=1s", "clock", "true or false"},
		{"s3://bucket?bucket=a", "unknown parameter", "use_path_style"},
		{"s3://bucket", "no region", "AWS_REGION"},
		{"s3://bucket?profile=nobody&region=a", "nobody", "~/.aws"},
	}.Invalid(t)
}

// The server is real.
func TestServer(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	other := strings.Replace(at(s.addr, ""), "bucket", "other", 1)
	adaptertest.Rows{
		{other, "NoSuchBucket", "create it"},
		{at(s.addr, "region=eu-1"), "us-east-1", "another region"},
		{strings.Replace(at(s.addr, ""), "http:", "https:", 1), "no TLS", "http://"},
	}.Fail(t)

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
	// answers returns the URL of such a server.
	answers := func(kind string, status int, text string) string {
		return at(fakeServer(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", kind)
			w.Header().Set("X-Amz-Bucket-Region", "eu-1")
			w.WriteHeader(status)
			_, _ = w.Write([]byte(text))
		}), "")
	}
	page := func(status int) string {
		const text = "<!DOCTYPE html>\n<html><body>Please log in &nbsp;<br></body>\n</html>"
		return answers("text/html", status, text)
	}
	s3Error := func(status int, code string) string {
		return answers("application/xml", status, s3Text(code))
	}
	empty := func(status int) string { return answers("", status, "") }

	adaptertest.Invalid(t, s3Error(501, "NotImplemented"), "lacks a condition")
	adaptertest.Rows{
		{page(200), "that is no S3 server", "endpoint"},
		{page(403), "is that an S3 server", "endpoint"},
		{page(404), "is that an S3 server", "endpoint"},
		{page(502), "is that an S3 server", "endpoint"},
		{s3Error(301, "PermanentRedirect"), "region=eu-1"},
		{s3Error(307, "TemporaryRedirect"), "region=eu-1"},
		{empty(301), "another region"},
		{s3Error(403, "AccessDenied"), "s3:ListBucket"},
		{s3Error(400, "ExpiredToken"), "log in again"},
		{s3Error(403, "RequestTimeTooSkewed"), "clock of this machine"},
		{empty(403), "s3:ListBucket"},
		{empty(404), "is that an S3 server"},
		{s3Error(405, "MethodNotAllowed"), "endpoint"},
		{s3Error(500, "InternalError"), "InternalError"},
	}.Fail(t)
}

func TestNobodyThere(t *testing.T) {
	t.Parallel()
	silent := await.Value(net.Listen("tcp", "127.0.0.1:0"))
	defer silent.Close()

	// The certificate is for another host, and of an unknown authority.
	f := httptest.NewTLSServer(nil)
	defer f.Close()

	adaptertest.Rows{
		// Port 1 belongs to tcpmux, and the kernel gives it to no socket by chance.
		{at("127.0.0.1:1", ""), "is the server running there?"},
		{at(silent.Addr().String(), "timeout=300ms"), "no answer"},
		{"s3://bucket?endpoint=" + f.URL, "certificate", "AWS_CA_BUNDLE"},
	}.Fail(t)
}
