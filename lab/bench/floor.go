package main

import (
	"bufio"
	"context"
	crypto "crypto/rand"
	"fmt"
	"net"
	"net/url"
	"runtime"
	"strconv"
	"sync"
	"time"
)

// floor sends the commands of bare over the fastest connection that we know. All callers share it,
// and their commands travel together. It does nothing else: no caller can be cancelled, and no
// error ends a wait. So a lock with the same commands can hardly be faster.
type floor struct {
	conn net.Conn
	term string // in milliseconds

	mu      sync.Mutex             // guards the fields up to writer
	out     []byte                 // commands that are not written yet
	waiting chan chan<- floorReply // the callers, in the order of their commands
	writer  bool                   // a caller is about to write

	turn  sync.Mutex // held by the caller that writes; guards spare
	spare []byte     // room for out
}

// floorReply is the begin of a reply, such as +O of +OK; zero if the connection is broken.
type floorReply [2]byte

func openFloor(_ context.Context, s stores, term time.Duration) (locker, error) {
	at, err := url.Parse(s.One)
	if err != nil {
		return nil, err
	}
	conn, err := net.Dial("tcp", at.Host)
	if err != nil {
		return nil, err
	}
	// No more callers than there is room for can wait.
	f := &floor{conn: conn, term: strconv.FormatInt(term.Milliseconds(), 10), waiting: make(chan chan<- floorReply, 4096)}
	go func() {
		in := bufio.NewReader(conn)
		for caller := range f.waiting {
			var a floorReply
			line, _ := in.ReadSlice('\n') // each reply is a line
			copy(a[:], line)
			caller <- a
		}
	}()
	loaded := f.do(make(chan floorReply, 1), floorReply{':', '0'}, "EVAL", deleteIfEqual, "1", "bench:none", "")
	return f, loaded
}

// do sends a command, waits for the reply, and returns an error if it does not begin with want.
func (f *floor) do(reply chan floorReply, want floorReply, args ...string) error {
	f.mu.Lock()
	f.out = fmt.Appendf(f.out, "*%d\r\n", len(args))
	for _, a := range args {
		f.out = strconv.AppendInt(append(f.out, '$'), int64(len(a)), 10)
		f.out = append(append(append(f.out, "\r\n"...), a...), "\r\n"...)
	}
	f.waiting <- reply
	first := !f.writer
	f.writer = true
	f.mu.Unlock()

	if first {
		runtime.Gosched() // until the callers that have just got replies have sent their next commands
		f.turn.Lock()
		f.mu.Lock()
		out := f.out
		f.out, f.writer = f.spare[:0], false
		f.mu.Unlock()
		_, _ = f.conn.Write(out) // if it fails, so does the reader
		f.spare = out
		f.turn.Unlock()
	}
	if got := <-reply; got != want {
		return fmt.Errorf("%s: the reply begins with %q", args[0], got[:])
	}
	return nil
}

type floorLock struct {
	*floor
	key, token string
	reply      chan floorReply
}

func (f *floor) lock(_ context.Context, key string) (held, error) {
	l := &floorLock{f, key, crypto.Text(), make(chan floorReply, 1)}
	return l, f.do(l.reply, floorReply{'+', 'O'}, "SET", key, l.token, "NX", "PX", f.term)
}

func (l *floorLock) Unlock(context.Context) error {
	return l.do(l.reply, floorReply{':', '1'}, "EVALSHA", compareAndDelete.Hash(), "1", l.key, l.token)
}

func (f *floor) close() {
	f.conn.Close()
	close(f.waiting)
}
