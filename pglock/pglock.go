// Package pglock keeps locks in a table of a PostgreSQL database.
//
// # Guarantees
//
// A key has one holder at a time, as long as the server keeps what it has confirmed, and the
// server's clock does not step by more than backend.Drift allows. Locks and renewals are on the
// server's disk before they are confirmed, so holds survive a restart or a crash. A failover to a
// replica that lags may lose the newest locks, and two primaries may both grant a key as long as
// both run: see docs/pglock.md. Fences grow even over a failover, if the clocks of both servers
// agree. Waiters get the key roughly in order.
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
// call for a shared lease rewrites the row of the key, which lists all shared leases of that key.
// So a key should have tens of shared leases, not thousands. A transaction that stays open for
// long, as in pg_dump, slows down busy keys of its database: see docs/pglock.md.
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

// driver is a [backend.Driver] that stores its locks in a table of a PostgreSQL database.
type driver struct {
	statements *connections      // all but renewals: the pool that was passed, or one of our own
	renewals   *connections      // renewals, and releases if the pool is used up
	own        bool              // true if Close closes the pool of statements
	options    Options           // as passed, with the default of Table
	table      string            // the name of the table, in quotes
	sql        map[string]string // the statements (see newStatements)
	channel    string            // the first part of the names of the channels of releases
	bouncer    atomic.Bool       // true if a pooler shares sessions: leave nothing in them

	// The field takes is a channel that limits the attempts in flight to the number of connections.
	takes chan struct{}

	guards   guards
	listener *listener

	// nextSweep is the earliest time, as a UnixNano, at which this driver sweeps again. One grant
	// of sweepOneIn, on average, starts an attempt to sweep.
	nextSweep  atomic.Int64
	sweepOneIn int

	closing context.Context // ends when Close begins
	stop    context.CancelFunc

	mu sync.Mutex     // is held while a goroutine starts
	wg sync.WaitGroup // counts the driver's goroutines
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
	d, err := newDriver(pool, false, own)
	if err != nil {
		return nil, err
	}
	if err := d.setUp(ctx); err != nil {
		return nil, fmt.Errorf("pglock: %w", backend.Outage(ctx, err))
	}
	return d, nil
}

// newDriver returns a driver that sends its statements over pool. If own is true, the driver's
// Close closes pool. The driver has a pool of its own for renewals, with the same settings. Before
// its first use, the caller must call setUp.
func newDriver(pool *pgxpool.Pool, own bool, o Options) (*driver, error) {
	cfg := pool.Config()
	cfg.MaxConns = renewalConns
	cfg.MinConns = 0
	cfg.MinIdleConns = 0
	boundConnect(cfg.ConnConfig)
	renewals, err := pgxpool.NewWithConfig(context.Background(), cfg) // makes no connection yet
	if err != nil {
		return nil, err
	}

	d := &driver{
		statements: &connections{Pool: pool},
		renewals:   &connections{Pool: renewals},
		own:        own,
		options:    o,
		takes:      make(chan struct{}, pool.Config().MaxConns),
		sweepOneIn: 1000,
	}

	d.closing, d.stop = context.WithCancel(context.Background())
	d.listener = newListener(d)
	return d, nil
}

// renewalConns is how many connections a Client uses for renewals. One statement renews up to 256
// leases.
const renewalConns = 2

// boundConnect gives cfg a timeout for each host, because a caller's pool may have none.
func boundConnect(cfg *pgx.ConnConfig) {
	cfg.ConnectTimeout = cmp.Or(cfg.ConnectTimeout, hasp.DefaultTimeout)
}

// Traits reports that the driver excludes all clients of the same table, grants fences, obeys
// KeepUntil and Shared, and ends each call soon after the call's context.
func (d *driver) Traits() backend.Traits {
	return backend.Traits{
		Fenced:       true,
		MinHold:      true,
		Shared:       true,
		Reach:        backend.Network,
		Cancellation: backend.CancelPrompt,
	}
}

// closeGrace is how long Close waits for the server, which may not answer.
const closeGrace = time.Second

// Close closes the connections that the driver has opened. A pool that was passed to New stays
// open. If the server does not answer, some connections are closed up to 15 s later.
func (d *driver) Close() error {
	d.stop()
	// Wait for a call of spawn that is under way. Later calls see that closing has ended.
	d.mu.Lock()
	d.mu.Unlock() //lint:ignore SA2001 no goroutine starts from now on
	closed := make(chan struct{})
	go func() {
		// Closing a pool may block, because each connection tells the server that it ends.
		d.renewals.Close()
		if d.own {
			d.statements.Close()
		}
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(closeGrace): // the goroutine above goes on
	}
	d.wg.Wait()
	return nil
}

// spawn starts a goroutine that Close waits for, unless Close has begun.
func (d *driver) spawn(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closing.Err() == nil {
		d.wg.Go(f)
	}
}

// Acquire takes c.Key if no hold has it. A shared claim also joins shared holds, unless a caller
// waits that wants the key alone. If a refused caller will wait, the same statement puts the caller
// into the line of the key, so that a release wakes it when its turn has come.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	began := time.Now()
	select {
	case d.takes <- struct{}{}:
		defer func() { <-d.takes }()
	case <-ctx.Done():
		return backend.Grant{}, d.unsent(c, began, ctx.Err())
	}

	a, refusal := d.listener.begin(c)
	if refusal != nil {
		return backend.Grant{}, refusal
	}
	for {
		g, settled, err := d.take(ctx, c, a)

		// A refused caller that will wait, but is not settled, must ask again at once, because
		// nothing would wake it. There are three cases: another caller has taken the key during the
		// attempt, the key has become free before this caller was in the line, or another
		// transaction has locked the row of a held key. The third case may last, so after half of
		// its time the caller gets the refusal and polls.
		isRefused := errors.Is(err, backend.ErrHeld)
		mustAskAgain := isRefused && c.WillRetry && !settled
		if mustAskAgain && time.Since(began) < c.Timeout/2 {
			continue
		}

		d.listener.end(a, err)
		if errors.As(err, new(*busyError)) {
			err = d.unsent(c, began, err)
		}
		return g, err
	}
}

// unsent returns the error of an attempt that was not sent, because other calls had all slots or
// all connections until the attempt's context ended. If the server has answered one of these calls
// since the attempt began, there is no outage. Then a caller that will retry gets a HeldError, so
// that it goes on waiting. Otherwise unsent returns err.
func (d *driver) unsent(c backend.Claim, began time.Time, err error) error {
	answered, _ := d.statements.health.last()
	if c.WillRetry && answered.After(began) {
		return &backend.HeldError{}
	}
	return err
}

// These constants say how long a statement waits for a row that another transaction has locked.
// Meanwhile the statement keeps its connection.
const (
	// maxBlocked is for an attempt. Other attempts commit in less time, but a transaction that
	// guards a write of the last holder may take longer.
	maxBlocked = 50 * time.Millisecond

	// stillBlocked is for an attempt at a key that is known to be guarded, or while d.takes is
	// full. The callers of these attempts poll, so a short wait costs them little and leaves
	// connections to other callers.
	stillBlocked = time.Millisecond

	// maxRenewBlocked is for renewals and breaks, which a guard does not block, so that only a
	// short statement can be in their way. For the same reason, an attempt uses it after the method
	// blocked has found no guard.
	maxRenewBlocked = time.Second
)

// heldError returns the error about a hold. The parameter left is the rest of the hold's term in
// microseconds, or nil if the term has no end. RetryAfter is then zero, which means unknown.
func heldError(owner string, shared bool, left *int64) *backend.HeldError {
	return &backend.HeldError{Owner: unhex(owner), Shared: shared, RetryAfter: max(term(left), 0)}
}

// unhex decodes an owner or a key, which the statements return in hexadecimal. If text is not
// hexadecimal, unhex returns it unchanged, because someone may have changed the value by hand.
func unhex(text string) string {
	b, err := hex.DecodeString(text)
	if err != nil {
		return text
	}
	return string(b)
}

// The function term converts microseconds to a Duration, and nil, which means no end, to -1.
func term(left *int64) time.Duration {
	if left == nil {
		return -1
	}
	const longest = math.MaxInt64 / int64(time.Microsecond) // a longer term would overflow
	return time.Duration(min(*left, longest)) * time.Microsecond
}

// guards records the free keys whose rows other transactions have locked. Such a transaction is
// called a guard of the key. A key is removed when an attempt at it ends without a lock timeout.
type guards struct {
	mu    sync.Mutex           // guards the field since
	since map[string]time.Time // by key, when the guard was noticed
}

const (
	maxGuards   = 256         // how many keys are recorded; if there are more, all are forgotten
	longestRest = time.Second // the longest time between two attempts at a guarded key
)

// has reports whether a guard of key was noticed and may still be there.
func (g *guards) has(key string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.since[key].IsZero()
}

// forget records that key has no guard any more.
func (g *guards) forget(key string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.since, key)
}

// refusal records that the key is guarded, and returns the error of an attempt at it. The end of a
// guard wakes no caller, so RetryAfter makes the caller ask again. RetryAfter is random, and grows
// with the age of the guard.
func (g *guards) refusal(key string) *backend.HeldError {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.since[key].IsZero() {
		if len(g.since) >= maxGuards || g.since == nil {
			g.since = map[string]time.Time{} // keys that are still guarded are soon recorded again
		}
		// The attempt has waited for the guard. This also keeps the argument of rand.N above zero.
		g.since[key] = time.Now().Add(-maxBlocked)
	}

	return &backend.HeldError{RetryAfter: rand.N(min(time.Since(g.since[key]), longestRest))}
}

// The method take makes one attempt. The caller of take holds a slot of d.takes. The result settled
// is true if a refused caller may sleep without another attempt: a release will wake it, or it
// polls. It has no meaning if the error is not about a hold.
func (d *driver) take(
	ctx context.Context, c backend.Claim, a attempt,
) (g backend.Grant, settled bool, err error) {
	if err := checkKey(c.Key); err != nil {
		return backend.Grant{}, false, err
	}
	lockTimeout := maxBlocked
	// With one connection, d.takes is always full, because this attempt has the only slot.
	isFull := cap(d.takes) > 1 && len(d.takes) == cap(d.takes)
	if isFull || d.guards.has(c.Key) {
		lockTimeout = stillBlocked
	}

	for {
		g, settled, err := d.takeOnce(ctx, c, a, lockTimeout)
		if code(err) != lockNotAvailable {
			d.guards.forget(c.Key)
			return g, settled, err
		}

		guarded, err := d.blocked(ctx, c, err)
		canJoinLater := joinable(c, err) && lockTimeout < maxRenewBlocked
		if err != nil && !canJoinLater {
			// A caller that finds a guard is settled: it polls, because the end of a guard wakes
			// nobody. A caller that finds a hold is not, because it is not in the line yet.
			return backend.Grant{}, guarded, err
		}
		lockTimeout = maxRenewBlocked // no transaction guards the row
	}
}

// joinable reports whether err is about a shared hold that c can join. The row of such a hold is
// usually locked only by statements of drivers, which commit at once. So c may wait for the lock.
func joinable(c backend.Claim, err error) bool {
	var held *backend.HeldError
	return c.Shared && errors.As(err, &held) && held.Shared
}

// takeOnce sends one statement for the method take, and returns what take returns. The statement
// waits for a locked row for lockTimeout at most.
func (d *driver) takeOnce(
	ctx context.Context, c backend.Claim, a attempt, lockTimeout time.Duration,
) (g backend.Grant, settled bool, err error) {
	keep := keepsPlace
	if end, ok := ctx.Deadline(); ok {
		rest := time.Until(end)
		lockTimeout = min(lockTimeout, rest/2) // leave time to call the method blocked

		// The context of an attempt usually lasts for c.Timeout. If much less is left, the caller's
		// whole wait ends then, and its place in the line must end with it.
		if rest < min(keep, c.Timeout/4) {
			keep = max(rest, 0)
		}
	}
	var (
		fence, left *int64
		owner       string
		shared      bool
		unused      *string // the column in which the statement calls functions for their effects
	)
	scan := func(_ int, rows pgx.Rows) error {
		return rows.Scan(&fence, &owner, &shared, &left, &settled, &unused)
	}
	// These are the arguments $1 to $10 of take.sql. A guard does not keep a refused caller from
	// entering the line, so the lock_timeout for that is maxRenewBlocked.
	args := []any{
		[]byte(c.Key), c.Token, []byte(c.Owner), micros(c.TTL), c.Fenced,
		lockWait(lockTimeout), a.number, a.enters, lockWait(maxRenewBlocked), micros(keep),
	}
	statement := "take"
	if c.Shared {
		statement = "join"
		args = append(args, d.channel)
	}
	n, err := d.query(ctx, statement, scan, args...)

	switch {
	case err != nil && !isConflict(err):
		return backend.Grant{}, false, err
	case err != nil, n == 0:
		// After a conflict, or without a row, another caller has taken the key since the statement
		// began. The answer does not say who.
		return backend.Grant{}, false, backend.ErrHeld
	case fence == nil: // the row is about the hold
		return backend.Grant{}, settled, heldError(owner, shared, left)
	}

	d.sweepSeldom()
	if c.Fenced {
		g.Fence = uint64(*fence)
	}
	return g, true, nil
}

// The method blocked finds out why an attempt has ended with err, a timeout of a wait for a lock of
// PostgreSQL. That attempt has changed nothing. The results of blocked are:
//   - false and a HeldError about the hold, if the key is held;
//   - true and a HeldError, if a guard of the key, or another transaction, has locked the row of a
//     free key;
//   - false and err, if a statement such as CREATE INDEX locks the table. This is an outage, because
//     no key can be taken or renewed. It happens only if the server, the role or the database has a
//     lock_timeout, because an attempt sets its own lock_timeout after it has locked the table;
//   - false and err, if ctx has ended or the database does not say why;
//   - false and nil, if it was another lock, or the lock is gone. Then the caller must retry.
func (d *driver) blocked(ctx context.Context, c backend.Claim, err error) (guarded bool, _ error) {
	var (
		held, shared, tableLocked bool
		owner                     string
		left                      *int64
	)
	_, queryErr := d.query(ctx, "blocked", func(_ int, rows pgx.Rows) error {
		return rows.Scan(&held, &owner, &shared, &left, &tableLocked, &guarded)
	}, []byte(c.Key), d.table, lockWait(maxRenewBlocked))
	switch {
	case queryErr != nil:
		return false, err
	case held:
		return false, heldError(owner, shared, left)
	case tableLocked:
		return false, fmt.Errorf("%w (another statement, such as CREATE INDEX, locks the whole table)", err)
	case guarded:
		return true, d.guards.refusal(c.Key)
	case ctx.Err() != nil:
		return false, err
	}

	return false, nil
}

// Renew makes the term of each hold last for at least the TTL of its claim. One statement renews
// all exclusive holds, and another statement renews all shared holds.
func (d *driver) Renew(
	ctx context.Context, cs []backend.Claim, done func(i int, g backend.Grant, err error),
) {
	var exclusive, shared []int
	for i, c := range cs {
		if c.Shared {
			shared = append(shared, i)
		} else {
			exclusive = append(exclusive, i)
		}
	}

	d.renew(ctx, "renew", cs, exclusive, done)
	d.renew(ctx, "renewshared", cs, shared, done)
}

// The method renew renews those claims of cs whose indexes are given, by one call of the statement.
func (d *driver) renew(
	ctx context.Context, statement string, cs []backend.Claim, indexes []int,
	done func(i int, g backend.Grant, err error),
) {
	if len(indexes) == 0 {
		return
	}
	var keys [][]byte
	var tokens []string
	var ttls []int64
	for _, i := range indexes {
		keys = append(keys, []byte(cs[i].Key))
		tokens = append(tokens, cs[i].Token)
		ttls = append(ttls, micros(cs[i].TTL))
	}

	// The statement returns a row for each hold that it has renewed: the position of its key in
	// keys, counted from 1.
	renewed := make([]bool, len(indexes))
	scan := func(row int, rows pgx.Rows) error {
		if row == 0 {
			clear(renewed) // PostgreSQL has undone an earlier attempt, so rows count from 0 again
		}
		var position int64
		if err := rows.Scan(&position); err != nil {
			return err
		}
		renewed[position-1] = true
		return nil
	}

	rowCount, err := d.queryApart(ctx, statement, scan, keys, tokens, lockWait(maxRenewBlocked), ttls)

	for n, i := range indexes {
		claimErr := err
		isRenewed := rowCount > 0 && renewed[n] // without rows, renewed may be of an undone attempt
		if err == nil && !isRenewed {
			claimErr = backend.ErrLost
		}
		done(i, backend.Grant{}, claimErr)
	}
}

// Release frees c.Key and wakes the next waiter. If c.KeepUntil is set, the key stays taken until
// that time. A release of a shared hold does not affect the other shared holds. If no hold has the
// token, Release removes the caller's place from the line of the key, if any, and returns ErrLost.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	if checkKey(c.Key) != nil {
		return backend.ErrLost // nobody can have taken a key that is too long
	}

	statement := "leave"
	args := []any{c.Token}
	if !c.Shared {
		statement = "release"
		var keep *int64 // how long the key stays taken
		if rest := time.Until(c.KeepUntil); rest > 0 {
			keep = new(micros(rest))
		}
		args = append(args, keep)
	}

	ended, err := d.finish(ctx, statement, c.Key, c.Timeout, args...)
	if err != nil || ended > 0 {
		return err
	}

	// The token may belong to a caller that has given up waiting. Its place still keeps others out.
	if number := d.listener.forget(spot{c.Key, c.Shared}, c.Token); number != 0 {
		if err := d.quit(ctx, c.Key, number, c.Timeout); err != nil {
			return err
		}
	}

	return backend.ErrLost
}

// quit removes the waiter with this number from the line of a key. If that waiter is the heir,
// which the last release has woken, quit wakes the next waiter.
func (d *driver) quit(
	ctx context.Context, key string, number int64, lockTimeout time.Duration,
) error {
	_, err := d.finish(ctx, "quit", key, lockTimeout, number)
	return err
}

// checkKey returns ErrInvalid if key is too long.
func checkKey(key string) error {
	if len(key) > maxKey {
		return invalid("the key has %d bytes; pglock takes up to %d: use a hash of it", len(key), maxKey)
	}
	return nil
}

// micros returns d in microseconds, rounded up.
func micros(d time.Duration) int64 {
	return int64((d + time.Microsecond - 1) / time.Microsecond)
}
