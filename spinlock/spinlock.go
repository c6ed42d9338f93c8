// Package spinlock implements locks on one Redis. Waiters poll at a pace that depends on how often
// the key changes hands.
//
// # Guarantees
//
// A key has one holder at a time, as long as the Redis keeps its data and its clock does not step
// by more than backend.Drift. If this fails, only the fence protects the resource. Waiters of
// different processes get the key in no particular order. A Redis that fails over to a replica may
// lose its newest writes, and with them a lock. replicas=N makes this rarer. See docs/redis.md.
//
// # Cost
//
// It takes one round trip to lock a free key and one to unlock it. If the key is held, the first
// attempt of a caller takes a second round trip, to learn the holder and the rest of the term.
// Later attempts, and attempts with WithFence, take one round trip. Renewals travel in batches.
// hasp.Client.List scans the names of all keys of the Redis: see docs/redis.md.
//
// However many Clients wait, together they make about eight attempts per hold, and the key is free
// for about an eighth of the time. But each process makes at least three attempts a second, so
// spinlock is for up to some hundred processes that want the same key. The other strategies on
// Redis send a message to the waiters at each release.
//
// # URL
//
//	spinlock+redis://user:password@host:port/db
//
// with the parameters
//
//	registry   the registryKey of a RedisLockRegistry of Spring: each release then
//	           wakes its threads
//	fence_ttl  how long a fence counter is kept after its last use (default 720h)
//
// docs/redis.md has the URLs of sentinels, of a cluster, with TLS and of a socket, and the
// parameters that all strategies on Redis have, such as replicas and allow_eviction.
//
// # Keys
//
// A lock is a string under the key itself. Its value is token~n#owner, and its time to live is the
// term. The number n is how long the holder's Client waited for the key, in microseconds; Clients
// that wait choose their pace by n. If hasp.WithMinHold keeps the key after an Unlock, the value is
// kept-token~n#owner. Spring's RedisLockRegistry stores its locks in the same way. For keys with
// the prefix "registry:", hasp and new RedisLockRegistry(connectionFactory, "registry") exclude
// each other. A key with any other value counts as held.
//
// With registry=registry, a release or a Break also publishes the key to registry-channel:KEY,
// where registries of the type PUB_SUB_LOCK listen. Without the parameter, the threads of such a
// registry block until their own timeout. If the Redis user may not publish, the key is freed
// without a message.
//
// A shared lock is a sorted set under the key itself. Each holder has a member token#owner, whose
// score is the end of its term in ms by the server's clock. The time to live of the key is the
// longest term. pubsublock and fairlock store a shared lock in the same way, so readers with these
// strategies share a key. If a sorted set has no end, or its last member does not begin with a
// token of at least 16 characters, it is a foreign value, which holds the key and stays as it is.
// If a registry of Spring meets a shared lock, it receives WRONGTYPE, which is an exception instead
// of "held".
//
// A writer that waits for readers stores an intent: the string hasp:{tag}:intent:key, whose value
// is the writer's token. It lasts for 300 ms plus twice the last round trip. While it exists, new
// readers are refused, except those of fairlock. The writer repeats the intent with each attempt,
// and the grant to the writer removes the intent. If the writer gives up, the intent expires.
//
// The driver needs Redis 6.2 or later.
package spinlock

import (
	"cmp"
	"context"
	"embed"
	"iter"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// Options are the settings of [New]. Nil and the zero value mean the defaults.
type Options struct {
	// Client has the options of the Client that New returns. NewDriver ignores it.
	Client hasp.Options

	// Registry is the registryKey of a RedisLockRegistry of Spring with the type PUB_SUB_LOCK that
	// shares the keys. hasp then publishes releases as that registry does. By default nothing is
	// published.
	Registry string

	// FenceTTL is how long the fence counter of a key is kept after its last fenced hold began.
	// When the counter is gone, fences still grow as long as the server's clock advances. The
	// default is 30 days, the minimum is a millisecond.
	FenceTTL time.Duration
}

// driver is a [backend.Driver] that stores its locks in one Redis.
type driver struct {
	store    *redisstore.Store
	registry string       // see Options.Registry; if it is "", releases are not published
	fenceTTL string       // Options.FenceTTL in ms
	trip     atomic.Int64 // how long the last run of acquireScript took
}

var (
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
	return redisstore.NewDriver("spinlock", rdb, o, newDriver)
}

// The function open makes the driver for hasp.Open.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	o := Options{Registry: c.Params["registry"]}
	var err error
	if o.FenceTTL, err = redisstore.FenceTTL(c.Params); err != nil {
		return nil, err
	}

	// Check all parameters before this call, because OpenOne calls the servers.
	s, err := redisstore.OpenOne(ctx, "spinlock", c.Nodes, c.Params)
	if err != nil {
		return nil, err
	}
	return newDriver(s, &o)
}

// newDriver returns a driver that uses s. If an option is out of range, it returns an error.
func newDriver(s *redisstore.Store, o *Options) (*driver, error) {
	o = cmp.Or(o, &Options{})
	ttl, err := redisstore.CheckFenceTTL(o.FenceTTL)
	if err != nil {
		return nil, err
	}
	return &driver{store: s, registry: o.Registry, fenceTTL: redisstore.Millis(ttl)}, nil
}

// Traits describes the driver.
func (d *driver) Traits() backend.Traits {
	return backend.Traits{
		Fenced: true, MinHold: true, Shared: true,
		Reach: backend.Network, Cancellation: backend.CancelPrompt,
	}
}

// Close closes the connections of a Driver that was opened by URL.
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

// The constant mark follows the token in a record, token~n#owner.
const mark = "~"

// The function waited returns how long the writer of a record had waited, or 0 if not known.
func waited(record string) time.Duration {
	head, _, _ := strings.Cut(record, redisstore.Mark)
	_, text, _ := strings.Cut(head, mark)
	// In a value of another program, text may be anything. 48 bits of microseconds fit a Duration.
	n, err := strconv.ParseUint(text, 10, 48)
	if err != nil {
		return 0
	}
	return time.Duration(n) * time.Microsecond
}

// Acquire takes c.Key if nothing is stored under it. A shared claim also takes a key that readers
// hold, unless there is an intent.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if c.Shared {
		return d.store.AcquireShared(ctx, c, d.fenceTTL)
	}
	key := redisstore.LockKey(c.Key)
	microseconds := strconv.FormatInt(c.Waited.Microseconds(), 10)
	record := c.Token + mark + microseconds + redisstore.Mark + c.Owner
	if c.Fenced || c.Contended {
		return d.take(ctx, c, key, record)
	}

	// If no fence is wanted, and the key is probably free, use SET, which costs the server less
	// than a script.
	term := redisstore.Millis(c.TTL)
	reply, err := d.store.Send(ctx, key, true, "set", key, record, "px", term, "nx")
	switch {
	case err != nil:
		return backend.Grant{}, err
	case reply == "OK":
		return backend.Grant{}, nil
	case reply != nil:
		return backend.Grant{}, d.store.Unexpected(reply) // the outcome is unknown
	}

	// SET replies nil if the key is held. The script reports the holder, or takes the key if it is
	// free by now. The token may be sent again, because the refusal was definite.
	return d.take(ctx, c, key, record)
}

// take runs the script that takes the key. The same script makes the fence, so that a later hold
// receives a larger fence. If the caller waits and readers hold the key, the script stores an
// intent. If the key is free, the script removes any intent, even another caller's.
func (d *driver) take(ctx context.Context, c backend.Claim,
	key, record string) (backend.Grant, error) {
	call := redisstore.Call{
		Keys: []string{key},
		Args: []string{record, redisstore.Millis(c.TTL), ""},
	}
	if c.Fenced {
		call.Keys = append(call.Keys, redisstore.DerivedKey("fence", c.Key))
		call.Args[2] = d.fenceTTL
	}

	withoutIntent := call
	if c.WillRetry {
		// Let the intent last until the next attempt repeats it, even if the server is far away.
		term := redisstore.IntentTTL + min(2*time.Duration(d.trip.Load()), c.Timeout)
		call.Keys = append(call.Keys, redisstore.IntentKey(c.Key))
		call.Args = append(call.Args, c.Token, redisstore.Millis(term))
	}

	began := time.Now()
	reply, err := d.store.Run(ctx, acquireScript, call)
	isRefused := redis.HasErrorPrefix(err, "NOPERM") || redis.HasErrorPrefix(err, "TRYAGAIN")
	if c.WillRetry && isRefused {
		// Try without an intent, because this user may not store intents, or the slot of the keys
		// is being moved. Readers may then come first. The refused script has written nothing.
		reply, err = d.store.Run(ctx, acquireScript, withoutIntent)
	}

	if err != nil {
		return backend.Grant{}, err
	}
	d.trip.Store(int64(time.Since(began)))
	g, err := d.store.Granted(reply, c)
	if found, ok := redisstore.Refusal(reply); ok { // then err is a HeldError
		err.(*backend.HeldError).Waited = waited(found.Record)
	}
	return g, err
}

// Renew raises the term of each hold to at least its claim's TTL.
func (d *driver) Renew(ctx context.Context, cs []backend.Claim,
	done func(i int, g backend.Grant, err error)) {
	d.store.Renew(ctx, renewScript, cs, mark, done)
}

// Release removes the record of c.Token. With c.KeepUntil it replaces the token in the record, and
// the record then expires at that time. From a shared record it removes the member of c.Token. If
// there is a registry, and the key is free now, the script publishes this.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	key := redisstore.LockKey(c.Key)
	if c.Shared {
		if d.registry == "" {
			return d.store.ReleaseShared(ctx, c)
		}
		return d.store.ReleaseShared(ctx, c, key, d.channel(key), "publish")
	}

	channel := ""
	if d.registry != "" {
		channel = d.channel(key)
	}
	rest := redisstore.Rest(c.KeepUntil)
	return d.store.Owned(d.store.Run(ctx, releaseScript, redisstore.Call{
		Keys: []string{key},
		Args: []string{c.Token + mark, channel, rest},
	}))
}

// channel returns the channel on which Spring's registry listens for a release of key.
func (d *driver) channel(key string) string { return d.registry + "-channel:" + key }

// Inspect returns the holders of key. In the result, Since is zero, because a record does not
// contain it. A holder that does not use hasp has no Owner.
func (d *driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	return d.store.Inspect(ctx, inspectScript, key)
}

// List returns the keys with a record of spinlock or redlock, or with shared holds.
func (d *driver) List(ctx context.Context, prefix string,
	timeout time.Duration) iter.Seq2[backend.Entry, error] {
	return d.store.List(ctx, prefix, timeout, redisstore.ByToken, inspectScript)
}

// Break removes whatever is stored under key. If there is a registry, Break publishes that the key
// is free.
func (d *driver) Break(ctx context.Context, key string) error {
	key = redisstore.LockKey(key)
	removed, err := d.store.Do(ctx, "unlink", key) // a value of any type
	if removed == int64(1) && d.registry != "" {
		// Ignore the error of a user who may not publish, because the key is free.
		_, _ = d.store.Send(ctx, key, false, "publish", d.channel(key), key)
	}
	return err
}

func init() {
	hasp.Register("spinlock", open,
		append(slices.Clone(redisstore.Params), "registry", "fence_ttl")...)
}
