package resp

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/lazyctx"
)

// deadlines is a connection that keeps the deadlines that were set last.
type deadlines struct {
	net.Conn
	read, write time.Time
}

func (d *deadlines) SetReadDeadline(t time.Time) error  { d.read = t; return nil }
func (d *deadlines) SetWriteDeadline(t time.Time) error { d.write = t; return nil }
func (d *deadlines) SetDeadline(t time.Time) error      { d.read, d.write = t, t; return nil }

// A call, its end and the next call on the connection come in every possible order.
func TestInterruptFindsItsConnection(t *testing.T) {
	ended, cancel := context.WithTimeout(t.Context(), time.Hour)
	cancel()
	until, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	end, _ := until.Deadline()
	use := func(c net.Conn, ctx context.Context) {
		t, _ := ctx.Deadline()
		c.SetWriteDeadline(t)
		c.SetReadDeadline(t)
	}
	for name, f := range map[string]func(cs *Calls, c net.Conn, a, b *call, over func()) time.Time{
		"while it is used": func(cs *Calls, c net.Conn, a, b *call, over func()) time.Time {
			use(c, a)
			cs.interrupt(a, context.Canceled)
			return past
		},
		"before it has a connection": func(cs *Calls, c net.Conn, a, b *call, over func()) time.Time {
			cs.interrupt(a, context.Canceled)
			use(c, a)
			return past
		},
		"between write and read": func(cs *Calls, c net.Conn, a, b *call, over func()) time.Time {
			d, _ := a.Deadline()
			c.SetWriteDeadline(d)
			cs.interrupt(a, context.Canceled)
			c.SetReadDeadline(d)
			return past
		},
		"before the last message of TLS": func(cs *Calls, c net.Conn, a, b *call, over func()) time.Time {
			use(c, a)
			cs.interrupt(a, context.Canceled)
			c.SetWriteDeadline(time.Now().Add(5 * time.Second))
			return past
		},
		"in the pool, which checks the connection": func(cs *Calls, c net.Conn, a, b *call, over func()) time.Time {
			use(c, a)
			cs.interrupt(a, context.Canceled)
			c.SetDeadline(time.Time{})
			use(c, b)
			return end
		},
		"when the next is about to take it": func(cs *Calls, c net.Conn, a, b *call, over func()) time.Time {
			use(c, a)
			c.SetDeadline(time.Time{})
			cs.interrupt(a, context.Canceled)
			return time.Time{}
		},
		"when the next has taken it": func(cs *Calls, c net.Conn, a, b *call, over func()) time.Time {
			use(c, a)
			c.SetDeadline(time.Time{})
			cs.interrupt(a, context.Canceled)
			use(c, b)
			return end
		},
		"when the next uses it": func(cs *Calls, c net.Conn, a, b *call, over func()) time.Time {
			use(c, a)
			use(c, b)
			cs.interrupt(a, context.Canceled)
			return end
		},
		"when it has returned": func(cs *Calls, c net.Conn, a, b *call, over func()) time.Time {
			use(c, a)
			over()
			cs.interrupt(a, context.Canceled)
			c.SetReadDeadline(end)
			c.SetWriteDeadline(end)
			return end
		},
	} {
		var cs Calls
		d := &deadlines{}
		a, over := cs.Begin(until)
		b, overB := cs.Begin(until)
		want := f(&cs, cs.Wrap(d), a.(*call), b.(*call), over)
		if !d.read.Equal(want) || !d.write.Equal(want) {
			t.Errorf("%s: reads until %v, writes until %v, want %v", name, d.read, d.write, want)
		}
		over()
		overB()
		if len(cs.under) > 0 {
			t.Errorf("%s: %d calls are still under way", name, len(cs.under))
		}
	}

	var cs Calls
	d := &deadlines{}
	a, over := cs.Begin(context.Background())
	use(cs.Wrap(d), a)
	over()
	if !d.read.IsZero() || !d.write.IsZero() {
		t.Errorf("without a deadline: reads until %v, writes until %v", d.read, d.write)
	}
	a, over = cs.Begin(ended)
	defer over()
	stopped := func() bool {
		cs.mu.Lock()
		defer cs.mu.Unlock()
		return d.read.Equal(past)
	}
	for deadline := time.Now().Add(soon); !stopped(); use(cs.Wrap(d), a) {
		if time.Now().After(deadline) {
			t.Fatal("a context that has ended interrupts nothing")
		}
	}
}

// A call that begins after the end of a quit that is watched no longer is over at once.
// A later call ends at its own deadline, even if earlier calls had later ones.
func TestCallsAfterTheEndOfAQuit(t *testing.T) {
	t.Parallel()
	var cs Calls
	closing, quit := context.WithCancel(t.Context())
	defer quit()
	for _, d := range []time.Duration{time.Hour, time.Hour, time.Millisecond} {
		if d < time.Hour {
			closing = t.Context()
		}
		within := lazyctx.WithTimeout(t.Context(), closing, d)
		defer within.End()
		ctx, end := cs.Begin(within)
		quit() // ends the first call; the second begins after it
		select {
		case <-ctx.Done():
		case <-time.After(10 * time.Second):
			t.Error("the call goes on")
		}
		end()
	}
}

func TestAPanicOfTheClientIsAnError(t *testing.T) {
	if reply, err := Do(t.Context(), nil, []any{"get", "k"}); err == nil {
		t.Errorf("got %v and no error", reply)
	}
}
