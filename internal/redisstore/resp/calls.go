package resp

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"
)

// Calls ends each call of a client when the call's context ends. go-redis obeys
// a context while it waits for a connection. In a read or a write it obeys only
// the deadline.
//
// So Calls must know which connection each call uses. A connection gets no more
// from go-redis than a deadline, before each read and each write, also before
// those that set the connection up. With ContextTimeoutEnabled and without other
// timeouts, go-redis passes the context's deadline on unaltered. So the context
// of a call has a deadline in a time.Location of its own, and the connection
// identifies the call by the address of that Location. TLS, above the
// connection, passes deadlines on.
//
// None of this is documented. So each Store that is opened checks that the
// connection of its first call has identified the call. If a later version of
// go-redis or of TLS alters deadlines, calls still end by their deadlines, but
// no longer when they are cancelled. Store.Ends then says so.
type Calls struct {
	// mu guards the fields below, call.conn, call.over and Conn.user. A call is
	// also interrupted with mu held: the interrupt must not come after the
	// connection has gone back to the pool and on to the next call.
	mu    sync.Mutex
	under map[*time.Location]*call // the calls under way
}

// call is one call under way. It is the context that go-redis gets for it.
type call struct {
	context.Context
	end  time.Time     // the context's deadline; zero if it has none
	name time.Location // its address identifies the call

	conn *Conn // the connection that the call used last; nil if it had none
	over bool  // the context has ended
}

// never is the deadline of calls that have none: without one, a connection could
// not identify them.
var never = time.Unix(1<<33, 0)

// past is a deadline that ends a read or a write at once.
var past = time.Unix(1, 0)

// Deadline returns when the call ends, in the call's Location. It is the same
// instant as the context's deadline, but without the reading of the monotonic
// clock. The connection uses c.end, which has it.
func (c *call) Deadline() (time.Time, bool) {
	if c.end.IsZero() {
		return never.In(&c.name), true
	}
	return c.end.In(&c.name), true
}

// Begin returns the context for one call, which ends with ctx. The caller calls
// end when the call has returned.
func (cs *Calls) Begin(ctx context.Context) (within context.Context, end func()) {
	c := &call{Context: ctx}
	c.end, _ = ctx.Deadline()

	cs.mu.Lock()
	if cs.under == nil {
		cs.under = map[*time.Location]*call{}
	}
	cs.under[&c.name] = c
	cs.mu.Unlock()

	if ctx.Done() == nil {
		return c, func() { cs.forget(c) }
	}
	stop := context.AfterFunc(ctx, func() { cs.interrupt(c) })
	return c, func() {
		// If the interrupt has begun already, it finds that the call has no
		// connection any more.
		stop()
		cs.forget(c)
	}
}

// interrupt ends the call's read or write, now or as soon as the call has a
// connection. go-redis then discards the connection, unless it has read the reply
// already.
func (cs *Calls) interrupt(c *call) {
	cs.mu.Lock()
	defer cs.mu.Unlock()

	c.over = true
	if c.conn != nil && c.conn.user == c {
		_ = c.conn.Conn.SetDeadline(past) // fails on a closed connection only
	}
}

// forget separates a call that has returned from its connection. Another call may
// use the connection already.
func (cs *Calls) forget(c *call) {
	cs.mu.Lock()
	defer cs.mu.Unlock()

	delete(cs.under, &c.name)
	if c.conn != nil && c.conn.user == c {
		c.conn.user = nil
	}
}

// Conn returns the connection that a call used last, or nil if it used none. within
// is the call's context, from Begin.
func (cs *Calls) Conn(within context.Context) *Conn {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return within.(*call).conn
}

// UnderWay returns how many calls have not ended, for tests.
func (cs *Calls) UnderWay() int {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return len(cs.under)
}

// Conn is a connection that knows which call uses it.
type Conn struct {
	net.Conn
	calls  *Calls
	secure net.Conn // the TLS above it, with a guard; nil without TLS
	user   *call    // the call that uses it; nil if none does; calls.mu
}

// Wrap returns c as a connection whose reads and writes end with the calls that
// use it.
func (cs *Calls) Wrap(c net.Conn) *Conn { return &Conn{Conn: c, calls: cs} }

// Secured sets the TLS above the connection, and returns it with a guard.
func (c *Conn) Secured(tls net.Conn) net.Conn {
	c.secure = Guard(tls)
	return c.secure
}

// SetReadDeadline identifies the call that the deadline is of.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.set(t, c.Conn.SetReadDeadline) }

// SetWriteDeadline identifies the call that the deadline is of.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.set(t, c.Conn.SetWriteDeadline) }

// set sets a deadline by setDeadline. A deadline that is of no call gives no more
// time to a call that is over. TLS sets such a deadline for its last message.
func (c *Conn) set(t time.Time, setDeadline func(time.Time) error) error {
	c.calls.mu.Lock()
	defer c.calls.mu.Unlock()

	if user, ok := c.calls.under[t.Location()]; ok {
		c.user, user.conn = user, c
		t = user.end
	}
	if c.user != nil && c.user.over {
		t = past
	}
	return setDeadline(t)
}

// SetDeadline is called where go-redis takes a connection from its pool. If the
// last call on it has not returned yet, that call must not interrupt the
// connection any more.
func (c *Conn) SetDeadline(t time.Time) error {
	c.calls.mu.Lock()
	defer c.calls.mu.Unlock()

	c.user = nil
	return c.Conn.SetDeadline(t)
}

// SyscallConn lets go-redis' pool check whether the server has closed the
// connection.
func (c *Conn) SyscallConn() (syscall.RawConn, error) {
	below := c.Conn
	if g, ok := below.(*guard); ok {
		below = g.Conn
	}
	if raw, ok := below.(syscall.Conn); ok {
		return raw.SyscallConn()
	}
	return nil, errors.ErrUnsupported
}
