package resp

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"
)

// calls knows which connection each call under way uses, and breaks off what
// it waits for there when its context ends. go-redis heeds a context while it
// waits for a connection, but in a read or a write only the deadline.
//
// Of a call, a connection learns no more from go-redis than that deadline,
// which is set before each read and each write, those that set the connection
// up included; with ContextTimeoutEnabled and without other time-outs it is
// the one that the context gave, unaltered. So the context of a call gives its
// deadline in a time.Location of its own, by whose address the connection
// knows the call. TLS, above the connection, passes deadlines on.
//
// None of that is documented, so each Store that is opened checks that the
// connection of its first call has learnt the call. If a later version of
// go-redis or TLS alters deadlines, calls still end by them, but no longer when
// they are cancelled. Ends then says so.
type Calls struct {
	// mu guards under, and who uses which connection. An interrupt happens
	// under it too: it must not come after the connection, back in the pool,
	// has passed to the next call.
	mu    sync.Mutex
	under map[*time.Location]*call
}

// call is one call under way, and the context that go-redis is given for it.
type call struct {
	context.Context
	end  time.Time     // of the context; zero if there is none
	name time.Location // its address is the call's name

	conn *Conn // the last one it used; calls.mu
	over bool  // its context has ended; calls.mu
}

// never is a deadline for calls without, which need one to be known by.
var never = time.Unix(1<<33, 0)

// past ends a read or write at once.
var past = time.Unix(1, 0)

// Deadline is when the call ends, with its name. Both the connection and
// whoever wants to know the time take it for the same instant, except that
// the monotonic clock is lost: the connection goes by c.end, which has it.
func (c *call) Deadline() (time.Time, bool) {
	if c.end.IsZero() {
		return never.In(&c.name), true
	}
	return c.end.In(&c.name), true
}

// Begin returns the context for a call, which ends with ctx, and what is to be
// done when the call has returned.
func (cs *Calls) Begin(ctx context.Context) (context.Context, func()) {
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
		stop() // or it is under way and finds the call forgotten
		cs.forget(c)
	}
}

// interrupt ends what c waits for, now or as soon as it has a connection.
// go-redis discards the connection, unless the reply had been read already.
func (cs *Calls) interrupt(c *call) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	c.over = true
	if c.conn != nil && c.conn.user == c {
		_ = c.conn.Conn.SetDeadline(past) // fails on a closed connection only
	}
}

// forget parts a call that has returned from its connection, which may be in
// use by another already.
func (cs *Calls) forget(c *call) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	delete(cs.under, &c.name)
	if c.conn != nil && c.conn.user == c {
		c.conn.user = nil
	}
}

// conn is a connection that knows which call uses it.
type Conn struct {
	net.Conn
	calls  *Calls
	secure net.Conn // the TLS above it, if there is any
	user   *call    // calls.mu
}

// Wrap returns a connection whose reads and writes end with the calls that
// they are for.
func (cs *Calls) Wrap(c net.Conn) *Conn { return &Conn{Conn: c, calls: cs} }

// Conn returns the connection that the call of a context of Begin used last: nil
// if it had none.
func (cs *Calls) Conn(ctx context.Context) *Conn {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return ctx.(*call).conn
}

// UnderWay returns how many calls have not ended, for tests.
func (cs *Calls) UnderWay() int {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return len(cs.under)
}

// Secured has the connection know the TLS above it, and returns that, guarded.
func (c *Conn) Secured(tls net.Conn) net.Conn {
	c.secure = Guard(tls)
	return c.secure
}

func (c *Conn) SetReadDeadline(t time.Time) error  { return c.set(t, c.Conn.SetReadDeadline) }
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.set(t, c.Conn.SetWriteDeadline) }

// set sets one of the deadlines. One that is no call's, such as that which
// TLS gives its farewell, gains no time for a call that is over.
func (c *Conn) set(t time.Time, set func(time.Time) error) error {
	c.calls.mu.Lock()
	defer c.calls.mu.Unlock()
	if user, ok := c.calls.under[t.Location()]; ok {
		c.user, user.conn = user, c
		t = user.end
	}
	if c.user != nil && c.user.over {
		t = past
	}
	return set(t)
}

// SetDeadline is called where a connection is taken from the pool. If its last
// call has not returned yet, that one has nothing to do with it any more.
func (c *Conn) SetDeadline(t time.Time) error {
	c.calls.mu.Lock()
	defer c.calls.mu.Unlock()
	c.user = nil
	return c.Conn.SetDeadline(t)
}

// SyscallConn lets the pool see whether the server has closed a connection.
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
