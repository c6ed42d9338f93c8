// Package pubsublock implements locks on one Redis whose releases are published to the waiters.
// Services in Java can share these locks, because Redisson's RLock works in the same way.
//
// # Guarantees
//
// A key has one holder at a time, as long as the Redis keeps its data and its clock does not step
// by more than backend.Drift. If this fails, only the fence protects the resource. Waiters of
// different processes get the key in no particular order. A Redis that fails over to a replica may
// lose its newest writes, and with them a lock. replicas=N makes this rarer. See docs/redis.md.
//
// A release wakes the waiters. Waiters also try once a second, and when the holder's term ends.
// Therefore, if a message is lost or not sent, or if a connection is half-open, the waiters notice
// the free key within a second. Until then, other programs that poll more often may take the key.
//
// # Cost
//
// It takes one round trip to lock a free key, one to find that a key is held, and one to unlock. A
// Client uses one more connection to each server for all its subscriptions. It subscribes to the
// channel of a key once, and stays subscribed while callers wait for the key. After a release, each
// waiting Client makes one attempt for its exclusive callers, and one for each shared caller.
// Renewals travel in batches. hasp.Client.List scans the names of all keys of the Redis: see
// docs/redis.md.
//
// # URL
//
//	pubsublock+redis://user:password@host:port/db
//
// with the parameters
//
//	channel    the prefix of the channels' names (default redisson_lock__channel)
//	fence_ttl  how long a fence counter is kept after its last use (default 720h)
//
// docs/redis.md has the URLs of sentinels, of a cluster, with TLS and of a socket, and the
// parameters that all strategies on Redis have, such as replicas and allow_eviction.
//
// # Keys and channels
//
// A lock is a hash under the key itself, and its time to live is the term. It has one field,
// token#owner, with the value 1. If hasp.WithMinHold keeps the key after an Unlock, the field is
// kept-token#owner. An RLock is stored in the same way: its field is id:thread, and its value
// counts re-entries. A key with any other value counts as held.
//
// A release publishes 0 to redisson_lock__channel:{key}, even if it keeps the key. If the key
// contains an opening brace, the name has no braces around the key. On a cluster of Redis 7 or
// later the channel is sharded, as Redisson's is. If braces in the key would put that channel into
// another slot than the key, the channel is hasp:{tag}:channel:key. If the Redis user may not
// publish, the key is freed without a message. If the user may not subscribe, waiters poll.
//
// A shared lock is the sorted set that package spinlock describes, so readers with either strategy
// share a key. Redisson receives WRONGTYPE for a shared lock, which is an exception instead of
// "held". Only the release of the last holder is published.
//
// A writer that waits for readers stores an intent for 3 seconds: the string hasp:{tag}:intent:key,
// whose value is the writer's token. The intent works like the intent of spinlock, except that a
// writer that gives up removes the intent and publishes 0, so that the readers try at once.
//
// A fence counter is a string under hasp:{tag}:fence:key. The tag puts it into the cluster slot of
// the key. A user's key that begins with "hasp:{" is stored under hasp:{tag}:lock:key instead.
//
// The driver needs Redis 6.2 or later.
package pubsublock

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/slot"
)

// defaultChannel is the default of [Options.Channel].
const defaultChannel = "redisson_lock__channel"

// Options are the settings of [New]. Nil and the zero value mean the defaults.
type Options struct {
	// Client has the options of the Client that New returns. NewDriver ignores it.
	Client hasp.Options

	// Channel is the prefix of every channel's name; a colon and the key follow. All clients that
	// share a lock must use the same prefix. It must not contain an opening brace. The default is
	// redisson_lock__channel, which is Redisson's.
	Channel string

	// FenceTTL is how long the fence counter of a key is kept after its last fenced hold began.
	// When the counter is gone, fences still grow as long as the server's clock advances. The
	// default is 30 days, the minimum is a millisecond.
	FenceTTL time.Duration
}

// driver is a [backend.Driver] that stores its locks in one Redis.
type driver struct {
	store    *redisstore.Store
	channel  string // the prefix of the channels' names
	fenceTTL string // Options.FenceTTL in ms

	// crowds holds, for each key, how many connections received the message when this driver last
	// released the key. One of these connections is probably this driver's own. The driver lets the
	// Clients at the other connections take the key first.
	crowds memory[int]

	// intents holds the keys at which this driver may have stored an intent.
	intents memory[struct{}]
}

var (
	_ backend.Waker     = (*driver)(nil)
	_ backend.Inspector = (*driver)(nil)
	_ backend.Lister    = (*driver)(nil)
)

// New returns a Client whose locks are in the Redis of rdb. rdb is a client of one server, of a
// cluster, or of the master that sentinels name. It must not be a redis.Ring, which moves keys to
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

// NewDriver returns only the driver that New would use. It is for the conformance suite, or for a
// wrapper that is passed to [hasp.New].
func NewDriver(rdb redis.UniversalClient, o *Options) (backend.Driver, error) {
	return redisstore.NewDriver("pubsublock", rdb, o, newDriver)
}

// The function open makes the driver for hasp.Open.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	o := Options{Channel: c.Params["channel"]}
	var err error
	if o.FenceTTL, err = redisstore.FenceTTL(c.Params); err != nil {
		return nil, err
	}
	// Check the options before OpenOne calls the servers.
	if _, err := newDriver(nil, &o); err != nil {
		return nil, err
	}

	s, err := redisstore.OpenOne(ctx, "pubsublock", c.Nodes, c.Params)
	if err != nil {
		return nil, err
	}
	return newDriver(s, &o)
}

// newDriver returns a driver that uses s. If an option is out of range, it returns an error.
func newDriver(s *redisstore.Store, o *Options) (*driver, error) {
	o = cmp.Or(o, &Options{})

	d := &driver{store: s, channel: cmp.Or(o.Channel, defaultChannel)}
	if strings.Contains(d.channel, "{") {
		return nil, fmt.Errorf("%w: channel %q has an opening brace, which would decide the "+
			"cluster slot in place of the key", backend.ErrInvalid, d.channel)
	}

	ttl, err := redisstore.CheckFenceTTL(o.FenceTTL)
	d.fenceTTL = redisstore.Millis(ttl)
	return d, err
}

// Traits describes the driver.
func (d *driver) Traits() backend.Traits {
	return backend.Traits{
		Fenced: true, MinHold: true, Shared: true,
		Reach: backend.Network, Cancellation: backend.CancelPrompt,
	}
}

// Close closes the connections of the subscriptions. If the driver was opened by URL, Close closes
// all other connections as well.
func (d *driver) Close() error { return d.store.Close() }

// scripts has the scripts. The header of each one describes its arguments and replies.
//
//go:embed *.lua
var scripts embed.FS

var (
	acquireScript = redisstore.NewHold(redisstore.Source(scripts, "acquire"))
	renewScript   = redisstore.NewHold(redisstore.Source(scripts, "renew"))
	releaseScript = redisstore.NewScript(redisstore.Source(scripts, "release"))
	inspectScript = redisstore.NewScript(redisstore.Source(scripts, "inspect"))
)

// Acquire takes c.Key if nothing is stored under it. A shared claim also takes a key that readers
// hold, unless there is an intent. If the claim is a writer that waits for readers, Acquire stores
// an intent. At the first refusal by readers, Acquire needs a second command.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if c.Shared {
		return d.store.AcquireShared(ctx, c, d.fenceTTL)
	}

	_, withIntent := d.intents.get(c.Key, intendsFor)
	g, err := d.ask(ctx, c, withIntent)
	var held *backend.HeldError
	if errors.As(err, &held) && held.Shared && c.WillRetry {
		// Record the key before the intent is sent, so that a release removes the intent even if
		// the reply is lost.
		d.intents.note(c.Key, struct{}{})
		if !withIntent {
			withIntent = true
			g, err = d.ask(ctx, c, true) // after a definite refusal, the token may be sent again
		}
	}

	if withIntent && redis.HasErrorPrefix(err, "NOPERM") {
		// Try again without an intent, which this user may not store. Readers may then come first.
		d.intents.forget(c.Key)
		withIntent = false
		g, err = d.ask(ctx, c, false)
	}

	if err == nil && withIntent {
		d.intents.forget(c.Key) // the script took the key and removed the intent
	}
	return g, err
}

// ask makes one attempt of a claim that is not shared. If withIntent is true, readers have refused
// this driver at the key before, and the script also receives the intent's key. If readers hold the
// key, the script then stores the intent for a claim that will retry. If the script takes the key,
// it removes the intent.
func (d *driver) ask(ctx context.Context, c backend.Claim, withIntent bool) (backend.Grant, error) {
	call := redisstore.Call{
		Keys: []string{redisstore.LockKey(c.Key)},
		Args: []string{c.Token + redisstore.Mark + c.Owner, redisstore.Millis(c.TTL), ""},
	}

	if c.Fenced {
		call.Keys = append(call.Keys, redisstore.DerivedKey("fence", c.Key))
		call.Args[2] = d.fenceTTL
	}

	if withIntent {
		call.Keys = append(call.Keys, redisstore.IntentKey(c.Key))
		term := "0" // store no intent, and only remove one
		if c.WillRetry {
			term = redisstore.Millis(intentTTL)
		}
		call.Args = append(call.Args, c.Token, term)
	}

	reply, err := d.store.Run(ctx, acquireScript, call)
	if err != nil {
		return backend.Grant{}, err
	}
	g, err := d.store.Granted(reply, c)
	if found, ok := redisstore.Refusal(reply); ok && found.Record != "" {
		// The value is a hash with one field, as Redisson stores it, so the release wakes the
		// waiters. Then err is a HeldError, which must not say that the holder is foreign.
		err.(*backend.HeldError).Foreign = false
	}
	return g, err
}

// Renew raises the term of each hold to at least its claim's TTL.
func (d *driver) Renew(ctx context.Context, cs []backend.Claim,
	done func(i int, g backend.Grant, err error)) {
	d.store.Renew(ctx, renewScript, cs, redisstore.Mark, done)
}

// Release removes the record of c.Token and wakes the waiters. With c.KeepUntil it replaces the
// token in the record, and the record then expires at that time. From a shared record it removes
// the member of c.Token, and wakes the waiters if that was the last member.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	name, publish := d.channelOf(ctx, c.Key)
	if c.Shared {
		return d.store.ReleaseShared(ctx, c, "0", name, publish)
	}

	rest := redisstore.Rest(c.KeepUntil)
	keys := []string{redisstore.LockKey(c.Key)}
	if _, ok := d.intents.get(c.Key, intendsFor); ok {
		keys = append(keys, redisstore.IntentKey(c.Key)) // the script removes an intent of c.Token
	}
	reply, err := d.store.Run(ctx, releaseScript, redisstore.Call{
		Keys: keys,
		Args: []string{c.Token + redisstore.Mark, c.Owner, rest, name, publish},
	})

	// Return no error if the message has reached no waiter, because waiters retry within a second.
	if owned, ok := reply.(int64); ok && owned > 0 {
		reached := int(owned - 2) // how many connections; below 0 if no message was sent
		switch {
		case reached > maxAlone && rest == "": // others wait for the key, and it is free now
			d.crowds.note(c.Key, reached)
		case reached == 0 && c.Unheard != nil:
			c.Unheard.Store(true)
		}
		return nil
	}

	return d.store.Owned(reply, err)
}

// Listen subscribes to the channel on which releases of c.Key are published. If the connection is
// lost, callers are woken when the subscription is confirmed again.
func (d *driver) Listen(ctx context.Context,
	c backend.Claim) (wake <-chan struct{}, stop func(), err error) {
	l := &listening{wake: make(chan struct{}, 1), woken: time.Now()}

	// After a release by this driver, let the other Clients take the key first. Readers share the
	// key and take no turns.
	if clients, ok := d.crowds.get(c.Key, crowdFor); ok && !c.Shared {
		l.ahead = clients - 1  // without this driver's own connection
		d.crowds.forget(c.Key) // the count delays only one caller
	}

	channel, _ := d.channelOf(ctx, c.Key)
	s, err := d.store.Listen(ctx, channel, redisstore.LockKey(c.Key), l.published)
	if err != nil {
		return nil, nil, err
	}

	// a message that is held back may signal the channel even after a call of stop
	return l.wake, s.Close, nil
}

// Inspect returns the holder of key. The driver records neither Since nor the waiters. A holder
// that does not use hasp has no Owner.
func (d *driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	return d.store.Inspect(ctx, inspectScript, key)
}

// The variable records says how List finds the holds.
var records = redisstore.Listing{
	Type: "hash",
	Peek: []string{"hlen"},
	Ours: func(fields any) bool { return fields == int64(1) },
}

// List returns the keys with a record of pubsublock, or with shared holds, but not those of
// Redisson.
func (d *driver) List(ctx context.Context, prefix string,
	timeout time.Duration) iter.Seq2[backend.Entry, error] {
	return d.store.List(ctx, prefix, timeout, records, inspectScript)
}

// Break removes whatever is stored under key. If there was something, it wakes the waiters.
func (d *driver) Break(ctx context.Context, key string) error {
	lock := redisstore.LockKey(key)
	removed, err := d.store.Do(ctx, "unlink", lock) // a value of any type
	if removed == int64(1) {
		// If this user may not publish, or the message is lost, waiters retry within a second.
		name, publish := d.channelOf(ctx, key)
		_, _ = d.store.Send(ctx, lock, false, publish, name, "0")
	}
	return err
}

// channelOf returns the channel on which a release of key is published, and the
// command that publishes it.
func (d *driver) channelOf(ctx context.Context, key string) (name, publish string) {
	// If the server does not answer, Sharded guesses, and the message may be lost.
	if d.store.Sharded(ctx, redisstore.LockKey(key)) {
		return channel(d.channel, key, true), "spublish"
	}
	return channel(d.channel, key, false), "publish"
}

// channel returns the name that Redisson gives to the channel of key. But a sharded channel must be
// in the slot of the lock. If Redisson's name is in another slot, channel returns a name that hasp
// derives.
func channel(prefix, key string, sharded bool) string {
	lock := redisstore.LockKey(key)
	name := prefix + ":{" + lock + "}"
	if strings.Contains(lock, "{") {
		// Redisson adds no braces to a key that has one.
		name = prefix + ":" + lock
	}

	if sharded && slot.Of(name) != slot.Of(lock) {
		return redisstore.DerivedKey("channel", key)
	}
	return name
}

func init() {
	hasp.Register("pubsublock", open,
		append(slices.Clone(redisstore.Params), "channel", "fence_ttl")...)
}
