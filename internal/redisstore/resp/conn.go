package resp

import (
	"context"
	"errors"
	"net"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/lazyctx"
)

// Conn is a connection to a server, which one caller uses at a time.
type Conn struct {
	net.Conn              // is read and written
	base      net.Conn    // the connection below the TLS, or Conn itself
	addr      string      // of the server
	Run       string      // of the server, if the dialer has asked for it
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
	Run   string // Conn.Run of the connection; a connection leads to one run of one server
}

// past is a deadline that ends a read or a write at once.
var past = time.Unix(1, 0)

// Do sends commands in one write, and stores their replies. If ctx ends first, the error is
// os.ErrDeadlineExceeded, and the outcome is unknown. good is false if the connection must not be
// used again.
func (c *Conn) Do(ctx context.Context, replies []Reply, commands ...[]string) (good bool) {
	deadline, _ := ctx.Deadline()
	_ = c.base.SetDeadline(deadline) // fails on a closed connection only

	// The connection enforces the deadline, which was set before an interrupt can set another one.
	parent, quit, _, _ := lazyctx.Split(ctx)
	var stops [2]func() bool
	for i, ctx := range [...]context.Context{parent, quit} {
		if ctx.Done() != nil { // otherwise AfterFunc would only cost memory
			stops[i] = context.AfterFunc(ctx, c.interrupt)
		}
	}

	n, err := c.exchange(commands, replies)
	good = err == nil
	for i := range replies[n:] {
		replies[n+i].Err = err
	}

	// If an interrupt has begun, do not use the connection again: the interrupt could end its next
	// call.
	for _, stop := range stops {
		good = (stop == nil || stop()) && good
	}
	return good
}

// exchange sends commands and reads their replies. It returns how many replies arrived.
func (c *Conn) exchange(commands [][]string, replies []Reply) (n int, err error) {
	if err := c.write(commands...); err != nil {
		return 0, err
	}
	var astray error
	for n := range replies {
		v, err := c.in.reply()
		if err != nil {
			return n, err
		}
		replies[n] = c.replyOf(v)
		if c.leadsAstray(replies[n].Err) {
			astray = errAstray
		}
	}
	if c.in.Buffered() > 0 {
		return len(replies), errUnasked
	}
	return len(replies), astray
}

var (
	errUnasked = errors.New("a reply without a command")
	errAstray  = errors.New("the connection leads to the wrong server")
)

// leadsAstray reports whether the error of a reply means that another server has taken over the
// address, to which only a new connection leads.
func (c *Conn) leadsAstray(err error) bool {
	if err == nil {
		return false
	}
	to, moved := redis.IsMovedError(err)
	return moved && to == c.addr || IsReadOnly(err)
}

// replyOf returns the Reply for a decoded reply.
func (c *Conn) replyOf(v any) Reply {
	if refused, ok := v.(ReplyError); ok {
		return Reply{Err: refused, Run: c.Run}
	}
	return Reply{Value: v, Run: c.Run}
}

func (c *Conn) write(commands ...[]string) error {
	out := c.out[:0]
	for _, args := range commands {
		out = appendCommand(out, args)
	}
	if cap(out) <= bufferSize {
		c.out = out
	}
	_, err := c.Write(out)
	return err
}

// Send sends one command. Receive returns its reply. One goroutine may call Send while another
// calls Receive.
func (c *Conn) Send(timeout time.Duration, args ...string) error {
	_ = c.base.SetWriteDeadline(time.Now().Add(timeout))
	return c.write(args)
}

// Receive returns the next reply or message, without a timeout.
func (c *Conn) Receive() Reply {
	v, err := c.in.reply()
	if err != nil {
		return Reply{Err: err}
	}
	return c.replyOf(v)
}

// maxIdle is how long a connection may be idle. Later, a firewall may have forgotten it.
const maxIdle = 30 * time.Minute

// isUsable reports whether an idle connection can be used: the server has not closed it, and has
// sent nothing. Check that before each call, because a command that fails is not sent again.
func (c *Conn) isUsable() bool {
	_ = c.base.SetReadDeadline(time.Time{}) // a deadline that has passed would end the check
	return time.Since(c.used) < maxIdle && (c.isQuiet == nil || c.isQuiet())
}
