package cli

import (
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// The password must not be shown wherever it comes from and whatever is wrong with the server.
func TestNoCommandShowsThePassword(t *testing.T) {
	clear := await.Value(url.PathUnescape(secret))
	refuses := redistest.Start(t, &redistest.Options{Password: "another"})
	for name, addr := range map[string]string{
		"refuses": refuses.Addr, "is down": "127.0.0.1:1",
		"repeats it":   replies(t, "-ERR unknown command AUTH "+clear+" \x1b[2J\u202e\r\n"),
		"is not Redis": replies(t, "HTTP/1.1 400 "+clear+"\r\n"),
	} {
		for _, strategy := range []string{"spinlock", "redlock"} {
			node := "redis://user:" + secret + "@" + addr
			content := "strategy: " + strategy + "\nnodes: ['" + node + "']\nparams: {timeout: 2s"
			raw := strategy + "+" + node + "?timeout=2s"
			if strategy == "redlock" {
				content += ", allow_unsafe_nodes: true"
				raw += "&allow_unsafe_nodes=true"
			}
			config := file(t, "hasp.yaml", content+"}\n", 0o600)
			for _, how := range [][]string{{"--url", raw}, {"--config", config}, nil} {
				t.Setenv("HASP_URL", "")
				if how == nil {
					t.Setenv("HASP_URL", raw)
				}
				showsNothing(t, name, how)
			}
		}
	}
}

// showsNothing runs commands with the flags how, which name the store. It checks that their output
// does not contain the beginning of the password, which the escape does not change.
func showsNothing(t *testing.T, name string, how []string) {
	t.Helper()
	for _, args := range [][]string{{"inspect", "k"}, {"inspect", "k", "--json"}, {"ls"}, {"ls", "k", "--json"}, {"ui", "--listen", "127.0.0.1:0"}, {"break", "k", "--force"}, {"demo"},
		{"conform"}, {"doctor"}, {"strategies"}, {"run", "k", "--", "true"}} {
		o := call(slices.Concat(args[:1], how, args[1:])...)
		if strings.Contains(o.out+o.err, secret[:4]) {
			t.Errorf("%s, %q, %q: shown:\n%s%s", name, args, how, o.out, o.err)
		}
		if strings.ContainsAny(o.out+o.err, "\x1b\u202e") {
			t.Errorf("%s, %q: raw: %q", name, args, o.out+o.err)
		}
		if warned := strings.Contains(o.err, "--url holds a password"); warned != (how != nil && how[0] == "--url" && args[0] != "strategies") {
			t.Errorf("%q, %q: warned: %v", args, how, warned)
		}
		if o.code == 0 && args[0] != "strategies" {
			t.Errorf("%s, %q, %q: exit code 0", name, args, how)
		}
	}
}

// replies returns the address of a server that sends reply after everything that it reads.
func replies(t *testing.T, reply string) string {
	t.Helper()
	return redistest.Serve(t, func(c net.Conn) {
		defer c.Close()
		buf := make([]byte, 4096)
		for {
			if _, err := c.Read(buf); err != nil {
				return
			}
			if _, err := c.Write([]byte(reply)); err != nil {
				return
			}
		}
	})
}

func TestBreakFreesADamagedRecord(t *testing.T) {
	dir := t.TempDir()
	at := "filelock://" + filepath.ToSlash(dir)
	call("run", "--url", at, "a", "--", os.Args[0], "-test.list", "^$").want(t, 0)
	must(t, os.WriteFile(filepath.Join(dir, "key-a.lock"), []byte("hasp filelock record 1\nrubbish"), 0o600))
	if o := call("inspect", "--url", at, "a"); o.code == 0 {
		t.Errorf("inspect: %+v", o)
	}
	call("break", "--url", at, "--force", "a").want(t, 0)
	call("inspect", "--url", at, "a").want(t, 0)
}
