package resp

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/iotest"
)

// stream is a connection from which the bytes of Reader arrive.
type stream struct {
	net.Conn
	io.Reader
}

func (s stream) Read(p []byte) (int, error) { return s.Reader.Read(p) }

// guarded returns what a guard passes on.
func guarded(sent io.Reader) (string, error) {
	passed, err := io.ReadAll(&guard{Conn: stream{Reader: sent}})
	return string(passed), err
}

func TestGuardPassesReplies(t *testing.T) {
	for _, text := range []string{
		"+OK\r\n", ":1\r\n", "$-1\r\n", "*-1\r\n", "_\r\n", "$0\r\n\r\n", "$4\r\na\r\nb\r\n", "*0\r\n", "%0\r\n", "|0\r\n:1\r\n",
		"*2\r\n*1\r\n:1\r\n$1\r\na\r\n", "%1\r\n+a\r\n*0\r\n", "|1\r\n+a\r\n:1\r\n*1\r\n:1\r\n", ">2\r\n+a\r\n:1\r\n+OK\r\n",
		"-ERR " + strings.Repeat("x", maxLine/2) + "\r\n", "!5\r\nERR x\r\n", "=5\r\ntxt:a\r\n", "(1\r\n", ",nan\r\n", "#t\r\n",
		strings.Repeat("*1\r\n", maxDepth) + ":1\r\n" + strings.Repeat("*1\r\n", maxDepth) + ":1\r\n",
	} {
		text += text // the second time, the parser is in the state after a reply
		for _, in := range []io.Reader{strings.NewReader(text), iotest.OneByteReader(strings.NewReader(text)), iotest.HalfReader(strings.NewReader(text))} {
			if got, err := guarded(in); err != nil || got != text {
				t.Errorf("%.60q: passed %.60q, %v", text, got, err)
			}
		}
	}
}

func TestGuardRefusesInvalidAndLongReplies(t *testing.T) {
	for _, text := range []string{
		"HTTP/1.1 400 Bad Request\r\n", "\r\n", "OK\r\n", "$x\r\n", "$-2\r\n", "*-2\r\n", "%-1\r\n", ">-1\r\n", "$1\r\nabc\r\n", "$\r\n",
		"$2147483647\r\n", "*2147483647\r\n", "%2147483647\r\n", "~300000\r\n", ">300000\r\n", "|300000\r\n", "%200000\r\n",
		"$9223372036854775806\r\n", "$99999999999999999999\r\n", "*1\r\n*140000\r\n*140000\r\n", "*4\r\n$33554432\r\n",
		"+" + strings.Repeat("x", 2*maxLine), strings.Repeat("*1\r\n", maxDepth+1) + ":1\r\n", strings.Repeat("|0\r\n", maxItems+1),
		strings.Repeat("|1\r\n:1\r\n", maxItems), "*2\r\n" + strings.Repeat("*1\r\n", 40),
	} {
		if strings.HasPrefix(text, "*4") {
			text += strings.Repeat("x", 1<<25) + "\r\n$33554432\r\n"
		}
		for _, in := range []io.Reader{strings.NewReader(text + ":1\r\n"), iotest.HalfReader(strings.NewReader(text + ":1\r\n"))} {
			passed, err := guarded(in)
			if !errors.Is(err, errProtocol) && !errors.Is(err, errTooMuch) || strings.HasSuffix(passed, ":1\r\n") && !strings.HasSuffix(text, passed) {
				t.Errorf("%.60q: %v", text, err)
			}
		}
	}
}

// It makes no difference in which pieces the replies arrive.
func FuzzGuard(f *testing.F) {
	f.Add([]byte("*2\r\n$1\r\na\r\n:1\r\n+OK\r\n"))
	f.Add([]byte("|1\r\n+k\r\n_\r\n%1\r\n+a\r\n>1\r\n:1\r\n"))
	f.Fuzz(func(t *testing.T, sent []byte) {
		_, err := guarded(bytes.NewReader(sent))
		_, pieces := guarded(iotest.OneByteReader(bytes.NewReader(sent)))
		if !errors.Is(pieces, err) && !errors.Is(err, pieces) {
			t.Errorf("in one piece %v, in many %v", err, pieces)
		}
	})
}

// The error has the beginning of the reply, and no part of a password.
func TestErrorOfAnUnexpectedReplyIsShortAndHasNoPassword(t *testing.T) {
	for _, reply := range []any{strings.Repeat("x", 95) + "hunter2", []any{"hunter2", strings.Repeat("y", 1<<20)}} {
		got := Unexpected(reply, "hunter2").Error()
		if strings.Contains(got, "hun") || len(got) > 200 {
			t.Errorf("got %q", got)
		}
	}
}
