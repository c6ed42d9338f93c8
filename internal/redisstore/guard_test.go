package redisstore

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
)

// stream is a connection on which a server says something and no more.
type stream struct {
	net.Conn
	io.Reader
}

func (s stream) Read(p []byte) (int, error) { return s.Reader.Read(p) }

// guarded is what a guard passes on.
func guarded(said io.Reader) (string, error) {
	passed, err := io.ReadAll(&guard{Conn: stream{Reader: said}})
	return string(passed), err
}

func TestGuardPassesReplies(t *testing.T) {
	for _, text := range []string{
		"+OK\r\n", ":1\r\n", "$-1\r\n", "*-1\r\n", "_\r\n", "$0\r\n\r\n", "$4\r\na\r\nb\r\n", "*0\r\n", "%0\r\n", "|0\r\n:1\r\n",
		"*2\r\n*1\r\n:1\r\n$1\r\na\r\n", "%1\r\n+a\r\n*0\r\n", "|1\r\n+a\r\n:1\r\n*1\r\n:1\r\n", ">2\r\n+a\r\n:1\r\n+OK\r\n",
		"-ERR " + strings.Repeat("x", maxLine/2) + "\r\n", "!5\r\nERR x\r\n", "=5\r\ntxt:a\r\n", "(1\r\n", ",nan\r\n", "#t\r\n",
		strings.Repeat("*1\r\n", maxDepth) + ":1\r\n" + strings.Repeat("*1\r\n", maxDepth) + ":1\r\n",
	} {
		text += text // which finds it where it began
		for _, in := range []io.Reader{strings.NewReader(text), iotest.OneByteReader(strings.NewReader(text)), iotest.HalfReader(strings.NewReader(text))} {
			if got, err := guarded(in); err != nil || got != text {
				t.Errorf("%.60q: passed %.60q, %v", text, got, err)
			}
		}
	}
}

func TestGuardEndsWhatIsNoReplyOrTooMuch(t *testing.T) {
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

// go-redis makes room for what is announced, and hasp for what it may want.
func TestAnnouncementsTakeNoMemory(t *testing.T) {
	for _, said := range []string{"$2147483647\r\nabc", "*2147483647\r\n:1\r\n", "%2147483647\r\n:1\r\n", strings.Repeat("*200000\r\n", 1000),
		"+" + strings.Repeat("x", 2<<20), strings.Repeat("*1\r\n", 1<<18), "$9223372036854775806\r\n"} {
		addr := sayer(t, func(string) string { return said })
		s, _, err := Prepare("redis://"+addr, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err = s.Do(t.Context(), "get", "k")
		runtime.ReadMemStats(&after)
		if took := after.TotalAlloc - before.TotalAlloc; err == nil || took > 16<<20 {
			t.Errorf("%.20q: %v, %d bytes", said, err, took)
		}
	}
}

// sayer is a server that knows how a connection begins, and to the rest
// replies what reply says.
func sayer(t *testing.T, reply func(command string) string) (addr string) {
	t.Helper()
	return redistest.Serve(t, func(c net.Conn) {
		defer c.Close()
		buf := make([]byte, 4096)
		for {
			n, err := c.Read(buf)
			if err != nil {
				return
			}
			text := reply(strings.ToLower(string(buf[:n])))
			switch said := bytes.ToLower(buf[:n]); {
			case bytes.Contains(said, []byte("hello")):
				text = "%1\r\n+proto\r\n:3\r\n"
			case bytes.Contains(said, []byte("\nclient\r")):
				text = strings.Repeat("+OK\r\n", bytes.Count(said, []byte("\nclient\r")))
			}
			if _, err := io.WriteString(c, text); err != nil {
				return
			}
		}
	})
}

// What a server says that is listened to may be no message.
func TestListeningSurvivesGarbage(t *testing.T) {
	for _, said := range []string{"*0\r\n", ">0\r\n", "*1\r\n:1\r\n", "*1\r\n+subscribe\r\n", "*3\r\n+subscribe\r\n+c\r\n+x\r\n", "*3\r\n+message\r\n:1\r\n:2\r\n",
		"*3\r\n+message\r\n+c\r\n*1\r\n:1\r\n", "*1\r\n+pong\r\n", "*2\r\n+pong\r\n:1\r\n", "*2\r\n+pmessage\r\n+c\r\n", ":1\r\n", "_\r\n", "*1\r\n*1\r\n*0\r\n"} {
		t.Run(fmt.Sprintf("%q", said), func(t *testing.T) {
			t.Parallel()
			var later atomic.Bool
			addr := sayer(t, func(string) string {
				if !later.Swap(true) { // the PING of a connection that is made
					return "+PONG\r\n"
				}
				return said
			})
			s, _, err := Prepare("redis://"+addr, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			if l, err := s.Listen(ctx, "c", "c", func(string, bool) {}); err == nil {
				l.Close()
				t.Error("listens")
			}
		})
	}
}

// A client that was handed in may not survive a reply, but the program does.
func TestAClientThatPanicsIsAnOutage(t *testing.T) {
	addr := sayer(t, func(string) string { return "$9223372036854775806\r\n" })
	rdb := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1})
	defer rdb.Close()
	s := New(rdb)
	defer s.Close()
	if _, err := s.Do(t.Context(), "get", "k"); err == nil || !strings.Contains(err.Error(), "panicked") {
		t.Errorf("a command: %v", err)
	}
	for _, r := range s.Together(t.Context(), []any{"get", "a"}, []any{"get", "b"}) {
		if r.Err == nil {
			t.Errorf("a pipeline: got %v", r.Value)
		}
	}
	if l, err := s.Listen(t.Context(), "c", "c", func(string, bool) {}); err == nil {
		l.Close()
		t.Error("a channel: listens")
	}
}

// FuzzGuard: it makes no difference in what pieces the replies come, and what
// a wire takes for a reply is passed on.
func FuzzGuard(f *testing.F) {
	f.Add([]byte("*2\r\n$1\r\na\r\n:1\r\n+OK\r\n"))
	f.Add([]byte("|1\r\n+k\r\n_\r\n%1\r\n+a\r\n>1\r\n:1\r\n"))
	f.Fuzz(func(t *testing.T, said []byte) {
		_, err := guarded(bytes.NewReader(said))
		_, pieces := guarded(iotest.OneByteReader(bytes.NewReader(said)))
		if !errors.Is(pieces, err) && !errors.Is(err, pieces) {
			t.Errorf("in one piece %v, in many %v", err, pieces)
		}
		if len(said) > maxLine {
			return
		}
		if n := wholeReplies(said); n > 0 {
			if got, err := guarded(bytes.NewReader(said[:n])); err != nil || len(got) != n {
				t.Errorf("%q: passed %q, %v", said[:n], got, err)
			}
		}
	})
}

// A time to live may be longer than a Duration.
func TestTermsBeyondADuration(t *testing.T) {
	for pttl, want := range map[int64]time.Duration{-1: -time.Millisecond, 0: 0, 5: 5 * time.Millisecond, 1<<63 - 1: 100 * 365 * 24 * time.Hour} {
		if got := Term(pttl); got != want {
			t.Errorf("%d: got %v", pttl, got)
		}
	}
	f, _ := Decode([]any{int64(1 << 60), "token#owner", ""})
	var held *backend.HeldError
	if errors.As(f.Held(), &held); held.RetryAfter <= 0 || f.Status().TTL <= 0 {
		t.Errorf("%v, %v", held, f.Status())
	}
}

// An error tells the beginning of a reply, and no part of a password.
func TestUnexpectedRepliesAreShortAndHoldNoPassword(t *testing.T) {
	for _, reply := range []any{strings.Repeat("x", 95) + "hunter2", []any{"hunter2", strings.Repeat("y", 1<<20)}} {
		got := unexpected(reply, []string{"hunter2"}).Error()
		if strings.Contains(got, "hun") || len(got) > 200 {
			t.Errorf("got %q", got)
		}
	}
}

// wholeReplies is how many bytes of said are replies to a wire.
func wholeReplies(said []byte) int {
	rest := bytes.NewReader(said)
	in := bufio.NewReader(rest)
	whole := 0
	for {
		if _, err := readReply(in); err != nil {
			return whole
		}
		whole = len(said) - rest.Len() - in.Buffered()
	}
}
