package resp

import (
	"bufio"
	"bytes"
	"fmt"
	"math"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
)

func TestReadReply(t *testing.T) {
	long := strings.Repeat("x", 100)
	for text, want := range map[string]any{
		"+OK\r\n":                                "OK",
		"+\r\n":                                  "",
		"+" + long + "\r\n":                      long,
		"-ERR no\r\n":                            replyError("ERR no"),
		"-MOVED 1 " + long + ":1\r\n":            replyError("MOVED 1 " + long + ":1"),
		":-7\r\n":                                int64(-7),
		":9223372036854775807\r\n":               int64(math.MaxInt64),
		"$0\r\n\r\n":                             "",
		"$4\r\na\r\nb\r\n":                       "a\r\nb",
		"$100\r\n" + long + "\r\n":               long,
		"$-1\r\n":                                nil,
		"*-1\r\n":                                nil,
		"_\r\n":                                  nil,
		"*0\r\n":                                 []any{},
		"*3\r\n:1\r\n$-1\r\n*1\r\n-ERR x\r\n":    []any{int64(1), nil, []any{replyError("ERR x")}},
		"%1\r\n+k\r\n#t\r\n":                     []any{"k", true},
		"~2\r\n,1.5\r\n#f\r\n":                   []any{1.5, false},
		"(123456789012345678901234567890\r\n":    "123456789012345678901234567890",
		"=7\r\ntxt:abc\r\n":                      "abc",
		"!6\r\nERR no\r\n":                       replyError("ERR no"),
		">2\r\n+news\r\n:1\r\n":                  push{[]any{"news", int64(1)}},
		"|1\r\n+ttl\r\n:1\r\n*1\r\n+a\r\n":       []any{"a"},
		"*2\r\n|1\r\n+ttl\r\n:1\r\n+a\r\n+b\r\n": []any{"a", "b"},
	} {
		// In one piece, and byte by byte through a buffer that is too small.
		whole := bufio.NewReader(strings.NewReader(text))
		pieces := bufio.NewReaderSize(iotest.OneByteReader(strings.NewReader(text)), 16)
		for _, in := range []*bufio.Reader{whole, pieces} {
			got, err := readReply(in)
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%.40q: got %v, %v; want %v", text, got, err, want)
			}
			if _, err := in.ReadByte(); err == nil {
				t.Errorf("%.40q: something is left", text)
			}
		}
	}
}

func TestReadReplyRefusesWhatIsNone(t *testing.T) {
	for _, text := range []string{
		"", "\r\n", "+OK\n", "+OK", "?1\r\n", ":\r\n", ":x\r\n", "$x\r\n", "$-2\r\n", "$3\r\nabcde\r\n", "$3\r\nab", "*1\r\n", ",x\r\n",
		"$536870913\r\n", ">-1\r\n", "|-1\r\n", "%-1\r\n", "~-1\r\n", strings.Repeat("|0\r\n", 100) + ":1\r\n", strings.Repeat("*1\r\n", 100) + ":1\r\n",
	} {
		if v, err := readReply(bufio.NewReader(strings.NewReader(text))); err == nil {
			t.Errorf("%.40q: got %v", text, v)
		}
	}
}

// What a server announces is not believed before it comes.
func TestReadReplyTakesNoMoreMemoryThanComes(t *testing.T) {
	const much = 16 << 20
	for _, text := range []string{"$536870000\r\nabc", "*536870000\r\n:1\r\n", "+" + strings.Repeat("x", 2*maxLine)} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		v, err := readReply(bufio.NewReader(strings.NewReader(text)))
		runtime.ReadMemStats(&after)
		if err == nil {
			t.Errorf("%.40q: got %.40v", text, v)
		}
		if took := after.TotalAlloc - before.TotalAlloc; took > much {
			t.Errorf("%.40q: %d bytes", text, took)
		}
	}
}

func FuzzReadReply(f *testing.F) {
	f.Add([]byte("*2\r\n$1\r\na\r\n:1\r\n"))
	f.Add([]byte("%1\r\n+k\r\n_\r\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		whole, err1 := readReply(bufio.NewReader(bytes.NewReader(text)))
		pieces, err2 := readReply(bufio.NewReaderSize(iotest.OneByteReader(bytes.NewReader(text)), 16))
		if (err1 == nil) != (err2 == nil) || err1 == nil && fmt.Sprint(whole) != fmt.Sprint(pieces) {
			t.Errorf("in one piece: %v, %v; in many: %v, %v", whole, err1, pieces, err2)
		}
	})
}

func TestAppendCommand(t *testing.T) {
	got, ok := appendCommand(nil, []any{"set", "k", "v\r\n", -12, int64(math.MinInt64), ""})
	want := "*6\r\n$3\r\nset\r\n$1\r\nk\r\n$3\r\nv\r\n\r\n$3\r\n-12\r\n$20\r\n-9223372036854775808\r\n$0\r\n\r\n"
	if !ok || string(got) != want {
		t.Errorf("got %q, %v", got, ok)
	}
	for _, arg := range []any{nil, 1.5, true, []byte("v"), uint(1), struct{}{}} {
		if got, ok := appendCommand([]byte("*"), []any{"set", arg}); ok {
			t.Errorf("%v: got %q", arg, got)
		}
	}
}
