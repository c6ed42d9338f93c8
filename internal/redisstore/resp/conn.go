package resp

import (
	"context"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/lazyctx"
)

// Pool has the connections to one server.
type Pool struct {
	Addr string // for errors
	dial func(context.Context) (*Conn, error)
	room chan struct{} // has an element for each connection that is in use or being made

	open context.Context // ends with the Pool
	end  context.CancelFunc

	mu   sync.Mutex     // guards the fields below
	idle []*Conn        // the one that was used last is at the end
	all  map[*Conn]bool // those in use and idle, and those of Connect
}

// NewPool returns a Pool of up to size connections. dial makes one. The Pool ends with ctx. The
// caller must run CloseAtEnd on a goroutine.
func NewPool(ctx context.Context, addr string, size int, dial func(context.Context) (*Conn, error)) *Pool {
	p := &Pool{Addr: addr, dial: dial, room: make(chan struct{}, size), all: map[*Conn]bool{}}
	p.open, p.end = context.WithCancel(ctx)
	return p
}

// Close ends the Pool.
func (p *Pool) Close() { p.end() }

// CloseAtEnd waits until the Pool has ended. Then it closes all connections, also those that
// are in use.
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

// maxIdle is how long a connection may be idle. Later, a firewall may have forgotten it.
const maxIdle = 30 * time.Minute

// Get returns a connection for one caller, which returns it by Put.
func (p *Pool) Get(ctx context.Context) (*Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
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
		p.mu.Unlock()

		// Use it only if the server has not closed it, and has sent nothing. Check that before each
		// call, because a command that fails is not sent again.
		_ = c.base.SetReadDeadline(time.Time{}) // a deadline that has passed would end the check
		if time.Since(c.used) < maxIdle && (c.isQuiet == nil || c.isQuiet()) {
			return c, nil
		}
		p.Drop(c)
	}
}

// staleTime is how long a dial goes on after its caller has left. It is short, because the dial
// uses room that other callers need, and may never get a reply.
const staleTime = time.Second

// getNew makes a connection. If the caller leaves, the next caller receives it. Otherwise callers
// with short deadlines would never get a connection to a distant server.
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

// Put takes back a connection that Get returned. good is false if it must not be used again.
func (p *Pool) Put(c *Conn, good bool) {
	if good {
		c.used = time.Now()
		p.mu.Lock()
		p.idle = append(p.idle, c)
		p.mu.Unlock()
	} else {
		p.Drop(c)
	}
	<-p.room // only now, so that the next caller finds c
}

// Connect makes a connection that does not count against the Pool's size. Drop closes it.
func (p *Pool) Connect(ctx context.Context) (*Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.open, cancel)()
	c, err := p.dial(ctx)

	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open.Err() != nil { // CloseAtEnd may not find c
		if err == nil {
			c.Close()
		}
		return nil, redis.ErrClosed
	}
	if err == nil {
		c.addr = p.Addr
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
	Run       string      // the run of the server, if the dialer has asked for it
	isQuiet   func() bool // reports whether base is open and has no bytes to read; nil if that is not known
	interrupt func()      // ends a read or a write at once
	in        *reader
	out       []byte
	used      time.Time // when it became idle
}

// bufferSize is the size of the buffer for replies, and the largest buffer for commands that a Conn
// keeps. It is small, because a pool keeps the connections of its largest burst.
const bufferSize = 4 << 10

// NewConn returns a Conn that reads and writes c. base is the connection below the TLS of
// c, or c itself.
func NewConn(c, base net.Conn) *Conn {
	conn := &Conn{Conn: c, base: base, in: newReader(c, bufferSize)}
	conn.interrupt = func() { _ = base.SetDeadline(past) }
	if s, ok := base.(syscall.Conn); ok {
		if raw, err := s.SyscallConn(); err == nil { // fails on a closed connection only
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
	Run   string // Conn.Run of the connection, which leads to one run of one server
}

// past is a deadline that ends a read or a write at once.
var past = time.Unix(1, 0)

// Do sends commands in one write, and stores their replies. If ctx ends first, the error is
// os.ErrDeadlineExceeded, and the outcome is unknown. good is false if the connection must not be
// used again.
func (c *Conn) Do(ctx context.Context, replies []Reply, commands ...[]string) (good bool) {
	// The connection enforces the deadline. Set it before an interrupt can set another one.
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
		r := Reply{Err: err} // of the commands whose replies do not arrive
		if err == nil {
			r, err = c.in.reply()
			r.Run = c.Run
		}
		astray = astray || r.Err != nil && c.leadsAstray(r.Err)
		replies[i] = r
	}

	// Bytes that are left would become the reply to the next command.
	good = err == nil && !astray && c.in.Buffered() == 0
	// If an interrupt has begun, do not use the connection again: the interrupt could end its next
	// call.
	for _, stop := range stops {
		good = (stop == nil || stop()) && good
	}
	return good
}

// leadsAstray reports whether the error of a reply means that another server has taken over the
// address, to which only a new connection leads.
func (c *Conn) leadsAstray(err error) bool {
	to, moved := redis.IsMovedError(err)
	return moved && to == c.addr || IsReadOnly(err)
}
