// Package pglock keeps locks in a table of a PostgreSQL database.
//
// # Guarantees
//
// A key has one holder at a time, as long as the PostgreSQL keeps what it has confirmed and its
// clock does not step by more than backend.Drift. Locks and renewals are on the server's disk
// before they are confirmed, so holds survive a restart or a crash. A failover to a replica that
// lags may lose the newest locks: see docs/pglock.md. Fences grow even over a failover, if the
// clocks of both servers agree. Waiters get the key in no particular order.
//
// A fence can be checked in the transaction of the write that it guards:
//
//	SELECT FROM hasp_locks WHERE key = $1 AND fence = $2 AND expires > clock_timestamp()
//	FOR KEY SHARE
//
// If this returns a row, no later holder gets the key before the transaction has ended, so the
// write is safe, however long it takes. The holder's renewals go on meanwhile. See the example.
//
// # Cost
//
// It takes one statement to lock a free key, one to find that a key is held, one to renew up to 256
// leases of a Client, and one to unlock. A release wakes waiters by NOTIFY. Waiters also try once a
// second, and when the holder's term ends. A Client makes one more connection while its callers
// wait. Each call for a shared lease rewrites the row of its key, which has all shared leases of
// the key. So a key should have tens of shared leases, not thousands. While a transaction stays
// open for long, as in pg_dump, calls on a busy key of that database slow down: see docs/pglock.md.
//
// # URL
//
//	pglock+postgres://user:password@host:port/database
//	pglock+postgres://user:password@host1:port,host2:port/database
//
// or postgresql in place of postgres, with these parameters of hasp:
//
//	schema     the schema of the table (default: the one in the search path that has it, else the first)
//	table      the name of the table (default hasp_locks)
//	pool_size  the most connections for statements, from 1 to 1000 (default 10)
//
// and these of libpq, as PostgreSQL documents them:
//
//	host, port, dbname, user, password, passfile, service, servicefile, connect_timeout,
//	application_name, target_session_attrs, sslmode, sslrootcert, sslcert, sslkey, sslpassword,
//	sslsni, sslnegotiation, channel_binding
//
// If there are several hosts, target_session_attrs is read-write unless it is given, so that
// the primary is found after a failover.
//
// A Client notices a PgBouncer. Then it prepares no statements, and waiters poll, because LISTEN
// does not work through a PgBouncer.
//
// # Table
//
// Each key has a row. The first Client creates the table. If its user may not create tables, the
// error has the statements that another user must run. The row of a key that was not used for an
// hour is deleted. Keys may have up to 2,000 bytes.
//
// PostgreSQL 13 or later.
package pglock

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// defaultTable is the name of the table, unless Options.Table is set.
const defaultTable = "hasp_locks"

// maxKey is the length of the longest key in bytes, because PostgreSQL has no index on longer
// values. A longer key is backend.ErrInvalid.
const maxKey = 2000

// Options are the settings of [New]. Nil and the zero value mean the defaults.
type Options struct {
	// Client has the options of the Client that New returns. NewDriver ignores it.
	Client hasp.Options

	// Schema and Table name the table of the locks. All clients that share locks must use the same
	// names. Case matters. The default of Schema is the schema in the search path that has the
	// table, or else the first schema of the search path.
	Schema, Table string
}

// driver is a [backend.Driver] that stores its locks in a table of a PostgreSQL database.
type driver struct {
	pool    *pgxpool.Pool
	own     bool    // Close closes the pool
	options Options // as they were passed
	sql     *statements
	channel string      // of the NOTIFY messages that releases send
	bouncer atomic.Bool // a pooler shares sessions, so nothing may be left in them

	// takes bounds the attempts in flight, so that releases get a connection even if attempts wait
	// for rows that other transactions have locked.
	takes chan struct{}

	// others bounds all statements except renewals, so that a renewal never waits for a connection
	// behind the releases of a busy Client.
	others chan struct{}

	guards   guards
	health   health
	listener listener

	// nextSweep is a UnixNano before which this driver does not sweep.
	nextSweep atomic.Int64

	closing context.Context // ends when Close begins
	stop    context.CancelFunc
	wg      sync.WaitGroup // of the driver's goroutines
}

var (
	_ backend.Waker     = (*driver)(nil)
	_ backend.Inspector = (*driver)(nil)
	_ backend.Lister    = (*driver)(nil)
)

// New returns a Client whose locks are in the database of pool. It calls the database to find the
// table, and creates the table if there is none. If the database cannot be used, the error says
// what to do, without a password. If pool is nil or o is out of range, the error is
// hasp.ErrInvalid. The pool remains the caller's: Close does not close it. While callers wait, the
// Client makes one more connection with the settings of the pool.
func New(ctx context.Context, pool *pgxpool.Pool, o *Options) (*hasp.Client, error) {
	o = cmp.Or(o, &Options{})
	d, err := NewDriver(ctx, pool, o)
	if err != nil {
		return nil, err
	}
	return hasp.New(d, &o.Client)
}

// NewDriver returns the driver of New alone, for the conformance suite or for a wrapper that is
// passed to [hasp.New].
func NewDriver(ctx context.Context, pool *pgxpool.Pool, o *Options) (backend.Driver, error) {
	if pool == nil {
		return nil, fmt.Errorf("pglock: %w: pool is nil", hasp.ErrInvalid)
	}
	own := *cmp.Or(o, &Options{}) // check sets the defaults
	if err := own.check(); err != nil {
		return nil, err
	}
	d := newDriver(pool, false, own)
	if err := d.setUp(ctx); err != nil {
		d.stop()
		return nil, err
	}
	return d, nil
}

func newDriver(pool *pgxpool.Pool, own bool, o Options) *driver {
	size := int(pool.Config().MaxConns)
	kept := max(size/8, 1) // connections for renewals only; attempts leave as many more to releases
	d := &driver{pool: pool, own: own, options: o,
		takes: make(chan struct{}, max(size-2*kept, 1)), others: make(chan struct{}, max(size-kept, 1))}
	d.closing, d.stop = context.WithCancel(context.Background())
	d.listener.d = d
	d.listener.waits = map[string]map[chan struct{}]bool{}
	return d
}

// Traits reports that the driver excludes all clients of the same table, grants fences, and
// obeys KeepUntil and Shared. Its calls end promptly.
func (d *driver) Traits() backend.Traits {
	return backend.Traits{Fenced: true, MinHold: true, Shared: true, Reach: backend.Network, Cancellation: backend.CancelPrompt}
}

// closeGrace is how long Close waits for the server, which may not answer.
const closeGrace = time.Second

// Close closes the connections that the driver has opened. A pool that was passed to New stays
// open. If the server does not answer, some connections are closed up to 15 s later.
func (d *driver) Close() error {
	d.stop()
	if d.own {
		closed := make(chan struct{})
		go func() {
			d.pool.Close() // may block, because each connection tells the server
			close(closed)
		}()
		select {
		case <-closed:
		case <-time.After(closeGrace):
		}
	}
	d.wg.Wait()
	return nil
}

// Acquire takes c.Key if no hold has it. A shared claim also joins shared holds, unless a writer
// waits for their end. If this caller will wait, Acquire marks the row, so that a release wakes it.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	began := time.Now()
	if err := takeSlot(ctx, d.takes); err != nil {
		if answered, _ := d.health.last(); c.WillRetry && time.Since(began) >= c.Timeout/2 && answered.After(began) {
			err = &backend.HeldError{} // no outage: slots are scarce, and the server answers others
		}
		return backend.Grant{}, err
	}
	defer func() { <-d.takes }()

	for {
		g, last, err := d.take(ctx, c)
		if err == backend.ErrHeld && c.WillRetry {
			// Try again: another caller has taken the key during the attempt, as often happens
			// after a release. A second attempt shows whether the row is marked already, and who
			// holds the key.
			g, last, err = d.take(ctx, c)
		}
		if !errors.Is(err, backend.ErrHeld) || !c.WillRetry || last.blocked {
			return g, err
		}

		// Mark the row before the caller sleeps. If a release has come before the mark, markErr is
		// errNoRow, because the key is free.
		switch markErr := d.mark(ctx, c, last.marked, err); {
		case markErr == nil:
			return g, err
		case errors.Is(markErr, errNoRow):
		case isLockTimeout(markErr) || isConflict(markErr):
			return g, d.guards.refusal(c.Key) // nothing wakes this caller, so it polls
		default:
			return g, markErr
		}
	}
}

// mark makes each release in the next 3 s wake the callers that wait. If c is a writer that waits
// for readers, mark also keeps out new readers for this time, or until a Release of c's token. If
// marked is true, the row is marked already.
func (d *driver) mark(ctx context.Context, c backend.Claim, marked bool, refusal error) error {
	var held *backend.HeldError
	intends := errors.As(refusal, &held) && held.Shared && !c.Shared
	if !intends && (marked || !d.listener.hears()) {
		return nil
	}
	return d.exec(ctx, d.sql.mark, []byte(c.Key), c.Token, c.Shared, lockWait(maxBlocked))
}

// takeSlot blocks until slots has room or ctx is done. The caller gives the slot back by
// receiving from slots.
func takeSlot(ctx context.Context, slots chan struct{}) error {
	select {
	case slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// refusal is what a refused attempt reports besides its HeldError.
type refusal struct {
	marked  bool // the row stays marked for 1.5 s at least, so a release wakes the waiting callers
	blocked bool // another transaction has locked the row of a free key
}

// How long a statement waits, and keeps its connection, for a row that another transaction has
// locked.
const (
	// maxBlocked is for an attempt. The commits of other attempts are faster, but a transaction
	// that guards a write of the last holder may be slower.
	maxBlocked = 50 * time.Millisecond

	// stillBlocked is for an attempt at a key that is known to be guarded, and for an attempt while
	// all slots of takes are used. Such callers poll, so that they leave connections to the others.
	stillBlocked = time.Millisecond

	// maxRenewBlocked is for renewals and breaks, which a guard does not block. It is also for an
	// attempt after the method blocked has found no guard.
	maxRenewBlocked = time.Second
)

// heldError returns the error about a hold. Left is in microseconds, or nil if the hold has no
// end.
func heldError(owner string, shared bool, left *int64) *backend.HeldError {
	return &backend.HeldError{Owner: unhex(owner), Shared: shared, RetryAfter: max(term(left), 0)}
}

// unhex returns the bytes of an owner or a key, which the statements encode. If text is not
// hexadecimal, unhex returns it as it is, because someone may have changed the value by hand.
func unhex(text string) string {
	b, err := hex.DecodeString(text)
	if err != nil {
		return text
	}
	return string(b)
}

// term returns the rest of a term, given in microseconds, or -1 if left is nil, which means no end.
func term(left *int64) time.Duration {
	if left == nil {
		return -1
	}
	const most = math.MaxInt64 / int64(time.Microsecond)
	return time.Duration(min(*left, most)) * time.Microsecond
}

// guards records the free keys whose rows other transactions have locked, and since when. A key is
// removed when an attempt at it has another outcome.
type guards struct {
	mu    sync.Mutex // guards since
	since map[string]time.Time
}

const (
	maxGuards   = 256         // the most keys; when there are more, all are forgotten
	longestRest = time.Second // between two attempts at a guarded key
)

func (g *guards) has(key string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.since[key].IsZero()
}

func (g *guards) forget(key string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.since, key)
}

// refusal records that key is guarded. RetryAfter makes the caller ask again, because the end of a
// guard wakes no caller. RetryAfter grows with the time for which the guard has lasted.
func (g *guards) refusal(key string) *backend.HeldError {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.since[key].IsZero() {
		if len(g.since) >= maxGuards || g.since == nil {
			g.since = map[string]time.Time{} // keys that are still guarded are soon recorded again
		}
		g.since[key] = time.Now().Add(-maxBlocked)
	}
	return &backend.HeldError{RetryAfter: rand.N(min(time.Since(g.since[key]), longestRest))}
}

// take makes one attempt. The caller holds a slot of d.takes.
func (d *driver) take(ctx context.Context, c backend.Claim) (backend.Grant, refusal, error) {
	if err := checkKey(c.Key); err != nil {
		return backend.Grant{}, refusal{}, err
	}
	most := maxBlocked
	if len(d.takes) == cap(d.takes) && cap(d.takes) > 1 || d.guards.has(c.Key) {
		most = stillBlocked
	}

	for {
		g, last, err := d.takeOnce(ctx, c, most)
		if !isLockTimeout(err) {
			d.guards.forget(c.Key)
			return g, last, err
		}
		last.blocked, err = d.blocked(ctx, c, err)
		if err != nil && !(most < maxRenewBlocked && joinable(c, err)) {
			return backend.Grant{}, last, err
		}
		most = maxRenewBlocked // nothing guards the row
	}
}

// joinable reports whether err is about a shared hold that c can join. Only callers that join or
// leave lock the row of such a hold, and only until they commit.
func joinable(c backend.Claim, err error) bool {
	var held *backend.HeldError
	return c.Shared && errors.As(err, &held) && held.Shared
}

// takeOnce sends one statement for take.
func (d *driver) takeOnce(ctx context.Context, c backend.Claim, most time.Duration) (backend.Grant, refusal, error) {
	if end, ok := ctx.Deadline(); ok {
		most = min(most, time.Until(end)/2) // leave time for the call of blocked
	}
	sql := d.sql.take
	if c.Shared {
		sql = d.sql.join
	}
	var (
		fence, left    *int64
		owner          string
		shared, marked bool
	)
	err := d.query(ctx, sql, func(rows pgx.Rows) error { return rows.Scan(&fence, &owner, &shared, &left, &marked) },
		[]byte(c.Key), c.Token, []byte(c.Owner), micros(c.TTL), c.Fenced, lockWait(most))

	switch {
	case errors.Is(err, errNoRow), isConflict(err):
		// Another caller has taken the key since the statement began.
		return backend.Grant{}, refusal{}, backend.ErrHeld
	case err != nil:
		return backend.Grant{}, refusal{}, err
	case fence == nil:
		return backend.Grant{}, refusal{marked: marked}, heldError(owner, shared, left)
	}

	d.sweepSeldom()
	if !c.Fenced {
		return backend.Grant{}, refusal{}, nil
	}
	return backend.Grant{Fence: uint64(*fence)}, refusal{}, nil
}

// blocked returns why an attempt has waited too long for a lock of PostgreSQL, and so has changed
// nothing. If another transaction has locked the row, row is true: the key counts as held. If a
// statement such as CREATE INDEX locks the whole table, the error is an outage, because no lock can
// be taken or renewed. A table lock ends an attempt only if the server, the role or the database
// has a lock_timeout, because the attempt sets its own only after PostgreSQL has locked the table.
// If the lock was another one, or is gone, blocked returns false and nil: the caller must retry.
func (d *driver) blocked(ctx context.Context, c backend.Claim, err error) (row bool, _ error) {
	var (
		held, shared, table bool
		owner               string
		left                *int64
	)
	lookErr := d.query(ctx, d.sql.blocked, func(rows pgx.Rows) error {
		return rows.Scan(&held, &owner, &shared, &left, &table, &row)
	}, []byte(c.Key), d.sql.name, lockWait(maxRenewBlocked))
	switch {
	case lookErr != nil:
		return false, err
	case held:
		return false, heldError(owner, shared, left)
	case table:
		return false, fmt.Errorf("%w (another statement, such as CREATE INDEX, locks the whole table)", err)
	case row:
		return true, d.guards.refusal(c.Key)
	case ctx.Err() != nil:
		return false, err
	}
	return false, nil
}

// Renew raises the term of each hold to at least its claim's TTL. One statement renews all
// exclusive holds, and another one all shared holds.
func (d *driver) Renew(ctx context.Context, cs []backend.Claim, done func(i int, g backend.Grant, err error)) {
	var exclusive, shared []int
	for i, c := range cs {
		if c.Shared {
			shared = append(shared, i)
		} else {
			exclusive = append(exclusive, i)
		}
	}
	d.renew(ctx, d.sql.renew, cs, exclusive, done)
	d.renew(ctx, d.sql.renewShared, cs, shared, done)
}

// renew renews the claims of cs with these indexes.
func (d *driver) renew(ctx context.Context, sql string, cs []backend.Claim, which []int, done func(i int, g backend.Grant, err error)) {
	if len(which) == 0 {
		return
	}
	keys, tokens, ttls := make([][]byte, len(which)), make([]string, len(which)), make([]int64, len(which))
	for n, i := range which {
		keys[n], tokens[n], ttls[n] = []byte(cs[i].Key), cs[i].Token, micros(cs[i].TTL)
	}

	renewed := make([]bool, len(which))
	err := d.queryUnbounded(ctx, sql, func(rows pgx.Rows) error {
		var n int64
		if err := rows.Scan(&n); err != nil {
			return err
		}
		renewed[n-1] = true
		return nil
	}, keys, tokens, ttls, lockWait(maxRenewBlocked))

	for n, i := range which {
		switch {
		case err != nil && !errors.Is(err, errNoRow):
			done(i, backend.Grant{}, err)
		case !renewed[n]:
			done(i, backend.Grant{}, backend.ErrLost)
		default:
			done(i, backend.Grant{}, nil)
		}
	}
}

// Release frees c.Key and wakes the callers that wait for it. If c.KeepUntil is set, the key stays
// taken until that time. A release of a shared hold leaves the other shared holds.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	if checkKey(c.Key) != nil {
		return backend.ErrLost
	}
	key, message, wait := []byte(c.Key), message(c.Key), lockWait(c.Timeout)

	var err error
	if c.Shared {
		err = d.exec(ctx, d.sql.leave, key, c.Token, d.channel, message, wait)
	} else {
		var while *int64
		if rest := time.Until(c.KeepUntil); rest > 0 {
			while = new(micros(rest))
		}
		err = d.exec(ctx, d.sql.release, key, c.Token, while, d.channel, message, wait)

		// The token may belong to a writer that has waited. Then remove its mark, which keeps
		// readers out.
		if errors.Is(err, errNoRow) {
			err = d.exec(ctx, d.sql.unmark, key, c.Token, d.channel, message, wait)
			if err == nil {
				err = errNoRow // the token did not hold the key
			}
		}
	}
	if errors.Is(err, errNoRow) {
		return backend.ErrLost
	}
	return err
}

// checkKey returns ErrInvalid if key is too long.
func checkKey(key string) error {
	if len(key) > maxKey {
		return fmt.Errorf("%w: the key has %d bytes; pglock takes up to %d: use a hash of it", backend.ErrInvalid, len(key), maxKey)
	}
	return nil
}

// micros returns d in microseconds, rounded up.
func micros(d time.Duration) int64 {
	return int64((d + time.Microsecond - 1) / time.Microsecond)
}
