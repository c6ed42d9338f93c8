package resp

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
)

// replyReader returns a reader as a wire has it: below its buffer is a guard.
func replyReader(sent io.Reader) *bufio.Reader {
	return bufio.NewReaderSize(Guard(stream{Reader: sent}), maxLine)
}

func TestReadReply(t *testing.T) {
	long := strings.Repeat("x", 100)
	tooLong := strings.Repeat("x", maxLine+1) // for the reader's buffer
	for text, want := range map[string]any{
		"+OK\r\n":                             "OK",
		"+\r\n":                               "",
		"+" + long + "\r\n":                   long,
		"+" + tooLong[:maxLine-3] + "\r\n":    tooLong[:maxLine-3],
		"-ERR no\r\n":                         replyError("ERR no"),
		"-MOVED 1 " + long + ":1\r\n":         replyError("MOVED 1 " + long + ":1"),
		":-7\r\n":                             int64(-7),
		":9223372036854775807\r\n":            int64(math.MaxInt64),
		"$0\r\n\r\n":                          "",
		"$4\r\na\r\nb\r\n":                    "a\r\nb",
		"$100\r\n" + long + "\r\n":            long,
		"$32769\r\n" + tooLong + "\r\n":       tooLong,
		"$-1\r\n":                             nil,
		"*-1\r\n":                             nil,
		"_\r\n":                               nil,
		"*0\r\n":                              []any{},
		"*3\r\n:1\r\n$-1\r\n*1\r\n-ERR x\r\n": []any{int64(1), nil, []any{replyError("ERR x")}},
		">2\r\n+news\r\n:1\r\n":               push{[]any{"news", int64(1)}},
	} {
		// In one piece, and byte by byte.
		for _, sent := range []io.Reader{strings.NewReader(text), iotest.OneByteReader(strings.NewReader(text))} {
			in := replyReader(sent)
			got, err := readReply(in)
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%.40q: got %.40v, %v; want %.40v", text, got, err, want)
			}
			if _, err := in.ReadByte(); err == nil {
				t.Errorf("%.40q: bytes are left", text)
			}
		}
	}
}

func TestReadReplyRefusesInvalidReplies(t *testing.T) {
	for _, text := range []string{
		"", "\r\n", "+OK\n", "+OK", "?1\r\n", ":\r\n", ":x\r\n", "$x\r\n", "$-2\r\n", "$3\r\nabcde\r\n", "$3\r\nab", "*1\r\n", ",1.5\r\n",
		"$536870913\r\n", ">-1\r\n", "|-1\r\n", "%-1\r\n", "~-1\r\n", strings.Repeat("|0\r\n", 100) + ":1\r\n", strings.Repeat("*1\r\n", 100) + ":1\r\n",
		"+" + strings.Repeat("x", maxLine-2) + "\r\n", "%1\r\n+k\r\n#t\r\n", "~1\r\n:1\r\n", "(1\r\n", "=7\r\ntxt:abc\r\n", "!6\r\nERR no\r\n", "*1\r\n#t\r\n",
	} {
		if v, err := readReply(replyReader(strings.NewReader(text))); err == nil {
			t.Errorf("%.40q: got %.40v", text, v)
		}
	}
}

// The length that a server announces takes no memory before the bytes arrive.
func TestReadReplyTakesNoMoreMemoryThanArrives(t *testing.T) {
	const much = 16 << 20
	for _, text := range []string{"$67108000\r\nabc", "$536870000\r\nabc", "*262143\r\n:1\r\n", "*536870000\r\n:1\r\n", "+" + strings.Repeat("x", 2*maxLine)} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		v, err := readReply(replyReader(strings.NewReader(text)))
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
		whole, err1 := readReply(replyReader(bytes.NewReader(text)))
		pieces, err2 := readReply(replyReader(iotest.OneByteReader(bytes.NewReader(text))))
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
