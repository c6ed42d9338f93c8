package k8slease_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/caslock/internal/adaptertest"
	"github.com/hasplock/hasp/caslock/internal/fakekube"
	"github.com/hasplock/hasp/caslock/k8slease"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/testcert"
)

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	await.Must(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

func TestBadURLs(t *testing.T) {
	adaptertest.Rows{
		{"kube://", "want one node, not 0: kube:///NAMESPACE"},
		{"kube:///", "no namespace: want kube:///NAMESPACE"},
		{"kube://host", "no namespace"},
		{"kube://host:6443/", "no namespace"},
		{"kube:///UPPER", `the namespace "UPPER" has no valid name`},
		{"kube:///a/b", `the namespace "a/b" has no valid name`},
		{"kube://host:port/ns", "a host or a port is wrong"},
		{"kube+https:///ns", "a host or a port is wrong"},
		{"kube+redis://host/ns", "want kube:///NAMESPACE"},
		{"kube://user:hunter2@host/ns", "add token_file=FILE"},
		{"kube:///ns?contxt=a", `unknown parameter "contxt" (kube knows ca, cert, context, key,`},
		{"kube:///ns?token_file=x", "parameter token_file: that is for kube://HOST"},
		{"kube+http://host/ns?token_file=x", "parameter token_file: that is for kube://HOST"},
		{"kube://host/ns?context=x", "parameter context: that is for kube:///NAMESPACE"},
		{"kube://host/ns?token_file=/no/such/file", "/no/such/file"},
		{"kube://host/ns?ca=/no/such/file", "/no/such/file"},
		{"kube://host/ns?ca=open.go", "ca, cert or key"},
	}.Invalid(t)
}

// kubeconfig returns the text of a kubeconfig with the contexts this and other.
func kubeconfig(this, other string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: this
clusters:
- {name: this, cluster: {server: "%s"}}
- {name: other, cluster: {server: "%s"}}
contexts:
- {name: this, context: {cluster: this, user: me}}
- {name: other, context: {cluster: other, user: me}}
users:
- {name: me, user: {token: "%s"}}
`, this, other, adaptertest.Secret)
}

func TestKubeconfig(t *testing.T) {
	s := fakekube.Serve(t)
	dead := "http://127.0.0.1:1"
	live := "http://" + s.Addr

	t.Setenv("KUBECONFIG", writeFile(t, "config", kubeconfig(live, dead)))
	conf := hasp.Config{Strategy: "kube", Nodes: []string{"/default"}}
	c := await.Value(conf.Open(t.Context(), nil))
	l := await.Value(c.TryLock(t.Context(), "job"))
	await.Must(t, l.Unlock(t.Context()))
	await.Must(t, c.Close())

	adaptertest.Fails(t, "kube:///default?context=other", "127.0.0.1:1", "check host and port")
	adaptertest.Invalid(t, "kube:///default?context=missing", `context "missing" does not exist`, "kubectl config get-contexts")

	t.Setenv("KUBECONFIG", writeFile(t, "config", "]["))
	adaptertest.Invalid(t, "kube:///default", "check KUBECONFIG")

	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "missing"))
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	adaptertest.Invalid(t, "kube:///default", "no kubeconfig at KUBECONFIG=/", "set KUBECONFIG")
}

// status is a handler that refuses requests for which the function is returns true. The fake
// answers the others.
func status(code int, message string, is func(r *http.Request) bool) http.Handler {
	fake := fakekube.New()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !is(r) {
			fake.ServeHTTP(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"kind":"Status","message":%q,"details":{"causes":[{"field":"spec"}]}}`, message)
	})
}

// is returns a function that reports whether a request is of this verb.
func is(verb string) func(r *http.Request) bool {
	return func(r *http.Request) bool {
		of := map[string]string{"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}
		if r.URL.RawQuery != "" {
			of["GET"] = "list"
		}
		return of[r.Method] == verb
	}
}

func all(*http.Request) bool { return true }

// served returns a URL of a server, which ends with the test.
func served(t *testing.T, h http.Handler) string {
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return "kube+" + s.URL + "/default"
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	page := served(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "<html>\nplease log in\n</html>")
	}))
	refused := func(code int, message string, is func(r *http.Request) bool) string {
		return served(t, status(code, message, is))
	}
	missing := strings.Replace(served(t, fakekube.New()), "default", "missing", 1)
	adaptertest.Rows{
		{refused(401, "Unauthorized", all), "401", "expired", "token_file"},
		{refused(403, "it is being terminated", all), "not being deleted"},
		{refused(410, "too old", is("list")), "410", "list again"},
		{refused(415, "no", is("patch")), "415", "does not know patch", "1.14"},
		{refused(429, "slow down", all), "429", "overloaded"},
		{refused(500, "a\nb", all), "500: a b"},
		{strings.Replace(page, "kube+http:", "kube:", 1), "use kube+http://"},
		{"kube://no-such-host.invalid/ns", "check the host"},
		{page, "200 OK", "no JSON", "no API server"},
		{missing, "404", "check the namespace missing"},
	}.Fail(t)
	for _, verb := range []string{"get", "list", "create", "patch", "delete"} {
		at := refused(403, "no", is(verb))
		adaptertest.Fails(t, at, "lacks the verb "+verb+":", "Role", "namespace default")
	}
	long := refused(422, "too long", is("create"))
	adaptertest.Invalid(t, long, "422", "too long", "use a shorter owner")
}

// After an answer 429, the Store waits as long as the server says and sends the request again. If
// the caller's deadline is earlier, the Store returns at once.
func TestRetryAfter(t *testing.T) {
	t.Parallel()
	var n atomic.Int32
	pause := "1"
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if n.Add(1) == 1 {
			w.Header().Set("Retry-After", pause)
			w.WriteHeader(http.StatusTooManyRequests)
			fmt.Fprint(w, "Too many requests, please try again later.")
			return
		}
		fmt.Fprint(w, `{"metadata":{"uid":"u","resourceVersion":"1"}}`)
	}))
	defer s.Close()
	store := k8slease.New(s.Client(), s.URL, "default")

	start := time.Now()
	e := await.Value(store.Get(t.Context(), "key"))
	if took := time.Since(start); e.Version != "u/1" || took < time.Second {
		t.Errorf("version %q after %v", e.Version, took)
	}

	n.Store(0)
	pause = "300"
	ctx := await.Timeout(t, time.Minute)
	_, err := store.Get(ctx, "key")
	if ctx.Err() != nil {
		t.Error("the Store waited until the deadline")
	}
	adaptertest.Clear(t, "the call", err, "429", "try again later")
}

// tlsServer starts a server whose certificate is for 127.0.0.1 and name, and returns its file.
func tlsServer(t *testing.T, name string, h http.Handler) (host, ca string) {
	cert, key, err := testcert.Write(t.TempDir(), name)
	await.Must(t, err)
	s := &http.Server{Handler: h}
	l := httptest.NewUnstartedServer(nil).Listener
	go s.ServeTLS(l, cert, key)
	t.Cleanup(func() { s.Close() })
	return l.Addr().String(), cert
}

func TestCertificates(t *testing.T) {
	t.Parallel()
	host, ca := tlsServer(t, "api.example", fakekube.New())
	at := "kube://" + host + "/default"
	query := "?ca=" + url.QueryEscape(ca) + "&server_name="
	adaptertest.Works(t, at+query+"api.example")
	adaptertest.Rows{
		{at, "ca=FILE"},
		{at + query + "other", "name the host"},
		{"kube+http://" + host + "/default", "https://"},
	}.Fail(t)
}

// The kubelet replaces the token's file before the token expires. After the server has refused the
// old token, the next call sends the new one.
func TestTheTokenIsReadAgain(t *testing.T) {
	var valid atomic.Value
	h := status(401, "Unauthorized", func(r *http.Request) bool {
		if r.ProtoMajor != 1 {
			t.Errorf("the calls share a connection by %s", r.Proto)
		}
		return r.Header.Get("Authorization") != valid.Load()
	})
	host, ca := tlsServer(t, "api.example", h)
	token := writeFile(t, "token", "")
	query := url.Values{"token_file": {token}, "ca": {ca}}.Encode()

	// With a kubeconfig, and also in a pod, client-go has read the token before.
	t.Setenv("KUBECONFIG", writeFile(t, "config", fmt.Sprintf(`
apiVersion: v1
kind: Config
current-context: this
clusters: [{name: this, cluster: {server: "https://%s", certificate-authority: %q}}]
contexts: [{name: this, context: {cluster: this, user: me}}]
users: [{name: me, user: {tokenFile: %q}}]
`, host, ca, token)))
	for _, at := range []string{"kube://" + host + "/default?" + query, "kube:///default"} {
		renew := func(to string) {
			await.Must(t, os.WriteFile(token, []byte(to), 0o600))
			valid.Store("Bearer " + to)
		}
		renew("first")
		c := await.Value(hasp.Open(t.Context(), at, nil))
		defer c.Close()

		renew("second")
		_, err := c.TryLock(t.Context(), "key")
		adaptertest.Clear(t, "the call", err, "401", "expired")
		l := await.Value(c.TryLock(t.Context(), "key"))
		await.Must(t, l.Unlock(t.Context()))
	}
}
