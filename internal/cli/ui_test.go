package cli

import (
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/hasplock/hasp/internal/await"
)

var address = regexp.MustCompile(`http://[^\s/]+/`)

// page starts a command of hasp that serves a page. It also returns the address of the page.
func page(t *testing.T, url string, args ...string) (*running, string) {
	t.Helper()
	p := startHasp(t, url, args...)
	p.out.expect("http://")
	return p, address.FindString(p.out.String())
}

// get sends a request with headers "NAME: VALUE". It checks the status of the answer and returns
// the body.
func get(t *testing.T, want int, at string, headers ...string) (body string) {
	t.Helper()
	r := await.Value(http.NewRequestWithContext(t.Context(), "GET", at, nil))
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		r.Header.Set(name, value)
	}
	r.Host = r.Header.Get("Host")
	answer := await.Value(http.DefaultClient.Do(r))
	defer answer.Body.Close()
	text := await.Value(io.ReadAll(io.LimitReader(answer.Body, 1<<16)))
	if answer.StatusCode != want {
		t.Errorf("%s with %q: got %d, want %d", at, headers, answer.StatusCode, want)
	}
	return string(text)
}

func TestUIServesThePageUntilCtrlC(t *testing.T) {
	t.Parallel()
	p, at := page(t, store(t), "ui", "--listen", "127.0.0.1:0")
	for path, want := range map[string]string{"": "<title>hasp</title>", "page.js": "fetch(", "page.css": "light-dark(", "icon.svg": "<svg", "key?id=YQ": `"row":null`, "locks": `"rows":[]`} {
		contains(t, get(t, 200, at+path), want)
	}
	get(t, 404, at+"other")
	get(t, 400, at+"key?id=%3Cb%3E")

	// hasp ends although a browser is connected.
	answer := await.Value(http.Get(at + "locks"))
	defer answer.Body.Close()
	p.signal(syscall.SIGINT)
	p.wait().want(t, 0)
}

func TestUIWantsATokenOffThisHost(t *testing.T) {
	t.Parallel()
	const token = "sixteen-letters!"
	p, named := page(t, "", "ui", "--url", store(t), "--listen", "0.0.0.0:0", "--token", token)
	u := await.Value(url.Parse(named))
	at := "http://127.0.0.1:" + u.Port() + "/"
	get(t, 401, at, "Host: "+u.Host) // like a browser on another host
	get(t, 401, at)
	get(t, 200, at, "Authorization: Bearer "+token)

	// Other users can read the token in the list of processes.
	p.err.expect("put the token into " + uiToken)
	if got := p.out.String() + p.err.String(); strings.Contains(got, token) || strings.Contains(got, "holds a password") {
		t.Errorf("got %s", got)
	}
}

func TestDemoOnThePage(t *testing.T) {
	p, at := page(t, "", "demo", "--ui", "--increments", "1")
	answer := await.Value(http.Get(at + "locks"))
	defer answer.Body.Close()
	p.out.expect("the page stays until Ctrl-C")
	contains(t, get(t, 200, at), "<title>hasp")
	p.signal(syscall.SIGINT)
	p.wait().want(t, 0)
}
