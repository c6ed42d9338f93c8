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
	"github.com/hasplock/hasp/internal/await"
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
		client := await.Value(hasp.Open(t.Context(), c.url, nil))
		t.Chdir(t.TempDir()) // a new working directory must not move the locks
		lease := await.Value(client.TryLock(t.Context(), "k", hasp.WithFence()))
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
		client := await.Value(hasp.Open(t.Context(), "filelock://"+dir+"?mode=0750", nil))
		must(t, client.Close())
		return files(t, dir)
	}
	if names := leaves(); !slices.Equal(names, []string{"guard-00"}) {
		t.Errorf("left: %v", names)
	}
	if fi, err := os.Stat(dir); err != nil || fi.Mode().Perm() != 0o750 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	r := record{key: "k", token: "t", until: time.Now().UTC()}
	write(t, filepath.Join(dir, stateName("k")), r.file())
	if names := leaves(); slices.Contains(names, stateName("k")) {
		t.Errorf("the expired record is still there: %v", names)
	}
}

func listed(t *testing.T, d *driver, prefix string) (keys []string) {
	t.Helper()
	for e, err := range d.List(t.Context(), prefix, time.Second) {
		must(t, err)
		keys = append(keys, e.Key)
	}
	slices.Sort(keys)
	return keys
}

func TestListOfOddKeys(t *testing.T) {
	d := on(t.TempDir(), nil)
	if keys := listed(t, on(filepath.Join(d.folder.path, "missing"), nil), ""); keys != nil {
		t.Errorf("a directory that does not exist: %q", keys)
	}
	for _, key := range oddKeys {
		acquire(t, d, claim(key))
		if stripe, ok := stripeOfName(stateName(key)); !ok || stripe != stripeOf(key) {
			t.Errorf("stripe of the file of %.20q: %d, want %d", key, stripe, stripeOf(key))
		}
	}
	for _, prefix := range append(oddKeys, "", "a", "x", "X", strings.Repeat("x", 118), strings.Repeat("x", 200)) {
		var want []string
		for _, key := range oddKeys {
			if strings.HasPrefix(key, prefix) {
				want = append(want, key)
			}
		}
		slices.Sort(want)
		if got := listed(t, d, prefix); !slices.Equal(got, want) {
			t.Errorf("prefix %.20q: got %.300q, want %.300q", prefix, got, want)
		}
	}
}

func TestListLeavesStrangersOut(t *testing.T) {
	d := on(t.TempDir(), nil)
	acquire(t, d, claim("k"))
	whole, _, err := readFile(d.folder.recordFile("k"))
	must(t, err)
	write(t, d.folder.recordFile("note"), []byte("see you at noon\n"))
	write(t, d.folder.recordFile("half"), whole[:len(whole)/2])
	write(t, d.folder.recordFile("copy"), whole)
	write(t, filepath.Join(d.folder.path, "key-%.lock"), whole)
	write(t, filepath.Join(d.folder.path, "key-%zz.lock"), whole)
	write(t, filepath.Join(d.folder.path, "sha256-xyz.lock"), whole)
	must(t, os.Mkdir(d.folder.recordFile("directory"), 0o700))
	if got := listed(t, d, ""); !slices.Equal(got, []string{"k"}) {
		t.Errorf("got %q", got)
	}
	for _, name := range []string{"key-%.lock", "key-%z", "sha256-xyz.lock", "sha256-.lock"} {
		if stripe, ok := stripeOfName(name); ok {
			t.Errorf("%s has stripe %d", name, stripe)
		}
	}
}
