package filelock

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

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
	if keys := listed(t, on(filepath.Join(d.dir, "missing"), nil), ""); keys != nil {
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
	whole, _, err := readFile(d.path("k"))
	must(t, err)
	write(t, d.path("note"), []byte("see you at noon\n"))
	write(t, d.path("half"), whole[:len(whole)/2])
	write(t, d.path("copy"), whole)
	write(t, filepath.Join(d.dir, "key-%.lock"), whole)
	write(t, filepath.Join(d.dir, "key-%zz.lock"), whole)
	write(t, filepath.Join(d.dir, "sha256-xyz.lock"), whole)
	must(t, os.Mkdir(d.path("directory"), 0o700))
	if got := listed(t, d, ""); !slices.Equal(got, []string{"k"}) {
		t.Errorf("got %q", got)
	}
	for _, name := range []string{"key-%.lock", "key-%z", "sha256-xyz.lock", "sha256-.lock"} {
		if stripe, ok := stripeOfName(name); ok {
			t.Errorf("%s has stripe %d", name, stripe)
		}
	}
}
