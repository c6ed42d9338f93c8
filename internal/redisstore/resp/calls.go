package resp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/lazyctx"
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
//
// The engine's contexts have deadlines without timers (package lazyctx). Calls has one
// timer for all of them.
//
// A nil *Calls ends no call. It is for a client of the caller, whose connections
// are not ours.
type Calls struct {
	// mu guards the fields below, those of a call from conn on, and Conn.user. A call
	// is also interrupted with mu held: the interrupt must not come after the
	// connection has gone back to the pool and on to the next call.
	mu    sync.Mutex
	under map[*time.Location]*call // the calls under way
	named bool                     // a connection has identified a call
	timer *time.Timer              // calls endLate
	wakes time.Time                // when the timer fires; zero if it does not
	quits map[context.Context]bool // the quit contexts of calls so far; each is watched once
}

// call is one call under way. It is the context that go-redis gets for it.
type call struct {
	context.Context
	end  time.Time     // the context's deadline; zero if it has none
	name time.Location // its address identifies the call
	stop func() bool   // stops the watch of the parent that Split returns; nil if that never ends

	// For a context of package lazyctx; see lazyctx.Split.
	quit context.Context
	late time.Time     // the deadline that Split returns
	done chan struct{} // closed when the call is interrupted, not when it returns

	conn *Conn // the connection that the call used last; nil if it had none
	over error // why the call was interrupted; nil if it was not
}

// never is the deadline of calls that have none: without one, a connection could
// not identify them.
var never = time.Unix(1<<33, 0)

// past is a deadline that ends a read or a write at once.
var past = time.Unix(1, 0)

// Deadline returns when the call ends, in the call's Location. It is the same
// instant as the context's deadline, or never, but without the reading of the
// monotonic clock. The connection uses c.end, which has that reading.
func (c *call) Deadline() (time.Time, bool) {
	if c.end.IsZero() {
		return never.In(&c.name), true
	}
	return c.end.In(&c.name), true
}

// Done returns a channel that is closed when the call is interrupted.
func (c *call) Done() <-chan struct{} {
	if c.done == nil {
		return c.Context.Done()
	}
	return c.done
}

// Err returns why the call was interrupted, or nil if it was not.
func (c *call) Err() error {
	if c.done == nil {
		return c.Context.Err()
	}
	select {
	case <-c.done:
		// over is set before done is closed, and never changes after that. So no lock.
		return c.over
	default:
		return nil
	}
}

// Begin returns the context for one call, which ends with ctx. The caller calls
// end when the call has returned.
func (cs *Calls) Begin(ctx context.Context) (within context.Context, end func()) {
	if cs == nil {
		return ctx, func() {}
	}
	c := cs.begin(ctx)
	return c, func() { cs.end(c) }
}

// Do makes one call: it sends a command and returns its reply.
func (cs *Calls) Do(ctx context.Context, rdb processor, args []any) (any, error) {
	if cs == nil {
		return Do(ctx, rdb, args)
	}
	c := cs.begin(ctx)
	defer cs.end(c)
	return Do(c, rdb, args)
}

// begin returns a call that ends with ctx.
func (cs *Calls) begin(ctx context.Context) *call {
	c := &call{Context: ctx}
	c.end, _ = ctx.Deadline()
	parent, quit, late, lazy := lazyctx.Split(ctx)

	cs.mu.Lock()
	if lazy {
		c.quit, c.late, c.done = quit, late, make(chan struct{})
		cs.watchLocked(c)
	}
	if cs.under == nil {
		cs.under = map[*time.Location]*call{}
	}
	cs.under[&c.name] = c
	cs.mu.Unlock()

	if parent.Done() != nil {
		c.stop = context.AfterFunc(parent, func() { cs.interrupt(c, parent.Err()) })
	}
	return c
}

// end is called when a call has returned.
func (cs *Calls) end(c *call) {
	if c.stop != nil {
		c.stop()
	}
	// An interrupt may be waiting for mu. It then finds that the connection is not this
	// call's any more. It must not interrupt the call that uses the connection next.
	cs.mu.Lock()
	defer cs.mu.Unlock()
	delete(cs.under, &c.name)
	if c.conn != nil && c.conn.user == c {
		c.conn.user = nil
	}
}

// watchLocked makes sure that c is interrupted at its deadline, and when its quit ends.
// Most calls end long before their deadlines. So the timer is set for the earliest
// deadline only, and fires about once in the time that a call may last.
func (cs *Calls) watchLocked(c *call) {
	if !c.late.IsZero() && (cs.wakes.IsZero() || c.late.Before(cs.wakes)) {
		cs.wakes = c.late
		if cs.timer == nil {
			cs.timer = time.AfterFunc(time.Until(c.late), cs.endLate)
		} else {
			cs.timer.Reset(time.Until(c.late))
		}
	}

	// All calls of a hasp.Client have the same quit, which ends with it. A call may begin
	// a moment after that end, when the watch is over.
	if c.quit.Done() == nil || cs.quits[c.quit] {
		if c.quit.Err() != nil {
			c.interruptLocked(context.Canceled)
		}
		return
	}
	if cs.quits == nil {
		cs.quits = map[context.Context]bool{}
	}
	cs.quits[c.quit] = true
	// If quit has ended already, this finds c nevertheless: begin adds c before it
	// unlocks mu.
	context.AfterFunc(c.quit, func() {
		cs.mu.Lock()
		defer cs.mu.Unlock()
		// There may be calls of other hasp.Clients.
		for _, other := range cs.under {
			if other.quit == c.quit {
				other.interruptLocked(context.Canceled)
			}
		}
	})
}

// endLate interrupts the calls whose deadline has passed. It checks all calls: thousands,
// if a server hangs. So it sets the next check for 5 ms later at the earliest. Connections
// obey the deadlines by themselves, so only calls that wait for a connection end late.
func (cs *Calls) endLate() {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	now := time.Now()
	cs.wakes = time.Time{}
	for _, c := range cs.under {
		switch {
		case c.late.IsZero(): // this call ends with another context, which has a timer
		case !now.Before(c.late):
			c.interruptLocked(context.DeadlineExceeded)
		case cs.wakes.IsZero() || c.late.Before(cs.wakes):
			cs.wakes = c.late
		}
	}
	if !cs.wakes.IsZero() {
		cs.timer.Reset(max(cs.wakes.Sub(now), 5*time.Millisecond))
	}
}

// interrupt ends a call because of err.
func (cs *Calls) interrupt(c *call, err error) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	c.interruptLocked(err)
}

// interruptLocked ends the call's read or write, now or as soon as the call has a
// connection. go-redis then discards the connection, unless it has read the reply
// already.
func (c *call) interruptLocked(err error) {
	if c.over != nil {
		return
	}
	c.over = err
	if c.done != nil {
		close(c.done)
	}

	// If another call uses the connection already, it is left alone. If the call has no
	// connection yet, set will find that it is over.
	if c.conn != nil && c.conn.user == c {
		_ = c.conn.Conn.SetDeadline(past) // fails on a closed connection only
	}
}

// Conn returns the connection that a call used last, or nil if it used none. within
// is the call's context, from Begin.
func (cs *Calls) Conn(within context.Context) *Conn {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return within.(*call).conn
}

// Named reports whether connections can identify their calls: one of them has done so.
func (cs *Calls) Named() bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.named
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
	raw    syscall.RawConn // of Conn; nil if it has none
	secure net.Conn        // the TLS above it, with a guard; nil without TLS
	user   *call           // the call that uses it; nil if none does; calls.mu guards it
}

// Wrap returns c as a connection whose reads and writes end with the calls that
// use it.
func (cs *Calls) Wrap(c net.Conn) *Conn {
	w := &Conn{Conn: c, calls: cs}
	if g, ok := c.(*guard); ok {
		c = g.Conn
	}
	if s, ok := c.(syscall.Conn); ok {
		w.raw, _ = s.SyscallConn() // fails on a closed connection only
	}
	return w
}

// Secured sets the TLS above the connection, and returns it with a guard.
func (c *Conn) Secured(tls net.Conn) net.Conn {
	c.secure = Guard(tls)
	return c.secure
}

// SetReadDeadline sets the deadline of reads. The deadline also identifies the call that
// uses the connection now: see set.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.set(t, c.Conn.SetReadDeadline) }

// SetWriteDeadline is SetReadDeadline for writes.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.set(t, c.Conn.SetWriteDeadline) }

// set sets a deadline by setDeadline. If the call that uses the connection is over, the
// deadline is in the past. This holds for any deadline, such as the one that TLS sets for
// its last message.
func (c *Conn) set(t time.Time, setDeadline func(time.Time) error) error {
	c.calls.mu.Lock()
	defer c.calls.mu.Unlock()

	if user, ok := c.calls.under[t.Location()]; ok {
		// The address of the Location identifies the call.
		c.user, user.conn = user, c
		c.calls.named = true
		t = user.end
	}
	if c.user != nil && c.user.over != nil {
		// The call was interrupted before it set this deadline.
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
	if c.raw == nil {
		return nil, errors.ErrUnsupported
	}
	return c.raw, nil
}

// Command is a command that go-redis sends once, whatever the settings of the
// client: it does not retry after a timeout, in a pipeline or on a cluster.
type Command struct{ *redis.Cmd }

// NoRetry reports to go-redis that it must not repeat the command.
func (*Command) NoRetry() bool { return true }

// Clone returns a copy that keeps NoRetry.
func (c *Command) Clone() redis.Cmder { return &Command{c.Cmd.Clone().(*redis.Cmd)} }

// processor is a client of go-redis, or one of its connections.
type processor interface {
	Process(context.Context, redis.Cmder) error
}

// Do sends one command and returns its reply.
func Do(ctx context.Context, rdb processor, args []any) (any, error) {
	cmd := &Command{redis.NewCmd(ctx, args...)}
	err := Survive(func() error { return rdb.Process(ctx, cmd) })
	// If go-redis has panicked, cmd does not have the error.
	if err != nil && cmd.Err() == nil {
		return nil, err
	}
	return cmd.Result()
}

// IsReply reports whether err is a server's reply.
func IsReply(err error) bool { return errors.As(err, new(redis.Error)) }

// Unexpected returns the error for a reply that no version of Redis gives. It has
// the beginning of the reply, without the secrets.
func Unexpected(reply any, secrets ...string) error {
	// Before the text is cut, so that no part of a secret is left.
	text := Hide(fmt.Sprintf("%v", reply), secrets...)
	if len(text) > 100 {
		text = text[:100] + "…"
	}
	return fmt.Errorf("unexpected reply %s", strings.ToValidUTF8(text, "\uFFFD"))
}

// cutSecret is the length of the shortest part of a secret that Hide finds.
const cutSecret = 8

// Hide returns text without the secrets. A server may repeat only the beginning of a long
// command: Redis cuts the arguments of an unknown command after 128 bytes. So Hide also
// removes the beginnings of secrets.
func Hide(text string, secrets ...string) string {
	for _, secret := range secrets {
		if secret == "" {
			continue
		}
		begin := secret[:min(len(secret), cutSecret)]
		var out strings.Builder
		for {
			before, after, found := strings.Cut(text, begin)
			out.WriteString(before)
			if !found {
				break
			}
			// Of the rest, remove as much as the text has.
			rest := secret[len(begin):]
			n := 0
			for n < min(len(rest), len(after)) && rest[n] == after[n] {
				n++
			}
			out.WriteString("***")
			text = after[n:]
		}
		text = out.String()
	}
	return text
}

// Survive returns the error of f, and an error if f panics with a runtime.Error.
// f calls a client that the caller of hasp may have passed. Such a client has no
// guard, so a reply can make go-redis panic. Many calls run on goroutines of
// hasp's own, where the panic would end the program.
func Survive(f func() error) (err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case runtime.Error:
			err = fmt.Errorf("the client of Redis panicked: %w", r)
		default:
			panic(r)
		}
	}()
	return f()
}
