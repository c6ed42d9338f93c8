package filelock

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"
)

func sample() *record {
	return &record{key: "jobs/42\n\x00\xff🔒", token: "abc_-", owner: "host/1/\"prog\"\r\n", pid: 4711,
		since: time.Date(2031, 5, 6, 7, 8, 9, 123456789, time.UTC), fence: 1<<64 - 1, clock: "55264967-af04/time:[1]",
		end: 12345 * time.Second, until: time.Date(2031, 5, 6, 7, 8, 39, 0, time.UTC), waited: 1500 * time.Millisecond}
}

// The format is shared with processes that run another build.
func TestRecordFormatStays(t *testing.T) {
	const want = `hasp filelock record 2
key "jobs/42\n\x00\xff\U0001f512"
token "abc_-"
owner "host/1/\"prog\"\r\n"
pid 4711
since 2031-05-06T07:08:09.123456789Z
fence 18446744073709551615
clock "55264967-af04/time:[1]"
end 12345000000000
until 2031-05-06T07:08:39Z
waited 1500000000
sum 9733942d
`
	if got := string(sample().encode()); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestRecordCutShortIsTorn(t *testing.T) {
	b := sample().encode()
	for n := range b {
		if _, err := decode(b[:n]); !errors.Is(err, errTorn) {
			t.Fatalf("first %d of %d bytes: %v", n, len(b), err)
		}
		// Some file systems return zeros for data that has not reached the disk.
		zeros := append(bytes.Clone(b[:n]), make([]byte, len(b)-n)...)
		if _, err := decode(zeros); n < len(b)-sumLen && !errors.Is(err, errTorn) {
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
			if r, err := decode(c); err == nil {
				t.Fatalf("byte %d changed, and read as %+v", i, r)
			}
		}
	}
	if _, err := decode(append(b, '\n')); err == nil {
		t.Error("a record with something behind it was taken")
	}
}

func TestRecordOfAnotherKindIsRefused(t *testing.T) {
	newer := strings.Replace(string(sample().encode()), "record 2\n", "record 3\n", 1)
	valid := string(sample().encode())
	body := valid[:len(valid)-sumLen]
	for name, c := range map[string]struct {
		content string
		want    error
	}{
		"text":          {"see you at noon\n", errForeign},
		"number":        {"4711\n", errForeign},
		"newer":         {newer, errVersion},
		"extra field":   {string(seal([]byte(body + "color red\n"))), errForeign},
		"missing field": {string(seal([]byte(strings.Replace(body, "pid 4711\n", "", 1)))), errForeign},
		"bad number":    {string(seal([]byte(strings.Replace(body, "4711", "x", 1)))), errForeign},
		"bad quote":     {string(seal([]byte(strings.Replace(body, `"abc_-"`, `abc`, 1)))), errForeign},
		"bad time":      {string(seal([]byte(strings.Replace(body, "2031-05-06T07:08:39Z", "noon", 1)))), errForeign},
	} {
		if _, err := decode([]byte(c.content)); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(sample().encode())
	f.Add([]byte(recordHeader))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decode(b)
		if err != nil {
			return
		}
		if again, err := decode(r.encode()); err != nil || !reflect.DeepEqual(again, r) {
			t.Errorf("%q reads as %+v, and that as %+v, %v", b, r, again, err)
		}
	})
}
