//go:build unix

// Package kubetest starts a real Kubernetes API server for tests: an etcd and a kube-apiserver, on
// free ports of the loopback interface. HASP_TEST_KUBE is the path of the kube-apiserver, which
// build.sh builds. HASP_TEST_ETCD is the path of an etcd.
package kubetest

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/etcdtest"
	"github.com/hasplock/hasp/internal/testcert"
)

const adminToken = "admin-token"

// Server is an API server.
type Server struct {
	Host      string // 127.0.0.1:port
	CA        string // the file of its certificate
	TokenFile string // of a user that may do everything

	dir    string
	etcd   *etcdtest.Server
	client *http.Client

	cmd   *exec.Cmd       // nil if the API server does not run
	ended <-chan struct{} // closed when cmd has ended
}

// Need skips the test if HASP_TEST_KUBE is not set.
func Need(t testing.TB) {
	t.Helper()
	if os.Getenv("HASP_TEST_KUBE") == "" {
		t.Skip("HASP_TEST_KUBE names no kube-apiserver: make kube")
	}
}

// Start starts a server that the end of the test stops.
func Start(t testing.TB) *Server {
	t.Helper()
	Need(t)
	s, err := New(t.TempDir())
	await.Must(t, err)
	t.Cleanup(s.End)
	await.Must(t, s.Start(t.Context(), true))
	return s
}

// New returns a server with its files in a directory. The caller calls Start, and Stop in the end.
func New(dir string) (*Server, error) {
	host, err1 := crew.FreeAddr()
	members, err2 := etcdtest.New(dir, 1)
	cert, _, err3 := testcert.Write(dir, "kubernetes")
	token := filepath.Join(dir, "token")
	err4 := os.WriteFile(token, []byte(adminToken), 0o600)
	users := filepath.Join(dir, "users.csv")
	err5 := os.WriteFile(users, []byte(adminToken+",admin,1,system:masters\n"), 0o600)
	if err := errors.Join(err1, err2, err3, err4, err5); err != nil {
		return nil, err
	}

	pem, err := os.ReadFile(cert)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}
	return &Server{
		Host:      host,
		CA:        cert,
		TokenFile: token,
		dir:       dir,
		etcd:      members[0],
		client:    &http.Client{Transport: bearer{transport}, Timeout: 10 * time.Second},
	}, nil
}

// URL returns the URL of the strategy kube for a namespace, as the user of a token's file.
func (s *Server) URL(host, namespace, tokenFile string) string {
	query := url.Values{"ca": {s.CA}, "token_file": {tokenFile}}
	return "kube://" + host + "/" + namespace + "?" + query.Encode()
}

// Start starts the server again, and returns when it serves. If data is false, it has lost its
// data.
func (s *Server) Start(ctx context.Context, data bool) error {
	if !data {
		s.etcd.Kill()
		if err := os.RemoveAll(s.etcd.Dir); err != nil {
			return err
		}
	}
	s.etcd.Kill() // or it runs twice
	if err := s.etcd.Start(); err != nil {
		return err
	}
	if err := s.etcd.Healthy(ctx); err != nil {
		return err
	}
	return s.startAPI(ctx)
}

func (s *Server) startAPI(ctx context.Context) error {
	file := func(name string) string { return filepath.Join(s.dir, name) }
	_, port, _ := net.SplitHostPort(s.Host)
	cmd := exec.Command(os.Getenv("HASP_TEST_KUBE"),
		"--etcd-servers", "http://"+s.etcd.Client,
		"--bind-address", "127.0.0.1", "--secure-port", port,
		"--tls-cert-file", s.CA, "--tls-private-key-file", file("key.pem"),
		"--token-auth-file", file("users.csv"), "--authorization-mode", "RBAC",
		"--service-account-issuer", "https://kubernetes.default.svc",
		"--service-account-key-file", s.CA, "--service-account-signing-key-file", file("key.pem"),
		"--service-cluster-ip-range", "10.0.0.0/24", "--shutdown-delay-duration", "0s")
	log, err := os.Create(file("apiserver.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd.Stdout = log
	cmd.Stderr = log

	s.ended, err = crew.StartServer(cmd)
	if err != nil {
		return err
	}
	s.cmd = cmd
	return s.ready(ctx)
}

// ready waits until the server has made its own objects, such as the namespace default.
func (s *Server) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	for {
		_, err1 := s.Call(ctx, http.MethodGet, "/readyz?verbose", "")
		_, err2 := s.Call(ctx, http.MethodGet, "/api/v1/namespaces/default", "")
		err := errors.Join(err1, err2)
		if err == nil {
			return nil
		}

		select {
		case <-s.ended:
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
			continue
		}
		log, _ := os.ReadFile(filepath.Join(s.dir, "apiserver.log"))
		return fmt.Errorf("kube-apiserver does not serve: %w: %s", err, log[max(0, len(log)-2000):])
	}
}

// bearer adds the token of the user that may do everything.
type bearer struct{ http.RoundTripper }

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+adminToken)
	return b.RoundTripper.RoundTrip(r)
}

// Client returns a client of the user that may do everything.
func (s *Server) Client() *http.Client { return s.client }

// Call sends a request to the API as the user that may do everything, and returns the answer.
func (s *Server) Call(ctx context.Context, method, path, body string) (map[string]any, error) {
	r, err := http.NewRequestWithContext(ctx, method, "https://"+s.Host+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := s.client.Do(r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode/100 != 2 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, text)
	}
	var object map[string]any
	_ = json.Unmarshal(text, &object) // not every answer is JSON
	return object, err
}

// Stop kills the API server. Its etcd goes on.
func (s *Server) Stop() {
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill()
	<-s.ended
	s.cmd = nil
}

// End stops the API server and its etcd.
func (s *Server) End() {
	s.Stop()
	s.etcd.Kill()
}
