// Package fairlock is the strategy that serves in order: a lock on one Redis
// whose waiters stand in a queue, first come, first served, over all processes.
//
// # Guarantees
//
// One holder at a time for as long as the Redis keeps its data and its clock
// does not step by more than backend.Drift; beyond that the fence protects. A
// Redis that fails over to a replica may lose the newest writes, and with them
// a lock, which replicas=N makes rarer, or a place in the queue: who has lost
// that takes a new one. docs/redis.md says more.
//
// A release hands the key to the first waiter that can hear of it, within the
// script that releases, so nobody comes between the two. A waiter keeps its
// place for as long as its process gives a sign of life, however long the
// holder takes. The dead cost nothing: one whose connection is gone is passed
// over, and removed when its window has passed. One that is stopped, or cut
// off without a word, looks alive: the key is lost on it for the window at
// most, and only once, since by then the window of all others that were
// stopped has passed, too. TryLock does not go past a queue.
//
// Nothing depends on the clock of a client: places and terms go by the
// server's.
//
// # Turns
//
// With turns=N the callers of one Client for one key stand in line in the
// Client, and the first of them has a place in the queue. When it is served, up
// to N of them have the key one after another, without a call to the Redis
// between them. Then the Client takes a new place, at the end. This is lock
// cohorting by Dice, Marathe and Shavit
// (https://doi.org/10.1145/2145816.2145848), over processes.
//
// What it costs is fairness. The order of arrival holds between places and
// within a Client, and no longer between callers of several Clients; shares are
// equal between Clients, not between callers. Each place before that of a
// caller's Client, of which every other Client has one at most, is good for N
// holds, also of callers who came later. So of P Clients the others have the
// key (P−1)·N times at most before a Client's place is served; a caller with k
// before it in its own Client needs ⌈(k+1)/N⌉ places if their rows are full.
//
// Whoever asks for a fence, another term, no renewal or a max hold has the key
// for one turn on a place, and a row ends 50 ms after the store was last heard
// of the hold. A caller that gives up leaves its place to the next of its
// Client. All else is as without turns, and Clients may differ in N: each
// bounds its own rows.
//
// # Cost
//
// One round trip to take a free key and one to give it back. A contended
// acquisition is two scripts, whatever the number of waiters: one that takes a
// place in the queue, and the release that hands the key over. One more
// confirms a hold that is handed over to a lease WithoutRenewal with a term
// above the window, or when half of a term below the window has passed since
// the last refresh, or where replicas are to have it. The refresh is one script for each Client and key
// that its callers wait for, every third of the window; it also looks whether
// the key is free. If another strategy holds the key, the refresh runs once a
// second, because that strategy's release sends no message. Renewals travel in
// batches.
//
// A Client listens to one channel, on a cluster to one for each slot, over one
// connection to each server. If it cannot listen, because its user may not or
// the server takes no more connections, it is still served in order, and checks
// the key four times a second.
//
// # URL
//
//	fairlock+redis://user:password@host:port/db
//	fairlock+redis-sentinel://user:password@host:port,host:port/master/db
//	fairlock+redis-cluster://user:password@host:port,host:port
//	fairlock+rediss://user:password@host:port/db?ca=/path/to/ca.pem
//	fairlock+unix:///path/to/socket?db=0
//
// and rediss-sentinel and rediss-cluster, with the parameters
//
//	window       how long a place is kept without a sign of life (default 5s)
//	fence_ttl    how long a fence counter outlives its last use (default 720h)
//	turns        how many callers of one Client may have a key in a row (default 1)
//	replicas     how many replicas must confirm a hold and its renewals
//	ca           file of the certificate authorities to trust, in PEM   (rediss…)
//	cert, key    files of this client's certificate and key, in PEM     (rediss…)
//	server_name  name that the servers' certificates must bear          (rediss…)
//	db           number of the database                                 (unix)
//	sentinel_user, sentinel_password  who we are to the sentinels       (…-sentinel)
//
// # Keys
//
// The lock is a hash under the key itself, of token, owner, since (when the
// hold began, in ms) and fence, with the term as its time to live. Whatever
// else is under the key means that it is held, too. Beside it are, in its
// cluster slot,
//
//	hasp:{tag}:queue:key    list of the tokens that wait, in order of arrival
//	hasp:{tag}:entries:key  hash of what each of them wants, and how to tell it
//	hasp:{tag}:alive:key    sorted set of channels, by until when their clients
//	                        are taken for alive
//	hasp:{tag}:fence:key    the fence counter
//
// of which the first three are there while anybody waits, and end by
// themselves when the window of the last waiter has passed. A key of the
// user's that begins with "hasp:{" is kept under hasp:{tag}:lock:key instead.
// The channels are hasp:grant:ID, on a cluster hasp:{tag}:grant:ID, with an ID
// for each Client; a message is token, round, and fence or - for none.
//
// Redis 5 or later.
package fairlock

import (
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// What applies if Options do not say otherwise.
const (
	DefaultWindow   = 5 * time.Second
	DefaultFenceTTL = 30 * 24 * time.Hour
)

// minWindow leaves room for a refresh and its repeat over an ordinary network.
const minWindow = 300 * time.Millisecond

// Options are the settings of a [Driver]. Nil and the zero value mean the
// defaults.
type Options struct {
	// Window is the liveness window: how long a waiter keeps its place in the
	// queue without a word from its process, which gives one every third of
	// it, and the longest term of a key that is handed over, until its first
	// renewal. It is also how long a waiter that was stopped can hold up
	// those behind it. Default 5 s, at least 300 ms.
	Window time.Duration

	// FenceTTL is how long the fence counter of a key is kept after its last
	// fenced hold began. Later fences still grow while the server's clock
	// does. Default 30 days, at least a millisecond.
	FenceTTL time.Duration

	// Turns is how many callers of one Client may have a key in a row, without
	// a call to the Redis between them, on one place in the queue. Above 1 a
	// Client has one place at a time for each key, whose callers stand in line
	// for it in the Client; the package comment says what that costs in
	// fairness. Default 1: every caller has a place of its own.
	Turns int
}

// Driver is a [backend.Waiter] that keeps its locks in one Redis and serves
// waiters in order of arrival.
type Driver struct {
	store    *redisstore.Store
	window   time.Duration
	fenceTTL time.Duration
	turns    int
	id       string // of this client, in the names of its channels
	began    time.Time

	wg    sync.WaitGroup  // what Close waits for
	open  context.Context // ends when Close begins: nothing is repeated any more
	end   context.CancelFunc
	calls context.Context // ends when Close has waited for the calls under way
	cut   context.CancelFunc

	mu      sync.Mutex // guards all below, and the fields of line, ear and waiter that say so; not held across I/O
	closed  bool
	lines   map[string]*line   // by key
	waiters map[string]*waiter // by token
	ears    map[string]*ear    // by channel
	stayed  map[string]*waiter // by token: waiters whose place is kept while no Wait runs
	doubts  map[string]bool    // by token: a Wait got the key, but not all replies; true when it was released
	ready   []*line            // due for a look
}

var (
	_ backend.Waiter    = (*Driver)(nil)
	_ backend.Inspector = (*Driver)(nil)
)

// New returns a Driver over rdb: a server, a cluster, or the master that
// sentinels name, but not a redis.Ring, which moves keys to other servers
// while one is down. The client stays the caller's: its settings are left as
// they are, except that no command of hasp is retried, and Close does not
// close it. New panics if rdb is nil or the options are out of range.
func New(rdb redis.UniversalClient, o *Options) *Driver {
	if rdb == nil {
		panic("fairlock: New: client is nil")
	}
	d, err := newDriver(redisstore.New(rdb), o)
	if err != nil {
		panic("fairlock: New: " + err.Error())
	}
	return d
}

func newDriver(s *redisstore.Store, o *Options) (*Driver, error) {
	d := &Driver{
		store: s, window: DefaultWindow, fenceTTL: DefaultFenceTTL, id: rand.Text(),
		lines: map[string]*line{}, waiters: map[string]*waiter{}, ears: map[string]*ear{}, stayed: map[string]*waiter{},
		doubts: map[string]bool{}, began: time.Now(),
	}
	if o != nil && o.Window != 0 {
		d.window = o.Window
	}
	if o != nil && o.FenceTTL != 0 {
		d.fenceTTL = o.FenceTTL
	}
	if o != nil {
		d.turns = o.Turns
	}
	if d.window < minWindow {
		return nil, fmt.Errorf("%w: window %v is below %v", backend.ErrInvalid, d.window, minWindow)
	}
	if d.fenceTTL < time.Millisecond {
		return nil, fmt.Errorf("%w: fence_ttl %v is below 1ms", backend.ErrInvalid, d.fenceTTL)
	}
	if d.turns < 0 {
		return nil, fmt.Errorf("%w: turns %d is below 1", backend.ErrInvalid, d.turns)
	}
	d.open, d.end = context.WithCancel(context.Background())
	d.calls, d.cut = context.WithCancel(context.Background())
	return d, nil
}

// Traits says that the driver keeps the order of arrival, for so many callers
// on one place as Options say, excludes all who use the same Redis, and gives
// fences. The calls of a driver that was opened by
// URL end promptly, those over a *redis.Client with ContextTimeoutEnabled by
// their deadlines.
func (d *Driver) Traits() backend.Traits {
	return backend.Traits{Ordered: true, Turns: d.turns, Fenced: true, Reach: backend.Network, Ends: d.store.Ends()}
}

// The scripts; each says in its head what it takes and returns.
var (
	//go:embed record.lua
	recordSrc string
	//go:embed pass.lua
	passSrc string
	//go:embed state.lua
	stateSrc string
	//go:embed acquire.lua
	acquireSrc string
	//go:embed enqueue.lua
	enqueueSrc string
	//go:embed look.lua
	lookSrc string
	//go:embed release.lua
	releaseSrc string
	//go:embed break.lua
	breakSrc string
	//go:embed renew.lua
	renewSrc string
	//go:embed inspect.lua
	inspectSrc string

	acquireScript = redisstore.NewHold(recordSrc + passSrc + acquireSrc)
	enqueueScript = redisstore.NewHold(recordSrc + passSrc + stateSrc + enqueueSrc)
	lookScript    = redisstore.NewScript(recordSrc + passSrc + stateSrc + lookSrc)
	releaseScript = redisstore.NewScript(recordSrc + passSrc + releaseSrc)
	breakScript   = redisstore.NewScript(recordSrc + passSrc + breakSrc)
	renewScript   = redisstore.NewHold(renewSrc)
	inspectScript = redisstore.NewScript(inspectSrc)
)

// call is what a script is given that may hand the key over.
func (d *Driver) call(key string, args ...any) redisstore.Call {
	return redisstore.Call{
		Keys: []string{
			redisstore.LockKey(key),
			redisstore.DerivedKey("fence", key),
			redisstore.DerivedKey("queue", key),
			redisstore.DerivedKey("entries", key),
			redisstore.DerivedKey("alive", key),
		},
		Args: append([]any{redisstore.Millis(d.fenceTTL)}, args...),
	}
}

// Acquire takes c.Key if nothing is stored under it and nobody waits for it.
func (d *Driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	reply, err := d.store.Run(ctx, acquireScript, d.call(c.Key, c.Token, c.Owner, redisstore.Millis(c.TTL), flag(c.Fenced)))
	if err != nil {
		return backend.Grant{}, foreign(c.Key, err)
	}
	switch r := array(reply); {
	case r.int(0) == 1 && len(r) == 2:
		if n, err := strconv.ParseUint(r.text(1), 10, 64); err == nil && (n > 0) == c.Fenced {
			return backend.Grant{Fence: n}, nil
		}
	case r.int(0) == 0 && r.int(1) >= -2 && r.isText(2):
		d.goOn(c.Key, r[3:])
		return backend.Grant{}, held(r.int(1), r.text(2))
	case r.int(0) == -1 && len(r) == 1:
		return backend.Grant{}, noFence(c.Key)
	}
	return backend.Grant{}, d.store.Unexpected(reply)
}

// Renew raises the term of each hold to at least its claim's TTL.
func (d *Driver) Renew(ctx context.Context, cs []backend.Claim, done func(i int, g backend.Grant, err error)) {
	calls := make([]redisstore.Call, len(cs))
	for i, c := range cs {
		calls[i] = redisstore.Call{Keys: []string{redisstore.LockKey(c.Key)}, Args: []any{c.Token, redisstore.Millis(c.TTL)}}
	}
	d.store.RunEach(ctx, renewScript, calls, func(i int, reply any, err error) {
		switch {
		case err != nil:
		case reply == int64(0):
			err = backend.ErrLost
		case reply != int64(1):
			err = d.store.Unexpected(reply)
		}
		done(i, backend.Grant{}, err)
	})
}

// Release hands c.Key to the next waiter if c.Token holds it. If c.Token has a
// place in the queue, Release gives that up.
func (d *Driver) Release(ctx context.Context, c backend.Claim) error {
	if w := d.stayedOn(c); w != nil {
		d.part(w)
		if w.doubt {
			d.doubtful(c)
		}
	}
	d.mu.Lock()
	if _, ok := d.doubts[c.Token]; ok {
		d.doubts[c.Token] = true
	}
	d.mu.Unlock()
	return d.release(ctx, c)
}

// release runs the script, which also takes c.Token out of the queue.
func (d *Driver) release(ctx context.Context, c backend.Claim) error {
	reply, err := d.store.Run(ctx, releaseScript, d.call(c.Key, c.Token))
	if err != nil {
		return err
	}
	switch r := array(reply); {
	case r.int(0) == 1 && (len(r) == 1 || len(r) == 4 && r.int(1) == 2):
		d.goOn(c.Key, r[1:])
		return nil
	case r.int(0) == 0 && len(r) == 1:
		return backend.ErrLost
	}
	return d.store.Unexpected(reply)
}

// parts is a script's reply.
type parts []any

func array(reply any) parts {
	r, _ := reply.([]any)
	return r
}

func (r parts) int(i int) int64 {
	if i < len(r) {
		if n, ok := r[i].(int64); ok {
			return n
		}
	}
	return none
}

// none is where a script's reply has no number.
const none = -1 << 62

func (r parts) text(i int) string {
	if i < len(r) {
		s, _ := r[i].(string)
		return s
	}
	return ""
}

func (r parts) isText(i int) bool {
	if i >= len(r) {
		return false
	}
	_, ok := r[i].(string)
	return ok
}

// held is the error of a key that is held, or waited for, with pttl ms left.
func held(pttl int64, owner string) *backend.HeldError {
	e := &backend.HeldError{Owner: owner}
	if pttl >= 0 {
		e.RetryAfter = redisstore.Term(max(pttl, 1))
	}
	return e
}

// noFence is the error of a fence that is not to be had.
func noFence(key string) error {
	return redisstore.NoFence(redisstore.DerivedKey("fence", key))
}

// foreign is err, or if it says that a script found what is no queue, an error
// that tells where: nothing was written then.
func foreign(key string, err error) error {
	if !answered(err) || !strings.Contains(err.Error(), "WRONGTYPE") {
		return err
	}
	return fmt.Errorf("%w: what is stored under one of %q, %q and %q is no queue; whoever put it there must remove it (%v)", backend.ErrInvalid,
		redisstore.DerivedKey("queue", key), redisstore.DerivedKey("entries", key), redisstore.DerivedKey("alive", key), err)
}

// answered reports whether a server has answered, with an error.
func answered(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply)
}

var errClosed = errors.New("fairlock: driver is closed")

func flag(b bool) int {
	if b {
		return 1
	}
	return 0
}

func init() { hasp.Register("fairlock", open) }
