package redisstore

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// wire is a client with a single connection, which one flight at a time uses. Therefore hasp knows
// which connection a call uses, and can end the call, and knows whether a call that failed had sent
// its commands.
type wire struct {
	rdb *redis.Client
	run string // of the server, if the Store asks for it; only the flight that uses the wire reads and writes it

	mu    sync.Mutex // guards the fields below
	conn  *wireConn  // nil if there is none
	uses  int        // how often begin was called
	until time.Time  // the deadline of a dial in the current use, or zero
	used  time.Time  // when the last use began, or got its replies
	sent  bool       // the current use has written commands to a connection that was ready for them
	over  bool       // the current use was interrupted
	dial  context.CancelFunc
	began time.Time     // when the last dial began
	took  time.Duration // from the begin of the last dial to the end of the set-up
}

// begin prepares the wire for a call, and returns the number of the use. A dial ends at the time
// until, unless that is zero.
func (l *wire) begin(now, until time.Time) (use int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.uses++
	l.until, l.used, l.sent, l.over = until, now, false, false
	return l.uses
}

// interrupt ends the use with the given number, if it has not ended yet.
func (l *wire) interrupt(use int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.uses != use {
		return
	}
	l.over = true
	if l.dial != nil {
		l.dial()
	}
	if l.conn != nil {
		l.conn.until = longAgo
		_ = l.conn.rawConn.SetDeadline(longAgo)
	}
}

// answered notes that the replies of the current use have arrived.
func (l *wire) answered() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.used = time.Now()
}

// longAgo is a deadline that has passed.
var longAgo = time.Unix(1, 0)

// state reports whether the current use was interrupted, and whether it has sent its commands.
func (l *wire) state() (over, sent bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.over, l.sent
}

// isGood reports whether the wire has a connection that is ready for commands, and was used since the
// given time.
func (l *wire) isGood(since time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.conn != nil && l.conn.ready && !l.used.Before(since)
}

// setUp returns how long it took to make the connection, or 100 ms if it took longer.
func (l *wire) setUp() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return min(l.took, 100*time.Millisecond) // a try to renew a lease may be that short
}

// renew closes the connection if the wire was last used before the given time.
func (l *wire) renew(before time.Time) {
	l.mu.Lock()
	c := l.conn
	old := l.used.Before(before)
	l.mu.Unlock()
	if c != nil && old {
		c.Close()
	}
}

// newWire returns a wire whose connections o makes.
func newWire(o redis.Options, asksRun bool) *wire {
	l := &wire{}
	dial, check := o.Dialer, o.OnConnect
	o.PoolSize = 1
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		l.mu.Lock()
		l.dial, l.began = cancel, time.Now()
		if l.over {
			cancel()
		}
		if !l.until.IsZero() {
			ctx, cancel = context.WithDeadline(ctx, l.until)
			defer cancel()
		}
		l.mu.Unlock()
		conn, err := dial(ctx, network, addr)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.dial = nil
		base, ok := conn.(rawConn)
		if !ok {
			return conn, err
		}
		l.conn = &wireConn{rawConn: base, l: l}
		return l.conn, nil
	}
	o.OnConnect = func(ctx context.Context, conn *redis.Conn) error {
		if check != nil {
			if err := check(ctx, conn); err != nil {
				return err
			}
		}
		if asksRun {
			if err := l.askRun(ctx, conn); err != nil {
				return err
			}
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.conn != nil {
			if l.conn.full {
				return errFull
			}
			l.conn.ready, l.took = true, time.Since(l.began)
		}
		return nil
	}
	l.rdb = redis.NewClient(&o)
	return l
}

// askRun asks the server for its run ID.
func (l *wire) askRun(ctx context.Context, conn *redis.Conn) error {
	info, err := conn.Do(ctx, "info", "server").Text()
	if err != nil && !resp.IsReply(err) {
		return err
	}
	// Refuse a text that is no reply to INFO. A reply to INFO may lack run_id, but it always has some
	// field.
	if err == nil && !strings.Contains(info, ":") {
		return resp.Unexpected(info)
	}
	l.run = InfoField(info, "run_id")
	return err
}

// wireConn is the connection of a wire.
type wireConn struct {
	rawConn
	l     *wire
	ready bool      // the set-up has ended; l.mu guards it; only the flight that uses the wire sets it
	full  bool      // the server takes no more connections; only the flight that uses the wire needs it
	until time.Time // the deadline; l.mu guards it
}

// Read notices that the server refuses the connection. go-redis does not, because it ignores the reply to
// HELLO if that is an error. It would send the commands, and hasp could not say that they were not
// executed.
func (c *wireConn) Read(b []byte) (int, error) {
	n, err := c.rawConn.Read(b)
	if !c.ready && strings.HasPrefix(string(b[:n]), "-"+errFull.Error()) {
		c.full = true
	}
	return n, err
}

func (c *wireConn) Write(b []byte) (int, error) {
	c.l.mu.Lock()
	c.l.sent = c.l.sent || c.ready
	c.l.mu.Unlock()
	return c.rawConn.Write(b)
}

func (c *wireConn) Close() error {
	c.l.mu.Lock()
	if c.l.conn == c {
		c.l.conn = nil
	}
	c.l.mu.Unlock()
	return c.rawConn.Close()
}

// SetDeadline sets the deadline of reads and writes, unless the current use of the wire was
// interrupted. go-redis sets the same deadline for a write and for the read that follows.
func (c *wireConn) SetDeadline(t time.Time) error {
	c.l.mu.Lock()
	defer c.l.mu.Unlock()
	if c.l.over {
		t = longAgo
	}
	if t.Equal(c.until) {
		return nil
	}
	c.until = t
	return c.rawConn.SetDeadline(t)
}

func (c *wireConn) SetReadDeadline(t time.Time) error  { return c.SetDeadline(t) }
func (c *wireConn) SetWriteDeadline(t time.Time) error { return c.SetDeadline(t) }

// errFull begins like the reply of a server that takes no more connections.
var errFull = resp.ReplyError("ERR max number of clients")

// errReplaced is the error of a connection to a server that is no longer the master.
var errReplaced = errors.New("another server is the master now")
