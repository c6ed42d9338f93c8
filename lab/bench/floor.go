package main

import (
	"bufio"
	"context"
	crypto "crypto/rand"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
)

// floor only sends the commands of a strategy, over the fastest connection that we know. All
// callers share this connection, and one write sends the commands of several callers. No caller can
// be cancelled. A command is not composed, but copied from a template around the key and the token.
// So a lock with the same commands can hardly be faster.
type floor struct {
	conn          net.Conn
	take, release template

	mu      sync.Mutex         // guards the fields out, waiting and writer
	out     []byte             // commands that are not written yet
	waiting chan chan<- string // the callers, in the order of their commands
	writer  bool               // a caller is about to write

	turn  sync.Mutex // locked by the caller that writes; guards the field spare
	spare []byte     // a buffer that the next commands reuse
}

// openFloor opens a floor that sends a driver's commands, and records them from the driver itself.
func openFloor[O any](newDriver func(redis.UniversalClient, *O) (backend.Driver, error)) opener {
	return func(ctx context.Context, s stores, term time.Duration) (locker, error) {
		rdb, err := connect(s.One)
		if err != nil {
			return nil, err
		}
		defer rdb.Close()
		var seen recorder
		rdb.AddHook(&seen)
		d, err := newDriver(rdb, nil)
		if err != nil {
			return nil, err
		}
		c := backend.Claim{Key: sampleKey, Token: sampleToken, Owner: "host/12345/bench", TTL: term,
			Timeout: term}
		for range 2 { // only the second pair sends its scripts by their hashes
			_, err = d.Acquire(ctx, c)
			if err = errors.Join(err, d.Release(ctx, c)); err != nil {
				return nil, err
			}
		}
		n := len(seen.commands)
		f := &floor{take: seen.commands[n-2], release: seen.commands[n-1],
			waiting: make(chan chan<- string, 4096)}
		if f.conn, err = net.Dial("tcp", rdb.Options().Addr); err == nil {
			go f.read()
		}
		return f, err
	}
}

// read passes the replies to the callers. It passes "1" for OK or a positive number, "" after the
// connection has ended, and otherwise the whole reply, which is one line.
func (f *floor) read() {
	in := bufio.NewReader(f.conn)
	for caller := range f.waiting {
		line, _ := in.ReadSlice('\n')
		switch {
		case len(line) < 2 || line[0] != '+' && (line[0] != ':' || line[1] < '1'):
			caller <- string(line)
		default:
			caller <- "1"
		}
	}
}

// do sends a command and waits for the reply.
func (f *floor) do(t template, l *floorLock) error {
	f.mu.Lock()
	f.out = t.appendTo(f.out, l.key, l.token)
	f.waiting <- l.reply
	first := !f.writer
	f.writer = true
	f.mu.Unlock()

	if first {
		// let the callers that have just received replies append their next commands
		runtime.Gosched()
		f.turn.Lock()
		f.mu.Lock()
		out := f.out
		f.out = f.spare[:0]
		f.writer = false
		f.mu.Unlock()
		_, _ = f.conn.Write(out) // if Write fails, the reader fails as well
		f.spare = out
		f.turn.Unlock()
	}

	if reply := <-l.reply; reply != "1" {
		return fmt.Errorf("%q: the reply is %q", t, reply)
	}
	return nil
}

type floorLock struct {
	*floor
	key, token string
	reply      chan string
}

func (f *floor) lock(_ context.Context, key string) (held, error) {
	l := &floorLock{f, key, crypto.Text(), make(chan string, 1)}
	return l, f.do(f.take, l)
}

func (l *floorLock) Unlock(context.Context) error { return l.do(l.release, l) }

func (f *floor) close() { f.conn.Close(); close(f.waiting) }

// template is a command, as it is written to a connection. It is a list of parts: a part is a text,
// or a place for the key or the token.
type template []string

// The recorded commands contain the sample key and token. A part that equals one of these two is a
// place for another key or token of the same length.
var (
	sampleKey   = keyOf("sampling", 0, 0)
	sampleToken = strings.Repeat("T", len(crypto.Text()))
)

func templateOf(args []any) template {
	text := fmt.Sprintf("*%d\r\n", len(args))
	for _, a := range args {
		arg := fmt.Sprint(a)
		text += fmt.Sprintf("$%d\r\n%s\r\n", len(arg), arg)
	}
	places := strings.NewReplacer(sampleKey, "\x00"+sampleKey+"\x00", sampleToken,
		"\x00"+sampleToken+"\x00")
	return strings.Split(places.Replace(text), "\x00")
}

// appendTo appends the command for a key and a token.
func (t template) appendTo(out []byte, key, token string) []byte {
	for _, part := range t {
		switch part {
		case sampleKey:
			part = key
		case sampleToken:
			part = token
		}
		out = append(out, part...)
	}

	return out
}

// recorder records the commands that a client sends.
type recorder struct{ commands []template }

func (r *recorder) DialHook(next redis.DialHook) redis.DialHook { return next }

func (r *recorder) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

// ProcessPipelineHook records the commands of hasp, which uses pipelines of a client that it was passed.
func (r *recorder) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, c := range cmds {
			r.commands = append(r.commands, templateOf(c.Args()))
		}
		return next(ctx, cmds)
	}
}
