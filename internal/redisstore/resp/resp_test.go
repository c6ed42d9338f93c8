package resp

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"net"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/internal/await"
)

func TestReply(t *testing.T) {
	long := strings.Repeat("x", 100)
	tooLong := strings.Repeat("x", bufferSize+1) // for the reader's buffer
	for text, want := range map[string]any{
		"+OK\r\n":                             "OK",
		"+\r\n":                               "",
		"+" + long + "\r\n":                   long,
		"+" + tooLong[:bufferSize-3] + "\r\n": tooLong[:bufferSize-3],
		"-ERR no\r\n":                         ReplyError("ERR no"),
		"-MOVED 1 " + long + ":1\r\n":         ReplyError("MOVED 1 " + long + ":1"),
		":-7\r\n":                             int64(-7),
		":9223372036854775807\r\n":            int64(math.MaxInt64),
		"$0\r\n\r\n":                          "",
		"$4\r\na\r\nb\r\n":                    "a\r\nb",
		"$100\r\n" + long + "\r\n":            long,
		"$4097\r\n" + tooLong + "\r\n":        tooLong,
		"$-1\r\n":                             nil,
		"*-1\r\n":                             nil,
		"*0\r\n":                              []any{},
		"*3\r\n:1\r\n$-1\r\n*1\r\n-ERR x\r\n": []any{int64(1), nil, []any{ReplyError("ERR x")}},
	} {
		// In one piece, and byte by byte.
		for _, sent := range []io.Reader{strings.NewReader(text), iotest.OneByteReader(strings.NewReader(text))} {
			in := newReader(sent, bufferSize)
			r, err := in.reply()
			got := r.Value
			if r.Err != nil {
				got = r.Err
			}
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%.40q: got %.40v, %v; want %.40v", text, got, err, want)
			}
			if _, err := in.ReadByte(); err == nil {
				t.Errorf("%.40q: bytes are left", text)
			}
		}
	}
}

func TestReplyRefusesInvalidAndLongReplies(t *testing.T) {
	const huge = 1 << 25
	for _, text := range []string{
		"", "\r\n", "+OK\n", "+OK", "OK\r\n", "?1\r\n", ":\r\n", ":x\r\n", "$x\r\n", "$\r\n", "$-2\r\n", "*-2\r\n", "$3\r\nabcde\r\n", "$3\r\nab", "*1\r\n",
		"HTTP/1.1 400 Bad Request\r\n", ",1.5\r\n", ">1\r\n:1\r\n", "|1\r\n:1\r\n:1\r\n:1\r\n", "%1\r\n+k\r\n#t\r\n", "_\r\n", "*1\r\n#t\r\n",
		"+" + strings.Repeat("x", bufferSize-2) + "\r\n", strings.Repeat("*1\r\n", maxDepth+1) + ":1\r\n",
		"*262144\r\n" + strings.Repeat(":1\r\n", maxItems), "*2\r\n*131072\r\n" + strings.Repeat(":1\r\n", maxItems/2) + "*131072\r\n" + strings.Repeat(":1\r\n", maxItems/2),
		"*2\r\n$33554432\r\n" + strings.Repeat("x", huge) + "\r\n$33554432\r\n" + strings.Repeat("x", huge) + "\r\n",
	} {
		if v, err := newReader(strings.NewReader(text), bufferSize).reply(); err == nil {
			t.Errorf("%.40q: got %.40v", text, v)
		}
	}
}

// The length that a server announces takes no memory before the bytes arrive.
func TestReplyTakesNoMoreMemoryThanArrives(t *testing.T) {
	const much = 16 << 20
	for _, text := range []string{
		"$67108000\r\nabc", "$536870000\r\nabc", "$9223372036854775806\r\n", "*262143\r\n:1\r\n", "*536870000\r\n:1\r\n", "*9223372036854775806\r\n",
		"+" + strings.Repeat("x", 1<<20), strings.Repeat("*200000\r\n", 1000),
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		v, err := newReader(strings.NewReader(text), bufferSize).reply()
		runtime.ReadMemStats(&after)
		if err == nil {
			t.Errorf("%.40q: got %.40v", text, v)
		}
		if took := after.TotalAlloc - before.TotalAlloc; took > much {
			t.Errorf("%.40q: %d bytes", text, took)
		}
	}
}

// It makes no difference in which pieces a reply arrives.
func FuzzReply(f *testing.F) {
	f.Add([]byte("*2\r\n$1\r\na\r\n:1\r\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		whole, err1 := newReader(bytes.NewReader(text), bufferSize).reply()
		pieces, err2 := newReader(iotest.OneByteReader(bytes.NewReader(text)), bufferSize).reply()
		if (err1 == nil) != (err2 == nil) || err1 == nil && fmt.Sprint(whole) != fmt.Sprint(pieces) {
			t.Errorf("in one piece: %v, %v; in many: %v, %v", whole, err1, pieces, err2)
		}
	})
}

func TestAppendCommand(t *testing.T) {
	got := string(appendCommand(nil, []string{"set", "k", "v\r\n", ""}))
	want := "*4\r\n$3\r\nset\r\n$1\r\nk\r\n$3\r\nv\r\n\r\n$0\r\n\r\n"
	if got != want {
		t.Errorf("got %q", got)
	}
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

// answering returns a connection to a server that sends a reply to whatever it gets.
func answering(t *testing.T, reply string) *Conn {
	ours, theirs := net.Pipe()
	t.Cleanup(func() { ours.Close() })
	go func() {
		defer theirs.Close()
		for buf := make([]byte, 4096); ; {
			if _, err := theirs.Read(buf); err != nil {
				return
			}
			if _, err := io.WriteString(theirs, reply); err != nil {
				return
			}
		}
	}()
	return NewConn(ours, ours)
}

// A reply that no command asked for must not become the reply to the next command.
func TestConnWithAReplyTooManyIsNotUsedAgain(t *testing.T) {
	for reply, want := range map[string]bool{"+OK\r\n": true, "-ERR no\r\n": true, "+OK\r\n+OK\r\n": false, "-READONLY no\r\n": false} {
		if good := answering(t, reply).Do(t.Context(), make([]Reply, 1), []string{"ping"}); good != want {
			t.Errorf("%q: got %v", reply, good)
		}
	}
}

// newPool returns a Pool with room for size connections, until the end of the test.
func newPool(t *testing.T, size int, dial func(context.Context) (*Conn, error)) *Pool {
	p := NewPool(t.Context(), "server:1", size, dial)
	go p.CloseAtEnd()
	return p
}

// A server may be farther away than callers wait. The connection that one of them begins is for
// the next one, and counts as one connection.
func TestPoolKeepsAConnectionWhoseCallerHasLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, 1, func(ctx context.Context) (*Conn, error) {
			time.Sleep(time.Second)
			return answering(t, "+OK\r\n"), nil
		})
		do := func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 600*time.Millisecond)
			defer cancel()
			return p.Pipeline(ctx, []string{"ping"})[0].Err
		}
		if err := do(); err == nil {
			t.Error("answered before there was a connection")
		}
		for range 3 {
			if err := do(); err != nil {
				t.Error(err)
			}
		}
		if all, idle := p.Count(); all != 1 || idle != 1 {
			t.Errorf("%d connections, %d idle", all, idle)
		}
	})
}

// A connection whose making hangs does not take room for long after its caller has left.
func TestPoolGivesUpAConnectionThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hangs := true
		p := newPool(t, 1, func(ctx context.Context) (*Conn, error) {
			if hangs {
				hangs = false
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return answering(t, "+OK\r\n"), nil
		})
		for _, want := range []bool{false, true} {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			if err := p.Pipeline(ctx, []string{"ping"})[0].Err; (err == nil) != want {
				t.Errorf("got %v", err)
			}
		}
	})
}

// A connection for subscriptions waits for messages longer than its login may take.
func TestConnectionOutlastsItsLogin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, 1, func(ctx context.Context) (*Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			c := answering(t, "+OK\r\n")
			c.Do(ctx, make([]Reply, 1), []string{"auth", "password"})
			return c, nil
		})
		c := await.Value(p.Subscribe(t.Context()))
		ended := make(chan error, 1)
		go func() {
			var err error
			for err == nil { // the first is the answer to the PING
				_, _, _, err = c.Receive()
			}
			ended <- err
		}()
		time.Sleep(time.Minute)
		select {
		case err := <-ended:
			t.Errorf("it ended: %v", err)
		default:
		}
	})
}

// A firewall may forget all connections and tell nobody. The call that shows this ends those that
// were idle meanwhile. A caller that leaves early shows nothing.
func TestCallWithoutAReplyEndsTheConnectionsThatWereIdle(t *testing.T) {
	for name, want := range map[string]int{"late": 3, "early": 2, "answer": 2, "reset": 3, "wire": 3} {
		synctest.Test(t, func(t *testing.T) {
			within, dials := 10*time.Millisecond, 0
			p := newPool(t, 2, func(context.Context) (*Conn, error) {
				time.Sleep(within)
				if dials++; dials > 1 {
					return answering(t, "+OK\r\n"), nil
				}
				near, far := net.Pipe()
				go io.Copy(io.Discard, far)
				return NewConn(near, near), nil
			})
			ping := func() { await.Must(t, p.Pipeline(context.Background(), []string{"ping"})[0].Err) }
			silent, other := await.Value(p.Get(t.Context())), await.Value(p.Get(t.Context()))
			time.AfterFunc(2, func() {
				p.Put(other, true) // as a wire that was idle for long
				if name == "answer" {
					ping()
				} else if name == "reset" {
					silent.Close()
				}
			})
			if name == "early" {
				within--
			}
			time.Sleep(time.Nanosecond)
			ctx, cancel := context.WithTimeout(t.Context(), within)
			defer cancel()
			if name == "wire" {
				w := NewWire(silent, 0, false, func(ok bool) { p.Put(silent, ok) })
				go func() { w.Read(); w.End() }()
				<-asked(w, ctx)
				time.Sleep(3 * tick)
			} else {
				silent.used = time.Now() // as Get does
				p.Put(silent, silent.Do(ctx, make([]Reply, 1), []string{"ping"}))
			}
			if ping(); dials != want {
				t.Errorf("%s: %d dials, want %d", name, dials, want)
			}
		})
	}
}
