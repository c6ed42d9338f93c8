package pglock

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// Driver is the type of the drivers.
type Driver = driver

var statementsSent sync.Map // by host:port, *atomic.Int64

// Statements is how many statements the drivers of this process have sent to an address.
func Statements(addr string) *atomic.Int64 {
	n, _ := statementsSent.LoadOrStore(addr, new(atomic.Int64))
	return n.(*atomic.Int64)
}

// MaxBlocked is how long an attempt waits for a row.
const MaxBlocked = maxBlocked

type counter struct{}

func (counter) TraceQueryStart(ctx context.Context, c *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	Statements(c.PgConn().Conn().RemoteAddr().String()).Add(1)
	return ctx
}

func (counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func init() { tracer = counter{} }

// Sweep deletes the rows of keys that were not used for age.
func (d *driver) Sweep(ctx context.Context, age time.Duration) error { return d.sweepAll(ctx, age) }

// SweepOften makes each grant start an attempt to sweep. The function wait waits for the attempts.
func (d *driver) SweepOften() (wait func()) {
	d.sweepOneIn = 1
	return d.wg.Wait
}

// Polls reports whether the driver has noticed a connection pooler.
func (d *driver) Polls() bool { return d.bouncer.Load() }

// Listens reports whether the driver has a connection for messages.
func (d *driver) Listens() bool {
	d.listener.mu.Lock()
	defer d.listener.mu.Unlock()
	return d.listener.running
}

// Waiters returns how many waiters the driver remembers.
func (d *driver) Waiters() int {
	d.listener.mu.Lock()
	defer d.listener.mu.Unlock()
	return len(d.listener.waiters)
}

// Channel is the channel of the driver's messages.
func (d *driver) Channel() string { return d.listener.channel() }

// Fill makes all connections of the pool.
func (d *driver) Fill(ctx context.Context) error {
	for range d.statements.Config().MaxConns {
		c, err := d.statements.acquire(ctx)
		if err != nil {
			return err
		}
		defer release(c)
	}
	return nil
}

// TakePlaces takes all places of attempts but some, until vacate is called.
func (d *driver) TakePlaces(but int) (vacate func()) {
	n := cap(d.takes) - but
	for range n {
		d.takes <- struct{}{}
	}
	return func() {
		for range n {
			<-d.takes
		}
	}
}

// LockTimeout returns the lock_timeout of a statement that may wait for most, in ms.
func (d *driver) LockTimeout(ctx context.Context, most time.Duration) (string, error) {
	var ms string
	scan := func(_ int, rows pgx.Rows) error { return rows.Scan(&ms) }
	_, err := d.queryOnce(ctx, d.statements, "SELECT $1::text", scan, []any{lockWait(most)})
	return ms, err
}

// Vouches reports whether a connection that was idle for some time needs no check, if the session
// and the last message of the listener have these ages.
func Vouches(session, message, idle time.Duration) bool {
	l := &listener{listensSince: time.Now().Add(-session), lastMessage: time.Now().Add(-message)}
	if session == 0 {
		l.listensSince = time.Time{}
	}
	return l.vouches(idle)
}
