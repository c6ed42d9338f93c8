package main

import (
	"bytes"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// FuzzReadConfig: no error about a file tells a password in it.
func FuzzReadConfig(f *testing.F) {
	for _, s := range []string{"%s", "nodes: %s", "params: {sentinel_password: *%s}", "params: {a: !!int %s}", "nodes: !!int a`%s", "nodes: ['redis://:%s@h'\nx: y",
		"strategy: spinlock\nnodes: [redis://:%s@h]\nparams: {a: [%s]}", "nodes: \"\\%s\"", "%%%s\n---\n", "a: !x!%s b"} {
		f.Add(s)
	}
	file := filepath.Join(f.TempDir(), "config.yaml")
	f.Fuzz(func(t *testing.T, form string) {
		const pw = "S3cretOfThe5tore"
		if strings.Contains(form, pw) {
			return
		}
		if err := os.WriteFile(file, []byte(strings.ReplaceAll(form, "%s", pw)), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := readConfig(file)
		if err != nil && strings.Contains(err.Error(), pw) && !strings.Contains(c.Strategy, pw) && !isName(err.Error(), pw) {
			t.Error(err)
		}
	})
}

// isName reports whether an error is about a field or a strategy of that name.
func isName(text, name string) bool {
	for _, before := range []string{"unknown field", "mapping key", "unknown strategy"} {
		if strings.Contains(text, before) {
			return true
		}
	}
	return false
}

// No command shows the password of its store, whichever way it has it from
// and whatever is wrong with the server.
func TestNoCommandShowsThePassword(t *testing.T) {
	clear, err := url.PathUnescape(secret)
	if err != nil {
		t.Fatal(err)
	}
	refuses := redistest.Start(t, &redistest.Options{Own: true, Password: "another"})
	dir := t.TempDir()
	for name, addr := range map[string]string{"refuses": refuses.Addr, "is down": "127.0.0.1:1", "repeats it": says(t, "-ERR unknown command AUTH "+clear+" \x1b[2J\u202e\r\n"), "is none": says(t, "HTTP/1.1 400 "+clear+"\r\n")} {
		for _, strategy := range []string{"spinlock", "redlock"} {
			node := "redis://user:" + secret + "@" + addr
			config := filepath.Join(dir, strategy+name)
			text := "strategy: " + strategy + "\nnodes: ['" + node + "']\nparams: {timeout: 2s"
			raw := strategy + "+" + node + "?timeout=2s"
			if strategy == "redlock" {
				text += ", allow_unsafe_nodes: true"
				raw += "&allow_unsafe_nodes=true"
			}
			if err := os.WriteFile(config, []byte(text+"}\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			for _, how := range [][]string{{"--url", raw}, {"--config", config}, nil} {
				t.Setenv("HASP_URL", "")
				if how == nil {
					t.Setenv("HASP_URL", raw)
				}
				for _, args := range [][]string{{"inspect", "k"}, {"inspect", "k", "--json"}, {"break", "k", "--force"}, {"demo"}, {"conform"}, {"conform", "--json"}, {"strategies"}, {"run", "k", "--", "true"}} {
					o := call(append(append([]string{args[0]}, how...), args[1:]...)...)
					for _, pw := range []string{secret, clear} {
						if strings.Contains(o.out+o.err, pw) {
							t.Errorf("%s, %q, %q: shown:\n%s%s", name, args, how, o.out, o.err)
						}
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
		}
	}
}

// says is the address of a server that says that and no more.
func says(t *testing.T, text string) string {
	t.Helper()
	return redistest.Serve(t, func(c net.Conn) {
		defer c.Close()
		buf := make([]byte, 4096)
		for {
			if _, err := c.Read(buf); err != nil {
				return
			}
			if _, err := c.Write([]byte(text)); err != nil {
				return
			}
		}
	})
}

// What the command is started with is what hasp was: a password that it is not
// to have belongs into a file.
func TestTheCommandInheritsTheEnvironment(t *testing.T) {
	t.Parallel()
	url := store(t)
	o := runHasp(t, url, "run", "key", "--", "sh", "-c", "echo \"$HASP_URL\"").want(t, 0)
	if got := strings.TrimSpace(o.out); got != url {
		t.Errorf("HASP_URL is %q, want %q", got, url)
	}
}

func TestAConfigIsNoLargerThanOneCanBe(t *testing.T) {
	file := filepath.Join(t.TempDir(), "large")
	if err := os.WriteFile(file, bytes.Repeat([]byte("# filling\n"), 200_000), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readConfig(file); err == nil || !strings.Contains(err.Error(), "larger than any configuration") {
		t.Errorf("2 MB of configuration: %v", err)
	}
}

func TestAURLInPlaceOfAStrategyIsNotShown(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config")
	if err := os.WriteFile(file, []byte("strategy: fairlock+redis://:topsecret@h\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := readConfig(file)
	if err == nil || strings.Contains(err.Error(), "topsecret") {
		t.Errorf("told: %v", err)
	}
	if _, err = (hasp.Config{Strategy: "fairlock+redis://:topsecret@h"}).Open(t.Context(), nil); err == nil || strings.Contains(err.Error(), "topsecret") {
		t.Errorf("the library told: %v", err)
	}
}

// What inspect cannot read is what break is for.
func TestBreakFreesADamagedRecord(t *testing.T) {
	dir := t.TempDir()
	at := "filelock://" + filepath.ToSlash(dir)
	if o := call("run", "--url", at, "a", "--", os.Args[0], "-test.list", "^$"); o.code != 0 {
		t.Fatalf("run: %+v", o)
	}
	if err := os.WriteFile(filepath.Join(dir, "key-a.lock"), []byte("hasp filelock record 1\nrubbish"), 0o600); err != nil {
		t.Fatal(err)
	}
	if o := call("inspect", "--url", at, "a"); o.code == 0 {
		t.Errorf("inspect: %+v", o)
	}
	if o := call("break", "--url", at, "--force", "a"); o.code != 0 {
		t.Errorf("break: %+v", o)
	}
	if o := call("inspect", "--url", at, "a"); o.code != 0 {
		t.Errorf("inspect after break: %+v", o)
	}
}
