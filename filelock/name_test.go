package filelock

import (
	"bytes"
	"strings"
	"testing"
)

// oddKeys are names that may confuse file systems, shells or this package. All are different.
var oddKeys = []string{
	"plain", "Plain", "PLAIN", "plain.", "plain ", ".", "..", "/", "//", "a/b", "a\\b", "../../etc/passwd", "%2f", "%2F", "a%2fb",
	"\x00", "\x00\x00", "a\x00", "\r\n", "\n", "\x1b[31m", "\xff", "\xfe\xff", "é", "e\u0301", "🔒", "日本語", "~", "$HOME", "*", "?", ":", "|",
	"con", "NUL", "nul.lock", "aux", "key-plain.lock", "guard-00", "stripe-00", "fence", "temp-00", "sha256-", "key-", ".lock",
	"hasp:{tag}:fence:key", "{", "}", "-", "--help", " ", "\t", "PROGRA~1", "a", "A", "aa", "aA", "Aa", "AA",
	strings.Repeat("x", 119), strings.Repeat("x", 120), strings.Repeat("x", 121), strings.Repeat("X", 40), strings.Repeat("X", 41),
	strings.Repeat("k", 1000), strings.Repeat("k", 1000) + "/", strings.Repeat("\x00", 1500), strings.Repeat("🔒", 5000),
}

// checkName returns the name for key, and checks that every file system accepts it.
func checkName(t *testing.T, key string) string {
	t.Helper()
	name := stateName(key)
	if len(name) > 143 {
		t.Errorf("name of %.20q… has %d bytes", key, len(name))
	}
	for _, c := range []byte(name) {
		if !strings.ContainsRune("abcdefghijklmnopqrstuvwxyz0123456789-_.%", rune(c)) {
			t.Fatalf("name %q of %.20q has byte %q", name, key, c)
		}
	}
	if !strings.HasPrefix(name, "key-") && !strings.HasPrefix(name, "sha256-") || !strings.HasSuffix(name, ".lock") {
		t.Errorf("name %q of %.20q may be taken for another file", name, key)
	}
	return name
}

// The format is shared with processes that run another build.
func TestNamesStay(t *testing.T) {
	for key, want := range map[string]string{
		"jobs/42":                "key-jobs%2f42.lock",
		"Case":                   "key-%43ase.lock",
		"a\x00b.c":               "key-a%00b.c.lock",
		strings.Repeat("k", 200): "sha256-6de3c288691037361962041f2273f381658187e426187979e0273d026ea1b946.lock",
	} {
		if got := stateName(key); got != want {
			t.Errorf("stateName(%.20q) = %s, want %s", key, got, want)
		}
	}
	if got := stripeOf("jobs/42"); got != 20 {
		t.Errorf("stripeOf = %d", got)
	}
}

func FuzzNamesDiffer(f *testing.F) {
	for i, key := range oddKeys {
		f.Add([]byte(key), []byte(oddKeys[(i+1)%len(oddKeys)]))
	}
	f.Add([]byte("a"), []byte("A"))
	f.Add([]byte("%41"), []byte("A"))
	f.Add(bytes.Repeat([]byte("x"), 121), bytes.Repeat([]byte("x"), 120))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		if na, nb := checkName(t, string(a)), checkName(t, string(b)); (na == nb) != bytes.Equal(a, b) {
			t.Errorf("%q and %q: %q and %q", a, b, na, nb)
		}
	})
}
