// Package fairlock implements locks on one Redis. The waiters of all processes form one queue,
// first come, first served.
//
// # Guarantees
//
// A key has at most one holder at a time, as long as the Redis keeps its data and its clock does
// not step by more than backend.Drift. Otherwise, only the fence protects the resource. A Redis
// that fails over to a replica may lose its newest writes. If a place in the queue is lost, the
// waiter takes a new one. A lock may also be lost, but replicas=N makes that rarer. See
// docs/redis.md.
//
// The script that releases a key also hands the key to the first waiter that can receive it. So no
// other caller can take the key in between, and TryLock does not overtake the queue. A waiter keeps
// its place while its process is alive, however long the key is held. But if the Redis hangs for
// more than two thirds of the window (see below), waiters may lose their places, and take new ones
// in any order. Places and terms depend only on the server's clock.
//
// A waiter whose connection is closed is skipped at once, also by TryLock, and removed when its
// window has passed. If more than 500 skipped waiters are at the head of the queue, the others wait until
// the windows of these waiters have passed. A waiter that is stopped, or cut off while its
// connection stays open, looks alive. The key is handed to the first such waiter, and is unused for
// at most one window. After that, the windows of the other such waiters have passed as well.
//
// # Shared holds
//
// Readers and writers stand in one queue. The readers at the head of the queue receive the key
// together, up to the first writer. A reader that arrives while a writer waits is queued behind the
// writer. Readers of spinlock and pubsublock may hold the key together with readers of fairlock.
//
// # Cost
//
// It takes one round trip to lock a free key, one to find that a key is held, and one to unlock. A
// contended acquisition takes two scripts, however many callers wait. One takes a place in the
// queue, and the other is the release that hands the key over. A third script confirms the hold in
// three cases: the lease is WithoutRenewal and its term is above the window; the term is below the
// window and half of the term has passed since the last poll; or replicas must confirm the hold.
//
// While callers wait for a key, their Client polls the key every third of the window. One script
// keeps their places alive and checks whether the key is free. A key that another strategy holds is
// polled once a second, because that strategy's release sends no message. Renewals are sent in
// batches. hasp.Client.List scans the names of all keys of the Redis: see docs/redis.md. Inspect and
// List name the first 1,000 waiters of a key.
//
// A Client subscribes to one channel, or on a cluster to one for each slot, over one extra
// connection to each server. If it cannot subscribe, it polls four times a second, and its waiters
// are still served in order.
//
// # URL
//
//	fairlock+redis://user:password@host:port/db
//
// with the parameters
//
//	window     how long a place in the queue is kept without a poll (default 5s)
//	fence_ttl  how long a fence counter is kept after its last use (default 720h)
//
// docs/redis.md has the URLs of sentinels, of a cluster, with TLS and of a socket, and the
// parameters that all strategies on Redis have, such as replicas and allow_eviction.
//
// # Keys
//
// A lock is a string under the key itself. It contains a mark that says whether callers may wait,
// and the start, token, fence, term and owner of the hold. Its time to live is the term. If
// hasp.WithMinHold keeps the key after an Unlock, the token begins with kept-, and a message tells
// the first waiter's Client to look up the new end. A key with any other value counts as held. The
// record of shared holds is a sorted set under the key itself. It contains a member token#owner for
// each holder, whose score is the end of the holder's term. In the same cluster slot are
//
//	hasp:{tag}:queue:key     the list of the waiters, in order of arrival
//	hasp:{tag}:timeouts:key  the sorted set of the waiters' tokens; a score is the end of a place
//	hasp:{tag}:fence:key     the fence counter
//
// The first two keys exist only while callers wait. A user's key that begins with "hasp:{" is
// stored under hasp:{tag}:lock:key instead. The channels are hasp:grant:ID, or on a cluster
// hasp:{tag}:grant:ID, where each Client has an ID of its own.
//
// The driver needs Redis 6.2 or later.
package fairlock

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// Read the files in this order: this one, hold.go, wait.go, poll.go, handover.go, subscribe.go. The
// scripts describe the record and the queue. docs/fairlock.md says why the protocol is safe.

// defaultWindow is the default of [Options.Window].
const defaultWindow = 5 * time.Second

// minWindow is the shortest window. It leaves time for a poll and its repeat over most networks.
const minWindow = 300 * time.Millisecond

// Options are the settings of [New]. Nil and the zero value mean the defaults.
type Options struct {
	// Client contains the options of the hasp.Client that New returns. NewDriver ignores them.
	Client hasp.Options

	// Window is how long a waiter keeps its place in the queue without a poll. The waiter's process
	// polls three times in each Window. A hand-over grants the key for at most Window, and the
	// first renewal raises the term. So stopped waiters delay the others for at most Window. The
	// default is 5 s, and the minimum is 300 ms.
	Window time.Duration

	// FenceTTL is how long a key's fence counter is kept after the key's last fenced hold began.
	// When the counter is gone, fences still grow as long as the server's clock advances. The
	// default is 30 days, and the minimum is a millisecond.
	FenceTTL time.Duration
}

// driver is a [backend.Waiter] that stores its locks in one Redis and serves
// waiters in order of arrival.
type driver struct {
	store    *redisstore.Store
	window   time.Duration // Options.Window
	fenceTTL string        // Options.FenceTTL in ms
	id       string        // part of the names of this driver's channels

	open       context.Context // ends when Close begins; no call is repeated after that
	shut       context.CancelFunc
	calls      context.Context // ends when Close cancels the calls that are still in flight
	cancel     context.CancelFunc
	background sync.WaitGroup // counts the activities that Close waits for

	// mu guards the fields below, and the fields of group, subscription and waiter whose comments
	// say so. It is not held during a call to Redis.
	mu            sync.Mutex
	groups        map[string]*group        // by key
	waiters       map[string]*waiter       // by token
	subscriptions map[string]*subscription // by channel
}

var (
	_ backend.Waiter    = (*driver)(nil)
	_ backend.Inspector = (*driver)(nil)
	_ backend.Lister    = (*driver)(nil)
)

// New returns a Client that keeps its locks in the Redis of rdb. rdb is a client of one server, of
// a cluster, or of the master that sentinels name. It must not be a redis.Ring, which moves keys to
// other servers while one is down. Close does not close rdb; call it before rdb.Close, because it
// still releases keys. The settings of rdb apply to pipelines of hasp's commands, which are not
// retried: see docs/redis.md. If rdb is nil or a redis.Ring, or o is out of range, the error is
// hasp.ErrInvalid. A server that [hasp.Open] would refuse is refused by the first call to it.
func New(rdb redis.UniversalClient, o *Options) (*hasp.Client, error) {
	o = cmp.Or(o, &Options{})
	d, err := NewDriver(rdb, o)
	if err != nil {
		return nil, err
	}
	return hasp.New(d, &o.Client)
}

// NewDriver returns the driver that New uses. It is for the conformance suite, and for wrappers
// that are passed to [hasp.New].
func NewDriver(rdb redis.UniversalClient, o *Options) (backend.Driver, error) {
	return redisstore.NewDriver("fairlock", rdb, o, newDriver)
}

// open opens the driver for hasp.Open.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	var o Options
	if text, ok := c.Params["window"]; ok {
		window, err := time.ParseDuration(text)
		if err != nil || window < minWindow {
			return nil, fmt.Errorf("%w: parameter window=%q: want a duration of at least %v, such as 5s", backend.ErrInvalid, text, minWindow)
		}
		o.Window = window
	}

	var err error
	if o.FenceTTL, err = redisstore.FenceTTL(c.Params); err != nil {
		return nil, err
	}

	// Check options before the store is opened, because newDriver does not close s on an error.
	s, err := redisstore.OpenOne(ctx, "fairlock", c.Nodes, c.Params)
	if err != nil {
		return nil, err
	}
	return newDriver(s, &o)
}

func newDriver(s *redisstore.Store, o *Options) (*driver, error) {
	d := &driver{
		store: s, id: rand.Text(),
		groups: map[string]*group{}, waiters: map[string]*waiter{}, subscriptions: map[string]*subscription{},
	}

	o = cmp.Or(o, &Options{})
	d.window = cmp.Or(o.Window, defaultWindow)
	if d.window < minWindow {
		return nil, fmt.Errorf("%w: window %v is below %v", backend.ErrInvalid, d.window, minWindow)
	}

	ttl, err := redisstore.CheckFenceTTL(o.FenceTTL)
	if err != nil {
		return nil, err
	}
	d.fenceTTL = redisstore.Millis(ttl)

	d.open, d.shut = context.WithCancel(context.Background())
	d.calls, d.cancel = context.WithCancel(context.Background())
	return d, nil
}

// Traits describes the driver.
func (d *driver) Traits() backend.Traits {
	return backend.Traits{Ordered: true, Fenced: true, MinHold: true, Shared: true, Reach: backend.Network, Cancellation: backend.CancelPrompt}
}

// closing is how long Close waits for calls in flight. After Close has cancelled these calls, it
// waits for the same time again.
const closing = time.Second

// Close ends all waits and the driver's background work. If the driver was opened
// by URL, it closes the connections too.
func (d *driver) Close() error {
	// After the call of d.shut, no activity can begin, so background.Wait covers all activities.
	d.mu.Lock()
	d.shut()
	for _, g := range d.groups {
		g.stopLocked()
	}
	d.mu.Unlock()

	// If a call outlasts both waits below, this goroutine ends with that call.
	done, end := context.WithCancel(context.Background())
	go func() { d.background.Wait(); end() }()
	within := func() {
		select {
		case <-done.Done():
		case <-time.After(closing):
		}
	}

	// Give calls time to end by themselves, because a cancelled call has an unknown outcome.
	within()
	d.cancel()
	err := d.store.Close()
	within()

	return err
}

var errClosed = errors.New("fairlock: driver is closed")

// begin counts a new activity. Close waits until the activity calls background.Done. The result is
// false once Close has begun.
func (d *driver) begin() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.beginLocked()
}

func (d *driver) beginLocked() bool {
	if d.open.Err() != nil {
		return false
	}
	d.background.Add(1)
	return true
}

func init() {
	hasp.Register("fairlock", open, append(slices.Clone(redisstore.Params), "window", "fence_ttl")...)
}
