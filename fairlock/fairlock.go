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
// window has passed. If more than 500 skipped waiters are at the head of the queue, the others wait
// until the windows of these waiters have passed. A waiter that is stopped, or cut off while its
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
// batches. hasp.Client.List scans the names of all keys of the Redis: see docs/redis.md. Inspect
// and List name the first 1,000 waiters of a key.
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
//	hasp:{tag}:mixed:key     exists for 2 s after another program's record was met: see docs/redis.md
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
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/redisstore"
)

// Read the files in this order: this one, wait.go, waiters.go, poll.go, subscribe.go, life.go. The
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
	store   *redisstore.Store
	scripts *runner
	life    *life
	waiters *waiters
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

// open opens the driver for hasp.Open. If a parameter is wrong, the error is ErrInvalid.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	var o Options
	if text, ok := c.Params["window"]; ok {
		window, err := clock.ParseDuration(text)
		if err != nil || window < minWindow {
			return nil, fmt.Errorf("%w: parameter window=%q: want a duration of at least %v, "+
				"such as 5s",
				backend.ErrInvalid, text, minWindow)
		}
		o.Window = window
	}

	var err error
	if o.FenceTTL, err = redisstore.FenceTTL(c.Params); err != nil {
		return nil, err
	}

	// All options are checked by now, so newDriver below does not fail. If it did, s would stay
	// open.
	s, err := redisstore.OpenOne(ctx, "fairlock", c.Nodes, c.Params)
	if err != nil {
		return nil, err
	}
	return newDriver(s, &o)
}

// newDriver returns a driver on s. If o is out of range, the error is ErrInvalid, and s stays open.
func newDriver(s *redisstore.Store, o *Options) (*driver, error) {
	o = cmp.Or(o, &Options{})
	window := cmp.Or(o.Window, defaultWindow)
	if window < minWindow {
		return nil, fmt.Errorf("%w: window %v is below %v", backend.ErrInvalid, window, minWindow)
	}
	ttl, err := redisstore.CheckFenceTTL(o.FenceTTL)
	if err != nil {
		return nil, err
	}

	r := &runner{store: s, fenceTTL: redisstore.Millis(ttl)}
	l := newLife()
	return &driver{store: s, scripts: r, life: l, waiters: newWaiters(r, l, window)}, nil
}

// Traits describes the driver.
func (d *driver) Traits() backend.Traits {
	return backend.Traits{
		Ordered: true, Fenced: true, MinHold: true, Shared: true,
		Reach: backend.Network, Cancellation: backend.CancelPrompt,
	}
}

// Acquire takes c.Key if nothing is stored under it and no living caller waits for it. A shared
// claim may also join a shared hold.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	reply, err := d.scripts.run(ctx, acquireScript, c.Key, c.Token, c.Owner,
		redisstore.Millis(c.TTL), flags(c))
	if err != nil {
		return backend.Grant{}, noQueue(c.Key, err)
	}
	return d.store.Granted(reply, c)
}

// Renew raises the term of each hold to at least its claim's TTL.
func (d *driver) Renew(ctx context.Context, cs []backend.Claim,
	done func(i int, g backend.Grant, err error)) {
	d.store.Renew(ctx, renewScript, cs, "", done)
}

// Wait takes a place in the queue and returns when the key is handed over.
func (d *driver) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if err := ctx.Err(); err != nil {
		return backend.Grant{}, err
	}
	if !d.life.begin() {
		return backend.Grant{}, errClosed
	}
	defer d.life.end()

	w := d.waiters.newWaiter(c)
	g, err := w.wait(ctx)
	d.waiters.leave(w) // ends its polls, but not its place in the store

	switch {
	case err == nil && w.unanswered:
		// An unanswered enqueue may arrive after the Release of this hold. So tell Release the time
		// after which it cannot arrive any more.
		g.Handle = time.Now().Add(c.Timeout)
	case errors.Is(err, backend.ErrHeld):
		// Hide that the error is definite, because the place is still in the queue. With ctx's
		// error the outcome is unknown, so the engine releases the token, which removes the place.
		err = errors.Join(err, ctx.Err())
	case errors.Is(err, backend.ErrInvalid) && w.unanswered:
		// Keep only the text, because ErrInvalid is definite. An earlier enqueue may have taken a
		// place, so the outcome is unknown, as above.
		err = errors.New(err.Error())
	}

	return g, err
}

// Release hands c.Key to the next waiter if c.Token holds it. If c.Token has a place in the queue,
// Release gives up that place. A c.KeepUntil delays the hand-over until that time.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	// With a Handle, an enqueue of the token may arrive after this release, and take a new place
	// (see Wait). So repeat the release when no enqueue can arrive any more.
	if late, ok := c.Handle.(time.Time); ok && time.Until(late) > 0 {
		time.AfterFunc(time.Until(late), func() {
			if !d.life.begin() {
				return
			}
			defer d.life.end()

			// Use the driver's context, because the caller's context may have ended.
			ctx, cancel := context.WithTimeout(d.life.calls, c.Timeout)
			defer cancel()
			_ = d.Release(ctx, c) // if this fails, the new place ends with its window
		})
	}

	token := c.Token
	if c.Shared {
		token += redisstore.Mark + c.Owner // the member of the shared record
	}
	return d.store.Owned(d.scripts.run(ctx, releaseScript, c.Key, token,
		redisstore.Rest(c.KeepUntil)))
}

// Inspect returns the holder or the shared holders of key, the start of the hold, and the first
// waiters in order. If the holder uses another strategy, Owner and Since are zero.
func (d *driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	reply, err := d.store.Run(ctx, inspectScript, reportOn(key))
	if err != nil {
		return backend.Status{}, err
	}

	s, _, ok := statusOf(reply)
	if !ok {
		return backend.Status{}, d.store.Unexpected(reply)
	}
	return s, nil
}

// List returns the keys with a record of fairlock, with shared holds, or with waiters. If another
// strategy or program holds a key with waiters, the entry has no Owner.
func (d *driver) List(ctx context.Context, prefix string,
	timeout time.Duration) iter.Seq2[backend.Entry, error] {
	return d.store.ListBy(ctx, prefix, timeout, redisstore.Reading{
		Listing: records,
		Script:  inspectScript,
		Call:    func(c redisstore.Candidate) redisstore.Call { return reportOn(c.Key) },
		// The second result says whether the key is listed.
		Status: func(c redisstore.Candidate, reply any) (backend.Status, bool, error) {
			s, own, ok := statusOf(reply)
			if !ok {
				return backend.Status{}, false, d.store.Unexpected(reply)
			}
			if c.Queued {
				// The scan has found the queue of the key. If the record is own, the scan finds it
				// as well, and that lists the key.
				return s, !own && len(s.Waiters) > 0, nil
			}
			return s, own, nil
		},
	})
}

// Break removes whatever is stored under key, and hands the key to the next waiter.
func (d *driver) Break(ctx context.Context, key string) error {
	// Ignore the reply, because the hold is gone in any case.
	_, err := d.scripts.run(ctx, breakScript, key)
	return err
}

var errClosed = errors.New("fairlock: driver is closed")

// Close ends all waits and the driver's background work, and waits at most 2 s for the calls in
// flight. If the driver was opened by URL, it also closes the connections.
func (d *driver) Close() error {
	d.life.close()
	d.waiters.stop()
	return d.life.drain(d.store.Close)
}

func init() {
	hasp.Register("fairlock", open,
		append(slices.Clone(redisstore.Params), "window", "fence_ttl")...)
}
