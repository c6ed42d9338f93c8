// Package resp makes hasp's own connections to Redis. Only one caller at a time uses a Conn, and a
// Pool holds the Conns to one server. Many callers share a Wire. A call ends when its context ends.
// The package also has hasp's additions to a go-redis client that the caller passed.
package resp

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/lazyctx"
)

// Pool holds the connections to one server.
type Pool struct {
	Addr string // for errors
	dial func(context.Context) (*Conn, error)
	room chan struct{} // contains an element for each connection that is in use or being made

	open context.Context // ends with the Pool
	end  context.CancelFunc

	mu       sync.Mutex     // guards the fields below
	idle     []*Conn        // the connection that was used last is at the end
	all      map[*Conn]bool // the connections in use and idle, and those that Connect made
	doubtful time.Time      // an idle connection that was last used before this time may be dead
}

// NewPool returns a Pool. The parameter size limits its connections, and the function dial makes
// one connection. The Pool ends when ctx ends. The caller must run CloseAtEnd on a goroutine.
func NewPool(ctx context.Context, addr string, size int, dial func(context.Context) (*Conn, error)) *Pool {
	p := &Pool{Addr: addr, dial: dial, room: make(chan struct{}, size), all: map[*Conn]bool{}}
	p.open, p.end = context.WithCancel(ctx)
	return p
}

// Close ends the Pool.
func (p *Pool) Close() { p.end() }

// CloseAtEnd waits until the Pool has ended. Then it closes all connections, even those that are in
// use.
func (p *Pool) CloseAtEnd() {
	<-p.open.Done()
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.all {
		c.Close()
	}
}

// Do sends commands over a connection of the Pool, and stores their replies, as [Conn.Do] does. If
// an error is redis.ErrClosed, the Pool was closed and nothing was sent.
func (p *Pool) Do(ctx context.Context, replies []Reply, commands ...[]string) {
	c, err := p.Get(ctx)
	if err != nil {
		for i := range replies {
			replies[i].Err = err
		}
		return
	}
	p.Put(c, c.Do(ctx, replies, commands...))
}

// maxIdle is how long a connection may be idle. After this time, a firewall may have forgotten it.
const maxIdle = 30 * time.Minute

// Get returns a connection for one caller, which must give it back by Put.
func (p *Pool) Get(ctx context.Context) (*Conn, error) {
	// Do not read the clock to check the deadline, because the connection enforces it.
	if parent, quit, _ := lazyctx.Split(ctx); parent.Err() != nil || quit.Err() != nil {
		return nil, ctx.Err()
	}
	if p.open.Err() != nil {
		return nil, redis.ErrClosed
	}
	select {
	case p.room <- struct{}{}:
	default: // only now ask for ctx.Done, which can cost a timer
		select {
		case p.room <- struct{}{}:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-p.open.Done():
			return nil, redis.ErrClosed
		}
	}

	for {
		p.mu.Lock()
		n := len(p.idle) - 1
		if n < 0 {
			p.mu.Unlock()
			return p.getNew(ctx)
		}
		c := p.idle[n]
		p.idle[n], p.idle = nil, p.idle[:n]
		last, doubtful := c.used, p.doubtful
		p.mu.Unlock()

		// Use the connection only if the server has neither closed it nor sent anything. Check this
		// before each call, because a command that fails is not sent again.
		_ = c.base.SetReadDeadline(time.Time{}) // a deadline that has passed would end the check
		c.used = time.Now()
		if !last.Before(doubtful) && c.used.Sub(last) < maxIdle && (c.isQuiet == nil || c.isQuiet()) {
			return c, nil
		}
		p.Drop(c)
	}
}

// staleTime is how long a dial goes on after its caller has left. It is short, because the dial
// takes the place of a connection for other callers, and may never succeed.
const staleTime = time.Second

// getNew makes a connection. If the caller leaves, the connection stays in the Pool for the next
// caller. Otherwise callers with short deadlines would never get a connection to a distant server.
func (p *Pool) getNew(ctx context.Context) (*Conn, error) {
	type result struct {
		*Conn
		error
	}
	made := make(chan result)
	within, cancel := context.WithCancel(p.open)
	go func() {
		defer cancel()
		c, err := p.Connect(within)
		if err != nil {
			<-p.room
		}
		select {
		case made <- result{c, err}:
		case <-ctx.Done():
			if err == nil {
				p.Put(c, true)
			}
		}
	}()
	select {
	case r := <-made:
		return r.Conn, r.error
	case <-ctx.Done():
		time.AfterFunc(staleTime, cancel)
		return nil, ctx.Err()
	}
}

// Put takes back a connection that Get returned. If good is false, c must not be used again.
func (p *Pool) Put(c *Conn, good bool) {
	p.mu.Lock()
	switch {
	case good:
		p.idle = append(p.idle, c)
	case time.Since(c.used) >= c.trip && c.used.After(p.doubtful):
		// A firewall may have forgotten all connections without a word. Each idle one would then
		// cost a whole call, and a lease its term. So Get drops those that were not used since this
		// call began. But a caller that left early shows nothing. It was not early if a connection
		// could have been made meanwhile: then the doubt costs no more than the call. A server that
		// stalls gets no more dials than calls, because each call makes at most one.
		p.doubtful = c.used
	}
	p.mu.Unlock()
	if !good {
		p.Drop(c)
	}
	<-p.room // after the append, so that the next caller finds c
}

// Connect makes a connection that does not count against the Pool's size. Drop closes it.
func (p *Pool) Connect(ctx context.Context) (*Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.open, cancel)()
	began := time.Now()
	c, err := p.dial(ctx)

	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open.Err() != nil { // CloseAtEnd may have run before it could find c
		if err == nil {
			c.Close()
		}
		return nil, redis.ErrClosed
	}
	if err == nil {
		c.addr, c.used = p.Addr, time.Now()
		c.trip = min(c.used.Sub(began), 100*time.Millisecond) // a try to renew a lease may be that short
		p.all[c] = true
		_ = c.base.SetDeadline(time.Time{}) // the deadline of the login would end a subscription
	}
	return c, err
}

// Drop closes a connection, and removes it from the Pool.
func (p *Pool) Drop(c *Conn) {
	c.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.all, c)
}

// Count returns how many connections there are, and how many are idle, for tests.
func (p *Pool) Count() (all, idle int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.all), len(p.idle)
}

// Conn is a connection to a server, which one caller uses at a time.
type Conn struct {
	net.Conn              // is read and written
	base      net.Conn    // the connection below the TLS, or Conn itself
	addr      string      // of the server
	Run       string      // the run ID of the server, if the dialer has asked for it
	isQuiet   func() bool // reports whether base is open and has no bytes to read; nil if that is not known
	interrupt func()      // ends a read or a write at once
	in        *reader
	out       []byte
	used      time.Time     // when its last call ended with a reply, or a later call or wire began
	trip      time.Duration // how long it took to make it, within limits; 0 once it has failed
}

// bufferSize is the size of the buffer for replies, and the largest buffer for commands that a Conn
// keeps. It is small, because a pool keeps the connections of its largest burst.
const bufferSize = 4 << 10

// NewConn returns a Conn that reads and writes c. The argument base is the connection below the TLS
// of c, or c itself.
func NewConn(c, base net.Conn) *Conn {
	conn := &Conn{Conn: c, base: base, in: newReader(c, bufferSize)}
	conn.interrupt = func() { _ = base.SetDeadline(past) }
	if s, ok := base.(syscall.Conn); ok {
		if raw, err := s.SyscallConn(); err == nil { // fails only on a closed connection
			conn.isQuiet = quietOf(raw)
		}
	}
	return conn
}

// Close closes the connection without closing the TLS session, which would send a last message and
// could block.
func (c *Conn) Close() error { return c.base.Close() }

// Reply is the reply to one command, or its error.
type Reply struct {
	Value any
	Err   error
	Run   string // Conn.Run of the connection on which the reply arrived
}

// past is a deadline that ends a read or a write at once.
var past = time.Unix(1, 0)

// Do sends commands in one write, and stores their replies. The outcome of a command without a
// reply is unknown. If ctx ends before a reply, the error of that command is
// os.ErrDeadlineExceeded. The result good is false if the connection must not be used again.
func (c *Conn) Do(ctx context.Context, replies []Reply, commands ...[]string) (good bool) {
	// The connection enforces the deadline. Set it before an interrupt sets another one.
	parent, quit, deadline := lazyctx.Split(ctx)
	_ = c.base.SetDeadline(deadline) // fails on a closed connection only
	var stops [2]func() bool
	for i, ctx := range [...]context.Context{parent, quit} {
		if ctx.Done() != nil { // otherwise AfterFunc would only cost memory
			stops[i] = context.AfterFunc(ctx, c.interrupt)
		}
	}

	out := c.out[:0]
	for i, args := range commands {
		if i == 1 {
			out = slices.Grow(out, len(out)*len(commands)) // the others are about as long as the first
		}
		out = appendCommand(out, args)
	}
	if cap(out) <= bufferSize {
		c.out = out
	}
	_, err := c.Write(out)
	astray := false
	for i := range replies {
		r := Reply{Err: err} // the result if the reply does not arrive
		if err == nil {
			r, err = c.in.reply()
			r.Run = c.Run
		}
		astray = astray || r.Err != nil && c.leadsAstray(r.Err)
		replies[i] = r
	}

	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		c.trip = 0 // the caller has not left; a firewall may answer by a reset
	}
	// Bytes that are left in the buffer would become the reply to the next command.
	good = err == nil && !astray && c.in.Buffered() == 0
	// If an interrupt has begun, do not use the connection again, because the interrupt could end
	// the next call.
	for _, stop := range stops {
		good = (stop == nil || stop()) && good
	}
	if good {
		c.used = time.Now()
	}
	return good
}

// leadsAstray reports whether the error of a reply means that the address now leads to another
// server, which only a new connection reaches.
func (c *Conn) leadsAstray(err error) bool {
	to, moved := redis.IsMovedError(err)
	return moved && to == c.addr || IsReadOnly(err)
}

// The rest of this file implements the part of the protocol that hasp needs. It encodes commands
// and decodes replies (https://redis.io/docs/latest/develop/reference/protocol-spec/).

// appendCommand appends a command to out.
func appendCommand(out []byte, args []string) []byte {
	out = strconv.AppendInt(append(out, '*'), int64(len(args)), 10)
	for _, arg := range args {
		out = strconv.AppendInt(append(out, "\r\n$"...), int64(len(arg)), 10)
		out = append(append(out, "\r\n"...), arg...)
	}
	return append(out, "\r\n"...)
}

// ReplyError is an error that a server replied, or that hasp found in its replies.
type ReplyError string

func (e ReplyError) Error() string { return string(e) }

// RedisError marks the error as a reply, as go-redis marks the replies that it receives.
func (ReplyError) RedisError() {}

// These limits apply to a reply. The longest reply, a list of a key's waiters, is far below them. A
// line must also fit into the reader's buffer. The longest line is an error of a few hundred bytes.
const (
	maxReply = 64 << 20 // bytes in a reply
	maxItems = 1 << 18  // values in a reply
	maxDepth = 32       // levels of arrays in arrays
)

var (
	errProtocol = errors.New("the server does not speak the protocol of Redis")
	errTooMuch  = fmt.Errorf("the reply is longer than any that hasp asks for: more than %d bytes, %d values or %d levels, or a long line",
		maxReply, maxItems, maxDepth)
)

// reader decodes replies. Because a server may announce any length, it allocates memory only for
// what arrives, and limits each reply.
type reader struct {
	*bufio.Reader
	bytes, items int // what is left of the limits for the current reply
}

func newReader(r io.Reader, size int) *reader { return &reader{Reader: bufio.NewReaderSize(r, size)} }

// reply reads one reply: nil, an int64, a string, a []any or the error that the server replied.
// Connections begin with RESP2, which has no other replies. If no reply arrives, both the error and
// the Reply say why.
func (r *reader) reply() (Reply, error) {
	r.bytes, r.items = maxReply, maxItems
	v, err := r.value(maxDepth)
	if refused, ok := v.(ReplyError); ok {
		return Reply{Err: refused}, nil
	}
	return Reply{Value: v, Err: err}, err
}

// value reads a value. The argument depth is how many levels of arrays the value may have.
func (r *reader) value(depth int) (any, error) {
	line, err := r.ReadSlice('\n') // a part of the buffer
	switch {
	case err == bufio.ErrBufferFull:
		return nil, errTooMuch
	case err != nil:
		return nil, err
	}
	line, ok := bytes.CutSuffix(line, []byte("\r\n"))
	if !ok || len(line) == 0 {
		return nil, errProtocol
	}
	r.bytes, r.items = r.bytes-len(line), r.items-1
	if r.bytes < 0 || r.items < 0 {
		return nil, errTooMuch
	}

	kind, text := line[0], line[1:]
	switch kind {
	case '+':
		if string(text) == "OK" {
			return "OK", nil // without an allocation
		}
		return string(text), nil
	case '-':
		return ReplyError(text), nil
	case ':', '$', '*':
	default:
		return nil, errProtocol
	}

	// The line contains a number, which is the value itself or a length. The length -1 means nil.
	n, err := strconv.ParseInt(string(text), 10, 64)
	switch {
	case err != nil || n < -1 && kind != ':':
		return nil, errProtocol
	case kind == ':':
		return n, nil
	case n == -1:
		return nil, nil
	case kind == '$' && n <= int64(r.bytes):
		return r.bulk(int(n))
	case kind == '*' && n <= int64(r.items) && depth > 0:
		return r.array(int(n), depth-1)
	}
	return nil, errTooMuch
}

// bulk reads a string of n bytes.
func (r *reader) bulk(n int) (any, error) {
	r.bytes -= n
	// Most strings fit into the buffer, and are copied only once. The CR LF needs two more bytes.
	buf, err := r.Peek(n + 2)
	if err == nil {
		// Discard only after the return has copied buf, which is a part of the buffer.
		defer r.Discard(n + 2)
	} else if err == bufio.ErrBufferFull {
		var all bytes.Buffer // grows with the bytes that arrive, not with the length announced
		_, err = io.CopyN(&all, r, int64(n+2))
		buf = all.Bytes()
	}
	switch {
	case err != nil:
		return nil, err
	case string(buf[n:]) != "\r\n":
		return nil, errProtocol
	}
	return string(buf[:n]), nil
}

// array reads n values.
func (r *reader) array(n, depth int) (any, error) {
	// Do not allocate memory for all n values yet, because fewer may arrive.
	all := make([]any, 0, min(n, 64))
	for range n {
		v, err := r.value(depth)
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}
