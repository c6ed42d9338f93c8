package filelock

import (
	"bytes"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func sample() *record {
	return &record{key: "jobs/42\n\x00\xff🔒", token: "abc_-", owner: "host/1/\"prog\"\r\n", pid: 4711,
		since: time.Date(2031, 5, 6, 7, 8, 9, 123456789, time.UTC), fence: 1<<64 - 1, waited: 1500 * time.Millisecond,
		change: 7, clock: "55264967-af04-4cb8-9b03-5d3b2c6b5f1e", end: 12345 * time.Second,
		until: time.Date(2031, 5, 6, 7, 8, 39, 0, time.UTC)}
}

// The format is shared with processes that run another build.
func TestRecordFormatStays(t *testing.T) {
	const want = `hasp filelock record 3
key "jobs/42\n\x00\xff\U0001f512"
token "abc_-"
owner "host/1/\"prog\"\r\n"
pid 4711
since 2031-05-06T07:08:09.123456789Z
fence 18446744073709551615
waited 1500000000
change 00000000000000000007
kept false
clock 55264967-af04-4cb8-9b03-5d3b2c6b5f1e
end 00000012345000000000
until 2031-05-06T07:08:39.000000000Z
sum a7f3e17f
`
	if got := string(sample().file()); got != want+want {
		t.Errorf("got\n%s\nwant\n%s", got, want+want)
	}
}

func TestRecordCutShortIsTorn(t *testing.T) {
	b := sample().file()
	for n := range len(b) - 1 {
		if _, err := decode(b[:n]); !errors.Is(err, errTorn) {
			t.Fatalf("first %d of %d bytes: %v", n, len(b), err)
		}
		// Some file systems return zeros for data that has not reached the disk.
		zeros := append(bytes.Clone(b[:n]), make([]byte, len(b)-n)...)
		if _, err := decode(zeros); n < len(b)/2-sumLen && !errors.Is(err, errTorn) {
			t.Fatalf("first %d of %d bytes, then zeros: %v", n, len(b), err)
		}
	}
}

func TestRecordChangedIsRefused(t *testing.T) {
	b := sample().encode()
	for i := range b {
		for _, flip := range []byte{1, 0x80} {
			c := bytes.Clone(b)
			c[i] ^= flip
			if r, err := decode(slices.Concat(c, c)); err == nil {
				t.Fatalf("byte %d changed, and read as %+v", i, r)
			}
		}
	}
	if _, err := decode(append(sample().file(), '\n')); err == nil {
		t.Error("a record with something behind it was taken")
	}
}

func TestRecordOfAnotherKindIsRefused(t *testing.T) {
	valid := string(sample().encode())
	body := valid[:len(valid)-sumLen]
	for name, c := range map[string]struct {
		content string
		want    error
	}{
		"text":          {"see you at noon\n", errForeign},
		"short text":    {"hi", errForeign},
		"newer":         {strings.Replace(valid, "record 3\n", "record 4\n", 1), errVersion},
		"extra field":   {body + "color red\n", errForeign},
		"missing field": {strings.Replace(body, "pid 4711\n", "", 1), errForeign},
		"bad number":    {strings.Replace(body, "4711", "x", 1), errForeign},
		"bad time":      {strings.Replace(body, "2031-05-06T07:08:39.000000000Z", "noon", 1), errForeign},
	} {
		if strings.HasPrefix(c.content, recordHeader) {
			c.content = strings.Repeat(string(seal([]byte(c.content))), 2)
		}
		if _, err := decode([]byte(c.content)); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(sample().file())
	f.Add([]byte(recordHeader))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decode(b)
		if err != nil {
			return
		}
		if again, err := decode(r.file()); err != nil || !reflect.DeepEqual(again, r) {
			t.Errorf("%q reads as %+v, and that as %+v, %v", b, r, again, err)
		}
	})
}

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
