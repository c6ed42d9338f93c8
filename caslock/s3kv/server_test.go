package s3kv_test

import (
	"cmp"
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/hasplock/hasp/caslock/internal/adaptertest"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/crew"
)

const accessKey, secretKey = "hasp", adaptertest.Secret

// TestMain sets the credentials of all servers, also for the processes that the suite starts, and
// leaves out what this machine may have of its own.
func TestMain(m *testing.M) {
	for name, value := range map[string]string{
		"AWS_ACCESS_KEY_ID":           accessKey,
		"AWS_SECRET_ACCESS_KEY":       secretKey,
		"AWS_EC2_METADATA_DISABLED":   "true",
		"AWS_CONFIG_FILE":             os.DevNull,
		"AWS_SHARED_CREDENTIALS_FILE": os.DevNull,
		"AWS_REGION":                  "",
		"AWS_PROFILE":                 "",
	} {
		os.Setenv(name, value)
	}
	os.Exit(m.Run())
}

// server is a versitygw, which keeps objects in files.
type server struct {
	binary, dir, addr string

	process *exec.Cmd
	ended   <-chan struct{}
}

// binary returns the path of versitygw, which HASP_TEST_VERSITYGW names. Without that, the go
// command builds it, and keeps it in its cache. If that fails, binary skips the test, or fails it
// if HASP_TEST_VERSITYGW is "required".
func binary(t *testing.T) string {
	t.Helper()
	set := os.Getenv("HASP_TEST_VERSITYGW")
	if set != "" && set != "required" {
		return set
	}

	build := exec.CommandContext(t.Context(), "go", "tool", "-n", "versitygw")
	build.Dir = filepath.Join("internal", "versitygw")
	build.Stderr = t.Output()
	out, err := build.Output()
	switch {
	case err != nil && set == "":
		t.Skip("versitygw cannot be built here: HASP_TEST_VERSITYGW can be the path of one")
	case err != nil:
		t.Fatal("versitygw cannot be built: ", err)
	}
	return strings.TrimSpace(string(out))
}

// startServer starts a server, which ends with the test.
func startServer(t *testing.T) *server {
	t.Helper()
	s := &server{}
	s.clear(t)
	await.Must(t, s.start())
	t.Cleanup(s.kill)
	return s
}

// clear replaces the data by an empty bucket. The server must not run.
func (s *server) clear(t *testing.T) {
	t.Helper()
	s.binary = binary(t)
	s.dir = t.TempDir()
	await.Must(t, os.Mkdir(filepath.Join(s.dir, "bucket"), 0o700))
}

// start returns when the server answers, or when it has ended.
func (s *server) start() error {
	s.addr = cmp.Or(s.addr, await.Value(crew.FreeAddr()))
	s.process = exec.Command(s.binary, "--port", s.addr, "--region", "us-east-1", "posix", s.dir)
	s.process.Env = append(os.Environ(), "ROOT_ACCESS_KEY="+accessKey, "ROOT_SECRET_KEY="+secretKey)
	var err error
	if s.ended, err = crew.StartServer(s.process); err != nil {
		return err
	}

	for {
		conn, err := net.Dial("tcp", s.addr)
		if err == nil {
			return conn.Close()
		}
		select {
		case <-s.ended:
			return err
		default:
		}
	}
}

func (s *server) kill() {
	_ = s.process.Process.Kill()
	<-s.ended
}

// client returns a client of the server at an address.
func client(addr string) *s3.Client {
	return s3.New(s3.Options{
		Region:       "us-east-1",
		BaseEndpoint: aws.String("http://" + addr),
		UsePathStyle: true,
		Credentials: aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
			return aws.Credentials{AccessKeyID: accessKey, SecretAccessKey: secretKey}, nil
		}),
	})
}

// front starts a server that answers a request itself, or else leaves it to s.
func (s *server) front(t *testing.T, answer func(http.ResponseWriter, *http.Request) bool) string {
	proxy := httputil.NewSingleHostReverseProxy(await.Value(url.Parse("http://" + s.addr)))
	return fakeServer(t, func(w http.ResponseWriter, r *http.Request) {
		if !answer(w, r) {
			proxy.ServeHTTP(w, r)
		}
	})
}

// fakeServer starts a fake of a server, which ends with the test.
func fakeServer(t *testing.T, serve http.HandlerFunc) (addr string) {
	f := httptest.NewServer(serve)
	t.Cleanup(f.Close)
	return f.Listener.Addr().String()
}

// refuse answers with an error of S3.
func refuse(w http.ResponseWriter, status int, code string) {
	w.WriteHeader(status)
	_, _ = w.Write([]byte(s3Text(code)))
}

func s3Text(code string) string {
	return "<Error><Code>" + code + "</Code><Message>so it is</Message></Error>"
}
