package filelock

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
)

func TestURLNamesTheDirectory(t *testing.T) {
	root := t.TempDir()
	t.Chdir(root)
	t.Setenv("HOME", filepath.Join(root, "home"))
	t.Setenv("XDG_STATE_HOME", "")
	abs := filepath.Join(root, "abs")
	for _, c := range []struct{ url, state, want string }{
		{"filelock://" + abs, "", abs},
		{"filelock://" + abs + "/deep%20/er?ttl=1s&prefix=p:", "", filepath.Join(abs, "deep%20", "er")},
		{"filelock://./rel", "", filepath.Join(root, "rel")},
		{"filelock://../" + filepath.Base(root) + "/up", "", filepath.Join(root, "up")},
		{"filelock://", "", filepath.Join(root, "home", ".local", "state", "hasp")},
		{"filelock://", filepath.Join(root, "state"), filepath.Join(root, "state", "hasp")},
		{"filelock://", "relative/is/ignored", filepath.Join(root, "home", ".local", "state", "hasp")},
	} {
		t.Setenv("XDG_STATE_HOME", c.state)
		client, err := hasp.Open(t.Context(), c.url, nil)
		if err != nil {
			t.Errorf("%s: %v", c.url, err)
			continue
		}
		t.Chdir(t.TempDir()) // a new working directory must not move the locks
		lease, err := client.TryLock(t.Context(), "k", hasp.WithFence())
		must(t, err)
		if !slices.ContainsFunc(files(t, c.want), func(name string) bool { return strings.HasSuffix(name, ".lock") }) {
			t.Errorf("%s: no lock in %s", c.url, c.want)
		}
		must(t, lease.Unlock(t.Context()))
		must(t, client.Close())
		t.Chdir(root)
	}
}

func TestBadURLsAreInvalid(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	for url, want := range map[string]string{
		"filelock://var/lock/app":         "filelock:///var/lock/app or filelock://./var/lock/app",
		"filelock://~/locks":              "neither absolute",
		"filelock+tcp:///var/lock/app":    "no transport",
		"filelock:///x?mod=0700":          `unknown parameter "mod"`,
		"filelock://./x?mode=rwx":         "octal",
		"filelock://./x?mode=0":           "octal",
		"filelock://./x?mode=0600":        "mode=0600: want 0700 to 0777",
		"filelock://./x?mode=1777":        "mode=1777: want 0700 to 0777",
		"filelock://./x?mode=99999999999": "octal",
	} {
		_, err := hasp.Open(t.Context(), url, nil)
		if !errors.Is(err, hasp.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", url, err)
		}
	}
	_, err := hasp.Config{Strategy: "filelock", Nodes: []string{"/a", "/b"}}.Open(t.Context(), nil)
	if !errors.Is(err, hasp.ErrInvalid) {
		t.Error(err)
	}
	for _, home := range []string{"HOME", "USERPROFILE", "home", "XDG_STATE_HOME"} {
		t.Setenv(home, "")
	}
	_, err = hasp.Open(t.Context(), "filelock://", nil)
	if !errors.Is(err, hasp.ErrInvalid) || !strings.Contains(err.Error(), "XDG_STATE_HOME") {
		t.Error(err)
	}
	if names := files(t, dir); len(names) > 0 {
		t.Errorf("made on the way: %v", names)
	}
}

func TestOpenMakesTheDirectoryAndSweepsIt(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	leaves := func() []string {
		client, err := hasp.Open(t.Context(), "filelock://"+dir+"?mode=0750", nil)
		must(t, err)
		must(t, client.Close())
		return files(t, dir)
	}
	if names := leaves(); !slices.Equal(names, []string{"guard-fence"}) {
		t.Errorf("left: %v", names)
	}
	if fi, err := os.Stat(dir); err != nil || fi.Mode().Perm() != 0o750 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	r := record{key: "k", token: "t", until: time.Now()}
	write(t, filepath.Join(dir, stateName("k")), r.encode())
	if names := leaves(); slices.Contains(names, stateName("k")) {
		t.Errorf("the expired record is still there: %v", names)
	}
}
