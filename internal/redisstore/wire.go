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
	rdb     *redis.Client
	connect func(ctx context.Context, network, addr string) (net.Conn, error)
	check   func(ctx context.Context, conn *redis.Conn) error // of a new connection; may be nil
	asksRun bool
	// the run ID of the server, if asksRun; only the flight that uses the wire reads and writes it
	run string

	mu    sync.Mutex // guards the fields below
	conn  *wireConn  // nil if there is none
	uses  int        // how often begin was called
	until time.Time  // the deadline of a dial in the current use, or zero
	used  time.Time  // when the last use began or, if it got its replies, when it got them
	// the current use has written commands to a connection that was ready for them
	sent    bool
	over    bool               // the method interrupt has ended the current use
	began   time.Time          // when the last dial began
	took    time.Duration      // from the begin of the last dial to the end of the set-up
	endDial context.CancelFunc // ends the dial in progress; nil if there is none
}

// begin prepares the wire for a call, and returns the number of the use. A dial ends at the time
// until, unless that is zero.
func (w *wire) begin(now, until time.Time) (use int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.uses++
	w.until = until
	w.used = now
	w.sent = false
	w.over = false
	return w.uses
}

// interrupt ends the use with the given number, if it has not ended yet.
func (w *wire) interrupt(use int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.uses != use { // a later use has begun
		return
	}
	w.over = true
	if w.endDial != nil {
		w.endDial()
	}
	if w.conn != nil { // end the read or write in progress
		w.conn.until = longAgo
		_ = w.conn.rawConn.SetDeadline(longAgo)
	}
}

// answered notes that the replies of the current use have arrived.
func (w *wire) answered() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.used = time.Now()
}

// longAgo is a deadline that has passed.
var longAgo = time.Unix(1, 0)

// state reports whether the current use was interrupted, and whether it has sent any command.
func (w *wire) state() (over, sent bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.over, w.sent
}

// isGood reports whether the wire has a connection that is ready for commands, and was used since
// the given time.
func (w *wire) isGood(since time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.conn != nil && w.conn.ready && !w.used.Before(since)
}

// setUp returns how long it took to make the connection, or 100 ms if it took longer. An attempt to
// renew a lease may be as short as that, and must find out that a connection is dead.
func (w *wire) setUp() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return min(w.took, 100*time.Millisecond)
}

// renew closes the connection if the wire was last used before the given time.
func (w *wire) renew(before time.Time) {
	w.mu.Lock()
	c := w.conn
	old := w.used.Before(before)
	w.mu.Unlock()
	if c != nil && old {
		c.Close()
	}
}

// newWire returns a wire whose client has the options o, but only one connection. The wire's dial
// and complete call o.Dialer and o.OnConnect.
func newWire(o redis.Options, asksRun bool) *wire {
	w := &wire{connect: o.Dialer, check: o.OnConnect, asksRun: asksRun}
	o.PoolSize = 1
	o.Dialer = w.dial
	o.OnConnect = w.complete
	w.rdb = redis.NewClient(&o)
	return w
}

// dial makes the connection. It ends when the current use is interrupted, or at its deadline.
func (w *wire) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	ctx, endDial := context.WithCancel(ctx)
	defer endDial()
	w.mu.Lock()
	w.endDial = endDial
	w.began = time.Now()
	if w.over { // the use was interrupted before this dial
		endDial()
	}
	if !w.until.IsZero() {
		var release context.CancelFunc
		ctx, release = context.WithDeadline(ctx, w.until)
		defer release()
	}
	w.mu.Unlock()

	conn, err := w.connect(ctx, network, addr)

	w.mu.Lock()
	defer w.mu.Unlock()
	w.endDial = nil
	base, ok := conn.(rawConn)
	if !ok {
		// The dial has failed. Then failLater returns a connection that is no rawConn.
		return conn, err
	}
	w.conn = &wireConn{rawConn: base, w: w}
	return w.conn, nil
}

// complete ends the set-up of a new connection: it checks the server, and asks for its run ID if
// asksRun. If it returns no error, the connection is ready for commands.
func (w *wire) complete(ctx context.Context, conn *redis.Conn) error {
	if w.check != nil {
		if err := w.check(ctx, conn); err != nil {
			return err
		}
	}

	if w.asksRun {
		if err := w.askRun(ctx, conn); err != nil {
			return err
		}
	}

	w.mu.Lock()
	defer w.mu.Unlock()
	if w.conn == nil {
		return nil // the connection was closed meanwhile, and the first command will fail
	}
	if w.conn.full { // Read has found that the server refuses the connection
		return errFull
	}
	w.conn.ready = true
	w.took = time.Since(w.began)
	return nil
}

// askRun asks the server for its run ID, and stores it in w.run.
func (w *wire) askRun(ctx context.Context, conn *redis.Conn) error {
	info, err := conn.Do(ctx, "info", "server").Text()
	if err != nil {
		return err
	}

	// Refuse a text that is no reply to INFO. A reply to INFO may lack run_id, but it always has
	// some field.
	if !strings.Contains(info, ":") {
		return resp.Unexpected(info)
	}
	w.run = InfoField(info, "run_id")
	return nil
}

// wireConn is the connection of a wire.
type wireConn struct {
	rawConn
	w *wire
	// the set-up has ended; w.mu guards it; only the flight that uses the wire sets it
	ready bool
	// the server takes no more connections; only the flight that uses the wire needs it
	full  bool
	until time.Time // the deadline; w.mu guards it
}

// Read notices if the server refuses the connection, and sets c.full. go-redis does not notice it,
// because it ignores the reply to HELLO if that is an error. It would send the commands, and hasp
// could not say that they were not executed.
func (c *wireConn) Read(b []byte) (int, error) {
	n, err := c.rawConn.Read(b)
	// An error reply begins with a minus sign.
	if !c.ready && strings.HasPrefix(string(b[:n]), "-"+errFull.Error()) {
		c.full = true
	}
	return n, err
}

// Write notes that the current use has sent something. What is written before the connection is
// ready belongs to the set-up, and does not count.
func (c *wireConn) Write(b []byte) (int, error) {
	c.w.mu.Lock()
	c.w.sent = c.w.sent || c.ready
	c.w.mu.Unlock()
	return c.rawConn.Write(b)
}

func (c *wireConn) Close() error {
	c.w.mu.Lock()
	if c.w.conn == c {
		c.w.conn = nil
	}
	c.w.mu.Unlock()
	return c.rawConn.Close()
}

// SetDeadline sets the deadline of reads and writes. If the current use of the wire was
// interrupted, the deadline is longAgo instead, so that the next read or write fails.
func (c *wireConn) SetDeadline(t time.Time) error {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if c.w.over {
		t = longAgo
	}
	if t.Equal(c.until) {
		return nil // go-redis sets the same deadline for a write and for the read that follows
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
