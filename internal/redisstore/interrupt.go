package redisstore

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
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
type calls struct {
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

	conn *conn // the last one it used; calls.mu
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

// begin returns the context for a call, which ends with ctx, and what is to be
// done when the call has returned.
func (cs *calls) begin(ctx context.Context) (*call, func()) {
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
func (cs *calls) interrupt(c *call) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	c.over = true
	if c.conn != nil && c.conn.user == c {
		_ = c.conn.Conn.SetDeadline(past) // fails on a closed connection only
	}
}

// forget parts a call that has returned from its connection, which may be in
// use by another already.
func (cs *calls) forget(c *call) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	delete(cs.under, &c.name)
	if c.conn != nil && c.conn.user == c {
		c.conn.user = nil
	}
}

// conn is a connection that knows which call uses it.
type conn struct {
	net.Conn
	calls  *calls
	secure net.Conn // the TLS above it, if there is any
	user   *call    // calls.mu
}

// wrap returns a connection whose reads and writes end with the calls that
// they are for.
func (cs *calls) wrap(c net.Conn) *conn { return &conn{Conn: c, calls: cs} }

// used returns the connection that a call which has returned used last: nil if
// it had none.
func (cs *calls) used(c *call) *conn {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return c.conn
}

func (c *conn) SetReadDeadline(t time.Time) error  { return c.set(t, c.Conn.SetReadDeadline) }
func (c *conn) SetWriteDeadline(t time.Time) error { return c.set(t, c.Conn.SetWriteDeadline) }

// set sets one of the deadlines. One that is no call's, such as that which
// TLS gives its farewell, gains no time for a call that is over.
func (c *conn) set(t time.Time, set func(time.Time) error) error {
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
func (c *conn) SetDeadline(t time.Time) error {
	c.calls.mu.Lock()
	defer c.calls.mu.Unlock()
	c.user = nil
	return c.Conn.SetDeadline(t)
}

// SyscallConn lets the pool see whether the server has closed a connection.
func (c *conn) SyscallConn() (syscall.RawConn, error) {
	below := c.Conn
	if g, ok := below.(*guard); ok {
		below = g.Conn
	}
	if raw, ok := below.(syscall.Conn); ok {
		return raw.SyscallConn()
	}
	return nil, errors.ErrUnsupported
}

// begin is calls.begin where the connections are ours.
func (s *Store) begin(ctx context.Context) (context.Context, func()) {
	if s.calls == nil {
		return ctx, func() {}
	}
	return s.calls.begin(ctx)
}

// cancelled reports whether err is how a call ended that was interrupted since
// its caller went away.
func cancelled(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() == context.Canceled && errors.Is(err, os.ErrDeadlineExceeded)
}

// Ends says when a call returns at the latest if the server does not answer.
// That a hook of a client that was handed in heeds its context is taken for
// granted; what go-redis calls without a context is not.
func (s *Store) Ends() backend.Ends {
	switch {
	case s.calls != nil && s.unnamed.Load():
		return backend.EndsByDeadline
	case s.calls != nil:
		return backend.EndsPromptly
	}
	rdb, ok := s.rdb.(*redis.Client)
	if !ok {
		return backend.EndsSometime
	}
	o := rdb.Options()
	switch {
	case !o.ContextTimeoutEnabled,
		o.ReadTimeout < 0, o.WriteTimeout < 0, // -2 in the user's options: no deadline is ever set
		o.Limiter != nil, o.CredentialsProvider != nil, o.StreamingCredentialsProvider != nil:
		return backend.EndsSometime
	}
	return backend.EndsByDeadline
}
