// Package pglock keeps locks in a table of a PostgreSQL database.
//
// # Guarantees
//
// A key has one holder at a time, as long as the server keeps what it has confirmed, and the
// server's clock does not step by more than backend.Drift allows. Locks and renewals are on the
// server's disk before they are confirmed, so holds survive a restart or a crash. A failover to a
// replica that lags may lose the newest locks, and two primaries may both grant a key as long as both
// run: see docs/pglock.md. Fences grow even over a failover, if the clocks of both servers agree.
// Waiters get the key roughly in order.
//
// A fence can be checked in the transaction of the write that it guards:
//
//	SELECT FROM hasp_locks WHERE key = $1 AND fence = $2 AND expires > clock_timestamp()
//	FOR KEY SHARE
//
// If this query returns a row, no later holder gets the key before the transaction has ended, so
// the write is safe however long it takes. See the example. The holder's renewals still succeed.
//
// # Cost
//
// It takes one statement to lock a free key, one to find that a key is held, one to renew up to 256
// leases of a Client, and one to unlock. Callers that wait are in a line, in the row of the key. A
// release wakes the first one by NOTIFY. Waiters also try once a second, and when the holder's term
// ends. While callers wait, their Client uses one more connection, and renewals use up to two. Each
// call for a shared lease rewrites the row of the key, which lists all shared leases of that key. So
// a key should have tens of shared leases, not thousands. A transaction that stays open for long, as
// in pg_dump, slows down busy keys of its database: see docs/pglock.md.
//
// # URL
//
//	pglock+postgres://user:password@host:port/database
//	pglock+postgres://user:password@host1:port,host2:port/database
//
// The scheme may also be postgresql. hasp's own parameters are:
//
//	schema     the table's schema (default: where the search path finds the table, else its first)
//	table      the name of the table (default hasp_locks)
//	pool_size  how many connections statements may use, from 1 to 1000 (default 10)
//
// These parameters of libpq work as PostgreSQL documents them:
//
//	host, port, dbname, user, password, passfile, service, servicefile, connect_timeout,
//	application_name, target_session_attrs, sslmode, sslrootcert, sslcert, sslkey, sslpassword,
//	sslsni, sslnegotiation, channel_binding
//
// If there are several hosts, the default of target_session_attrs is read-write, so that the
// primary is found after a failover.
//
// If a Client notices a PgBouncer, the Client prepares no statements, and its waiters poll, because
// LISTEN does not work through a PgBouncer.
//
// # Table
//
// Each key has a row. The first Client creates the table. If that Client's user may not create
// tables, the error has the statements that another user must run. If a key is not used for an
// hour, its row is deleted. Keys may have up to 2,000 bytes.
//
// The server must be PostgreSQL 13 or later.
package pglock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// defaultTable is the name of the table, unless Options.Table is set.
const defaultTable = "hasp_locks"

// maxKey is the length in bytes of the longest key. PostgreSQL cannot index much longer values. For
// a longer key, the error is backend.ErrInvalid.
const maxKey = 2000

// Options are the settings of [New]. Nil and the zero value mean the defaults.
type Options struct {
	// Client has the options of the Client that New returns. NewDriver ignores it.
	Client hasp.Options

	// Schema and Table name the table of the locks. All clients that share locks must use the same
	// names. The names are case-sensitive. The default of Schema is the schema in the search path
	// that has the table, or else the first schema of the search path.
	Schema, Table string
}

// check returns ErrInvalid if a name is impossible, and sets the default of Table.
func (o *Options) check() error {
	for what, name := range map[string]string{"schema": o.Schema, "table": o.Table} {
		if len(name) > 63 || strings.Contains(name, "\x00") {
			return fmt.Errorf("%w: %s %q: PostgreSQL takes names of up to 63 bytes",
				backend.ErrInvalid, what, name)
		}
	}
	o.Table = cmp.Or(o.Table, defaultTable)
	return nil
}

// driver is a [backend.Driver] that stores its locks in a table of a PostgreSQL database.
type driver struct {
	*database
	listener *listener

	closing context.Context // ends when Close begins
	stop    context.CancelFunc
	wg      sync.WaitGroup // counts the driver's goroutines
}

var (
	_ backend.Waker     = (*driver)(nil)
	_ backend.Inspector = (*driver)(nil)
	_ backend.Lister    = (*driver)(nil)
)

// New returns a Client whose locks are in the database of pool. It calls the database to find the
// table, and creates the table if there is none. If the database cannot be used, the error says
// what to do, and contains no password. If pool is nil or a value in o is out of range, the error
// is hasp.ErrInvalid. Close does not close the pool, which remains the caller's. Renewals use up to
// two connections outside the pool, and callers that wait use one, all with the pool's settings.
func New(ctx context.Context, pool *pgxpool.Pool, o *Options) (*hasp.Client, error) {
	o = cmp.Or(o, &Options{})
	d, err := NewDriver(ctx, pool, o)
	if err != nil {
		return nil, err
	}
	return hasp.New(d, &o.Client)
}

// NewDriver returns only the driver that New would use. It is for the conformance suite, or for a
// wrapper that is passed to [hasp.New].
func NewDriver(ctx context.Context, pool *pgxpool.Pool, o *Options) (backend.Driver, error) {
	if pool == nil {
		return nil, fmt.Errorf("pglock: %w: pool is nil", hasp.ErrInvalid)
	}
	own := *cmp.Or(o, &Options{}) // the method check sets the defaults
	if err := own.check(); err != nil {
		return nil, err
	}
	return newDriver(ctx, &database{}, pool, own)
}

// newDriver returns a driver over pool. If it returns an error, it has closed what it has opened,
// and the pool if that is db's own.
func newDriver(
	ctx context.Context, db *database, pool *pgxpool.Pool, o Options,
) (backend.Driver, error) {
	if err := db.use(pool); err != nil {
		return nil, err
	}

	d := &driver{database: db}
	d.closing, d.stop = context.WithCancel(context.Background())
	d.listener = newListener(db, d.closing, &d.wg)
	if err := db.setUp(ctx, o); err != nil {
		d.Close()
		return nil, err
	}

	return d, nil
}

// Traits reports that the driver excludes all clients of the same table, grants fences, obeys
// KeepUntil and Shared, and ends each call soon after the call's context.
func (d *driver) Traits() backend.Traits {
	return backend.Traits{
		Fenced: true, MinHold: true, Shared: true,
		Reach: backend.Network, Cancellation: backend.CancelPrompt,
	}
}

// closeGrace is how long Close waits for the server, which may not answer.
const closeGrace = time.Second

// Close closes the connections that the driver has opened. A pool that was passed to New stays
// open. If the server does not answer, some connections are closed up to 15 s later.
func (d *driver) Close() error {
	d.stop()
	closed := make(chan struct{})
	go func() {
		d.close() // may block, because each connection tells the server that it ends
		close(closed)
	}()

	select {
	case <-closed:
	case <-time.After(closeGrace):
	}

	d.wg.Wait()
	return nil
}

// Listen registers a caller to be woken when its turn has come. When listening begins, the driver
// wakes all callers.
func (d *driver) Listen(
	_ context.Context, c backend.Claim,
) (wake <-chan struct{}, stop func(), err error) {
	return d.listener.add(spot{c.Key, c.Shared})
}

// Acquire takes c.Key if no hold has it. A shared claim also joins shared holds, unless a caller
// waits that wants the key alone. If a refused caller will wait, the same statement puts the caller
// into the line of the key, so that a release wakes it when its turn has come.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if err := checkKey(c.Key); err != nil {
		return backend.Grant{}, err
	}

	a, refusal := d.listener.begin(c)
	if refusal != nil {
		return backend.Grant{}, refusal
	}

	for {
		g, settled, err := d.take(ctx, c, a)
		if settled || !c.WillRetry || !errors.Is(err, backend.ErrHeld) {
			d.listener.end(a, err)
			return g, err
		}
		// Another caller has taken the key during the attempt, or the key has become free before
		// this caller was in the line. So nothing would wake this caller, which must ask again.
	}
}

// These constants say how long a statement waits for a row that another transaction has locked.
// Meanwhile the statement keeps its connection.
const (
	// maxBlocked is for an attempt. Other attempts commit in less time, but a transaction that
	// guards a write of the last holder may take longer.
	maxBlocked = 50 * time.Millisecond

	// stillBlocked is for an attempt that takes the last free connection. So releases find one soon,
	// although attempts wait for guarded rows.
	stillBlocked = time.Millisecond

	// maxRenewBlocked is for renewals and breaks, which a guard does not block. An attempt also
	// uses it after the method blocked has found no guard.
	maxRenewBlocked = time.Second

	// restGuarded is the longest time between two attempts at a key that a transaction guards. The
	// end of a guard wakes no caller.
	restGuarded = time.Second
)

// The method take makes one attempt. It reports whether a refused caller may wait without another
// attempt.
func (d *driver) take(
	ctx context.Context, c backend.Claim, a attempt,
) (g backend.Grant, settled bool, err error) {
	most := maxBlocked
	if s := d.statements.Stat(); s.MaxConns() > 1 && s.MaxConns()-s.AcquiredConns() <= 1 {
		most = stillBlocked
	}

	for {
		g, settled, err := d.takeOnce(ctx, c, a, most)
		if !isLockTimeout(err) {
			return g, settled, err
		}
		if settled, err = d.blocked(ctx, c, err); err != nil {
			return backend.Grant{}, settled, err
		}
		most = maxRenewBlocked // no transaction guards the row
	}
}

// takeOnce sends one statement for the method take.
func (d *driver) takeOnce(
	ctx context.Context, c backend.Claim, a attempt, most time.Duration,
) (g backend.Grant, settled bool, err error) {
	if end, ok := ctx.Deadline(); ok {
		most = min(most, time.Until(end)/2) // leave time to call the method blocked
	}

	var (
		fence, left *int64
		owner       string
		shared      bool
	)
	err = d.query(ctx, d.sql.take, func(_ int, rows pgx.Rows) error {
		return rows.Scan(&fence, &owner, &shared, &left, &settled, nil)
	}, []byte(c.Key), c.Token, []byte(c.Owner), micros(c.TTL), c.Fenced, lockWait(most),
		a.number, a.enters, lockWait(maxRenewBlocked), c.Shared, d.channel)

	switch {
	case errors.Is(err, errNoRow), isConflict(err):
		// Another caller has taken the key since the statement began.
		return backend.Grant{}, false, backend.ErrHeld
	case err != nil:
		return backend.Grant{}, false, err
	case fence == nil:
		held := &backend.HeldError{Owner: unhex(owner), Shared: shared, RetryAfter: max(term(left), 0)}
		return backend.Grant{}, settled, held
	}

	if rand.N(sweepOneIn) == 0 && d.closing.Err() == nil {
		d.wg.Go(func() { sweepInTurn(d.closing, d) })
	}
	if c.Fenced {
		g.Fence = uint64(*fence)
	}

	return g, true, nil
}

// The method blocked returns why an attempt has timed out on a lock of PostgreSQL. That attempt has
// changed nothing. If another transaction has locked the row of a free key, the results are true and
// a HeldError. If a statement such as CREATE INDEX locks the table, the error is an outage, because
// no key can be taken or renewed. A table lock ends an attempt only if the server, the role or the
// database has a lock_timeout, because the attempt sets its own after it has the table. If it was
// another lock, or the lock is gone, blocked returns false and nil, and the caller must retry.
func (d *driver) blocked(ctx context.Context, c backend.Claim, err error) (guarded bool, _ error) {
	s, lookErr := d.Inspect(ctx, c.Key)
	if lookErr != nil {
		return false, err
	}

	readers := len(s.Shared) > 0
	if s.Held && !(readers && c.Shared) {
		owners := append(s.Shared, s.Owner)
		held := &backend.HeldError{Owner: owners[0], Shared: readers, RetryAfter: max(s.TTL, 0)}
		return false, held
	}

	var table, row bool
	lookErr = d.query(ctx, d.sql.blocked, func(_ int, rows pgx.Rows) error {
		return rows.Scan(&table, &row)
	}, []byte(c.Key), d.sql.name)
	switch {
	case lookErr != nil:
		return false, err
	case table:
		const why = "another statement, such as CREATE INDEX, locks the whole table"
		return false, fmt.Errorf("%w (%s)", err, why)
	case row && !s.Held:
		return true, &backend.HeldError{RetryAfter: rand.N(restGuarded)}
	case ctx.Err() != nil:
		return false, err
	}

	return false, nil
}

// Renew makes the term of each hold last for at least the TTL of its claim, in one statement.
func (d *driver) Renew(
	ctx context.Context, cs []backend.Claim, done func(i int, g backend.Grant, err error),
) {
	keys := make([][]byte, len(cs))
	tokens := make([]string, len(cs))
	ttls := make([]int64, len(cs))
	for i, c := range cs {
		keys[i] = []byte(c.Key)
		tokens[i] = c.Token
		ttls[i] = micros(c.TTL)
	}

	renewed := make([]bool, len(cs))
	scan := func(row int, rows pgx.Rows) error {
		if row == 0 {
			clear(renewed) // PostgreSQL has undone the attempts before
		}
		var n int64
		if err := rows.Scan(&n); err != nil {
			return err
		}
		renewed[n-1] = true
		return nil
	}

	args := []any{keys, tokens, ttls, lockWait(maxRenewBlocked)}
	err := d.queryOn(ctx, d.renewals, d.sql.renew, scan, args...)
	if code(err) == tooManyConnections {
		// Nothing was sent. The server has no connection left, but the other pool may have one.
		err = d.query(ctx, d.sql.renew, scan, args...)
	}

	for i := range cs {
		switch {
		case err != nil && !errors.Is(err, errNoRow):
			done(i, backend.Grant{}, err)
		case err != nil, !renewed[i]:
			done(i, backend.Grant{}, backend.ErrLost)
		default:
			done(i, backend.Grant{}, nil)
		}
	}
}

// Release frees c.Key and wakes the next waiter. If c.KeepUntil is set, the key stays taken until
// that time. A release of a shared hold does not affect the other shared holds. The token may also
// belong to a caller that has waited, and whose place keeps others out. Then the place ends.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	waiter := d.listener.leaves(spot{c.Key, c.Shared}, c.Token)
	e := ending{key: c.Key, token: &c.Token, waiter: waiter}
	if rest := time.Until(c.KeepUntil); rest > 0 && !c.Shared {
		e.keep = new(micros(rest))
	}
	ended, err := d.end(ctx, e, c.Timeout)
	if err == nil && !ended {
		err = backend.ErrLost
	}
	return err
}

// Break ends every hold of key, and wakes the next waiter.
func (d *driver) Break(ctx context.Context, key string) error {
	if err := checkKey(key); err != nil {
		return err
	}
	_, err := d.end(ctx, ending{key: key}, maxRenewBlocked)
	return err
}

// Inspect returns the holder of key, without waiters, because the table has no names of them. Every
// hold raises the key's fence, but Status.Fence is zero if the last claim did not ask for a fence.
func (d *driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	if err := checkKey(key); err != nil {
		return backend.Status{}, err
	}

	var e backend.Entry
	err := d.query(ctx, d.sql.inspect, func(_ int, rows pgx.Rows) (err error) {
		e, err = scanEntry(rows)
		return err
	}, []byte(key))
	if errors.Is(err, errNoRow) {
		err = nil // the key has no row
	}

	return e.Status, err
}

// List returns the keys that are held. Each statement looks at 1,000 rows.
func (d *driver) List(
	ctx context.Context, prefix string, timeout time.Duration,
) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		for after := []byte(nil); ; {
			page, last, err := d.page(ctx, []byte(prefix), after, timeout)
			for _, e := range page {
				if !strings.HasPrefix(e.Key, prefix) {
					return // keys are in order, so no more keys have the prefix
				}
				if e.Held && !yield(e, nil) {
					return
				}
			}

			if ctx.Err() != nil {
				err = ctx.Err()
			}
			if err != nil {
				yield(backend.Entry{}, err)
			}
			if err != nil || last == nil {
				return
			}
			after = last
		}
	}
}

// page returns the entries that list.sql finds in the next 1,000 rows, and the last key, after
// which the next page begins. If there are no more rows, all results are nil.
func (d *driver) page(
	ctx context.Context, prefix, after []byte, timeout time.Duration,
) (page []backend.Entry, last []byte, err error) {
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err = d.query(within, d.sql.list, func(row int, rows pgx.Rows) error {
		e, err := scanEntry(rows)
		page = append(page[:row], e)
		last = []byte(e.Key)
		return err
	}, prefix, after)
	if errors.Is(err, errNoRow) {
		return nil, nil, nil
	}

	return page, last, err
}

// checkKey returns ErrInvalid if key is too long.
func checkKey(key string) error {
	if len(key) > maxKey {
		return fmt.Errorf("%w: the key has %d bytes; pglock takes up to %d: use a hash of it",
			backend.ErrInvalid, len(key), maxKey)
	}
	return nil
}
