// Package fairlock implements locks on one Redis. The waiters of all processes form one queue,
// first come, first served.
//
// # Guarantees
//
// A key has one holder at a time, as long as the Redis keeps its data and its clock does not step
// by more than backend.Drift. Otherwise, the fence protects the resource. A Redis that fails over
// to a replica may lose its newest writes. If a place in the queue is lost, the waiter takes a new
// one. A lock may also be lost; replicas=N makes that rarer. See docs/redis.md.
//
// The script that releases a key also hands it to the first waiter that can receive it, so other
// callers cannot take it in between, and TryLock does not pass a queue. A waiter keeps its place
// while its process is alive, however long the holder takes. Places and terms depend on the
// server's clock only.
//
// A waiter whose connection is closed is skipped at once, and removed when its window (see below)
// has passed. If more than 500 such waiters are at the head of the queue, the others wait until
// these windows have passed. A waiter that is stopped, or cut off without a closed connection,
// looks alive. The key is handed to the first such waiter, and is unused for a window at most.
// After that the windows of all such waiters have passed.
//
// # Shared holds
//
// Readers and writers stand in one queue. The readers at its head get the key together,
// up to the first writer. A reader that comes while a writer waits queues behind the writer. Readers
// of spinlock and pubsublock may hold the key together with readers of fairlock.
//
// # Cost
//
// It takes one round trip to lock a free key, one to find that a key is held, and one to unlock. A
// contended acquisition takes two scripts, however many callers wait: one takes a place in the
// queue, and the holder's release hands the key over. A third script confirms the hold in three
// cases: the lease is WithoutRenewal and its term is above the window; the term is below the window
// and half of it has passed since the last poll; or replicas must confirm the hold.
//
// While callers wait for a key, their Client polls it every third of the window. One script keeps
// their places alive and checks whether the key is free. A key that another strategy holds is
// polled once a second, because that strategy's release sends no message. Renewals travel in
// batches. hasp.Client.List scans the names of all keys of the Redis: see docs/redis.md.
//
// A Client subscribes to one channel, on a cluster to one for each slot, over one
// more connection to each server. If it cannot subscribe, it polls four times a
// second, and is still served in order.
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
// A lock is a string under the key itself. It has a mark, and the start, token, fence, term and
// owner of the hold. Its time to live is the term. If hasp.WithMinHold keeps the key after an
// Unlock, the token begins with kept-, and a message asks the first waiter to look for the new end.
// A key with any other value counts as held. The record of shared holds is a sorted set under the
// key itself. It has a member token#owner for each holder, with the end of the holder's term as
// score. In the same cluster slot are
//
//	hasp:{tag}:queue:key     list of the waiters, in order of arrival
//	hasp:{tag}:timeouts:key  sorted set of their tokens, by when their places end
//	hasp:{tag}:fence:key     the fence counter
//
// The first two exist while callers wait. A user's key that begins with "hasp:{" is stored under
// hasp:{tag}:lock:key instead. The channels are hasp:grant:ID, on a cluster
// hasp:{tag}:grant:ID, with an ID for each Client.
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

// minWindow leaves room for a poll and its repeat over an ordinary network.
const minWindow = 300 * time.Millisecond

// Options are the settings of [New]. Nil and the zero value mean the defaults.
type Options struct {
	// Client has the options of the Client that New returns. NewDriver ignores it.
	Client hasp.Options

	// Window is how long a waiter keeps its place in the queue without a poll. Its process polls
	// every third of Window. A hand-over grants the key for Window at most, and the first renewal
	// raises the term. So Window is also how long stopped waiters can delay the others. The default
	// is 5 s, the minimum 300 ms.
	Window time.Duration

	// FenceTTL is how long the fence counter of a key is kept after its last
	// fenced hold began. When the counter is gone, fences still grow as long as the server's clock
	// advances. The default is 30 days, the minimum is a millisecond.
	FenceTTL time.Duration
}

// driver is a [backend.Waiter] that stores its locks in one Redis and serves
// waiters in order of arrival.
type driver struct {
	store    *redisstore.Store
	window   time.Duration // Options.Window
	fenceTTL string        // Options.FenceTTL in ms
	id       string        // of this driver, in the names of its channels

	open       context.Context // ends when Close begins: no call is repeated after that
	shut       context.CancelFunc
	calls      context.Context // ends when Close no longer waits for calls in flight
	cancel     context.CancelFunc
	background sync.WaitGroup // counts the activities that Close waits for

	// mu guards all below, and the fields of group, subscription and waiter
	// that say so. It is not held during a call to Redis.
	mu            sync.Mutex
	groups        map[string]*group        // by key
	waiters       map[string]*waiter       // by token
	subscriptions map[string]*subscription // by channel
}

var (
	_ backend.Waiter    = (*driver)(nil)
	_ backend.Inspector = (*driver)(nil)
	_ backend.Lister    = (*driver)(nil)
	_ backend.Recaller  = (*driver)(nil)
)

// New returns a Client whose locks are in the Redis of rdb, a client of one server, of a cluster,
// or of the master that sentinels name. A redis.Ring does not fit, because it moves keys to other
// servers while one is down. rdb remains the caller's: its settings stay as they are, except that
// hasp's commands are not retried, and Close does not close it. If rdb is nil or o is out of range,
// the error is hasp.ErrInvalid.
func New(rdb redis.UniversalClient, o *Options) (*hasp.Client, error) {
	o = cmp.Or(o, &Options{})
	d, err := NewDriver(rdb, o)
	if err != nil {
		return nil, err
	}
	return hasp.New(d, &o.Client)
}

// NewDriver returns the driver of New alone, for the conformance suite or for a wrapper that is
// passed to [hasp.New].
func NewDriver(rdb redis.UniversalClient, o *Options) (backend.Driver, error) {
	if rdb == nil {
		return nil, fmt.Errorf("fairlock: %w: client is nil", hasp.ErrInvalid)
	}
	d, err := newDriver(redisstore.New(rdb), o)
	if err != nil {
		return nil, fmt.Errorf("fairlock: %w", err)
	}
	return d, nil
}

// open opens this strategy.
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

	// Check options above this line, because newDriver does not close s if it refuses an option.
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

// Traits describes the driver. Calls of a driver that was opened by URL end promptly. Calls
// over a *redis.Client with ContextTimeoutEnabled end at their deadlines.
func (d *driver) Traits() backend.Traits {
	return backend.Traits{Ordered: true, Fenced: true, MinHold: true, Shared: true, Reach: backend.Network, Cancellation: d.store.Cancellation()}
}

// closing is how long Close waits for calls in flight. After it has cancelled
// them, it waits as long again.
const closing = time.Second

// Close ends all waits and the driver's background work. If the driver was opened
// by URL, it closes the connections too.
func (d *driver) Close() error {
	// After shut, begin refuses new activities. Only activities that have begun may add more, so
	// Wait below covers all.
	d.mu.Lock()
	d.shut()
	for _, g := range d.groups {
		g.stopLocked()
	}
	d.mu.Unlock()

	// If a call outlasts both waits below, this goroutine ends with that call.
	done := make(chan struct{})
	go func() {
		d.background.Wait()
		close(done)
	}()
	within := func() {
		select {
		case <-done:
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

// begin counts a new activity. Close waits until the activity calls background.Done.
// begin returns false once Close has begun.
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
