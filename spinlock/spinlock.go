// Package spinlock is the strategy that asks again: a lock on one Redis that
// is waited for by polling with a backoff.
//
// # Guarantees
//
// One holder at a time for as long as the Redis keeps its data and its clock
// does not step by more than backend.Drift; beyond that the fence protects.
// Waiters of different processes get the key in no particular order. A Redis
// that fails over to a replica may lose the newest writes, and with them a
// lock; replicas=N makes that rarer. docs/redis.md says more.
//
// # Cost
//
// One round trip to take a free key and one to give it back; two to hear that
// a key is held, by whom and for how long. Renewals travel in batches.
//
// # URL
//
//	spinlock+redis://user:password@host:port/db
//	spinlock+redis-sentinel://user:password@host:port,host:port/master/db
//	spinlock+redis-cluster://user:password@host:port,host:port
//	spinlock+rediss://user:password@host:port/db?ca=/path/to/ca.pem
//	spinlock+unix:///path/to/socket?db=0
//
// and rediss-sentinel and rediss-cluster, with the parameters
//
//	fence_ttl    how long a fence counter outlives its last use (default 720h)
//	replicas     how many replicas must confirm a hold and its renewals
//	ca           file of the certificate authorities to trust, in PEM   (rediss…)
//	cert, key    files of this client's certificate and key, in PEM     (rediss…)
//	server_name  name that the servers' certificates must bear          (rediss…)
//	db           number of the database                                 (unix)
//	sentinel_user, sentinel_password  who we are to the sentinels       (…-sentinel)
//
// # Keys
//
// The lock is a string under the key itself, token#owner, with the term as
// its time to live, as Spring's RedisLockRegistry keeps its own: with the
// prefix "registry:" both exclude each other from the keys of
// new RedisLockRegistry(connectionFactory, "registry"). Whatever else is
// under the key means that it is held, too.
//
// A fence counter is a string under hasp:{tag}:fence:key, where the tag puts
// it into the cluster slot of the key. A key of the user's that begins with
// "hasp:{" is kept under hasp:{tag}:lock:key instead.
//
// Redis 5 or later.
package spinlock

import (
	"context"
	_ "embed"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// DefaultFenceTTL is how long a fence counter outlives its last use if
// Options do not say otherwise.
const DefaultFenceTTL = 30 * 24 * time.Hour

// Options are the settings of a [Driver]. Nil and the zero value mean the
// defaults.
type Options struct {
	// FenceTTL is how long the fence counter of a key is kept after its last
	// fenced hold began. Later fences still grow while the server's clock
	// does. Default 30 days, at least a millisecond.
	FenceTTL time.Duration
}

// Driver is a [backend.Driver] that keeps its locks in one Redis.
type Driver struct {
	store    *redisstore.Store
	fenceTTL time.Duration
}

var _ backend.Inspector = (*Driver)(nil)

// New returns a Driver over rdb: a server, a cluster, or the master that
// sentinels name, but not a redis.Ring, which moves keys to other servers
// while one is down. The client stays the caller's: its settings are left as
// they are, except that no command of hasp is retried, and Close does not
// close it. New panics if rdb is nil or the options are out of range.
func New(rdb redis.UniversalClient, o *Options) *Driver {
	if rdb == nil {
		panic("spinlock: New: client is nil")
	}
	d, err := newDriver(redisstore.New(rdb), o)
	if err != nil {
		panic("spinlock: New: " + err.Error())
	}
	return d
}

func newDriver(s *redisstore.Store, o *Options) (*Driver, error) {
	d := &Driver{store: s, fenceTTL: DefaultFenceTTL}
	if o != nil && o.FenceTTL != 0 {
		d.fenceTTL = o.FenceTTL
	}
	if d.fenceTTL < time.Millisecond {
		return nil, fmt.Errorf("%w: fence_ttl %v is below 1ms", backend.ErrInvalid, d.fenceTTL)
	}
	return d, nil
}

// Traits says that the driver excludes all who use the same Redis, and gives
// fences. The calls of a driver that was opened by URL end promptly, those over
// a *redis.Client with ContextTimeoutEnabled by their deadlines.
func (d *Driver) Traits() backend.Traits {
	return backend.Traits{Fenced: true, Reach: backend.Network, Ends: d.store.Ends()}
}

// Close closes the connections of a Driver that was opened by URL.
func (d *Driver) Close() error { return d.store.Close() }

// The scripts; each says in its head what it takes and returns.
var (
	//go:embed acquire.lua
	acquireSrc string
	//go:embed renew.lua
	renewSrc string
	//go:embed release.lua
	releaseSrc string
	//go:embed inspect.lua
	inspectSrc string

	acquireScript = redisstore.NewHold(acquireSrc)
	renewScript   = redisstore.NewHold(renewSrc)
	releaseScript = redisstore.NewScript(releaseSrc)
	inspectScript = redisstore.NewScript(inspectSrc)
)

// mark ends the token in a record.
const mark = redisstore.Mark

// Acquire takes c.Key if nothing is stored under it.
func (d *Driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if c.Fenced {
		return d.acquireFenced(ctx, c)
	}
	key := redisstore.LockKey(c.Key)
	reply, err := d.store.Hold(ctx, "set", key, c.Token+mark+c.Owner, "px", redisstore.Millis(c.TTL), "nx")
	switch {
	case err != nil:
		return backend.Grant{}, err
	case reply == "OK":
		return backend.Grant{}, nil
	case reply == nil:
		return backend.Grant{}, d.held(ctx, key)
	}
	return backend.Grant{}, d.store.Unexpected(reply)
}

// held asks who holds key. That it is held is known already: an answer that
// fails takes nothing from it.
func (d *Driver) held(ctx context.Context, key string) error {
	reply, err := d.store.Run(ctx, inspectScript, redisstore.Call{Keys: []string{key}})
	if found, ok := redisstore.Decode(reply); err == nil && ok {
		return found.Held()
	}
	return &backend.HeldError{}
}

func (d *Driver) acquireFenced(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	fence := redisstore.DerivedKey("fence", c.Key)
	reply, err := d.store.Run(ctx, acquireScript, redisstore.Call{
		Keys: []string{redisstore.LockKey(c.Key), fence},
		Args: []any{c.Token + mark + c.Owner, redisstore.Millis(c.TTL), redisstore.Millis(d.fenceTTL)},
	})
	if err != nil {
		return backend.Grant{}, err
	}
	switch parts, _ := reply.([]any); {
	case len(parts) == 2 && parts[0] == int64(1):
		text, _ := parts[1].(string)
		if n, err := strconv.ParseUint(text, 10, 64); err == nil && n > 0 {
			return backend.Grant{Fence: n}, nil
		}
	case len(parts) == 3 && parts[0] == int64(0):
		if found, ok := redisstore.Decode(append(parts[1:], "")); ok {
			return backend.Grant{}, found.Held()
		}
	case len(parts) == 1 && parts[0] == int64(-1):
		return backend.Grant{}, fmt.Errorf("%w: what is stored under %q is no fence; whoever put it there must remove it", backend.ErrInvalid, fence)
	}
	return backend.Grant{}, d.store.Unexpected(reply)
}

// Renew raises the term of each hold to at least its claim's TTL.
func (d *Driver) Renew(ctx context.Context, cs []backend.Claim, done func(i int, g backend.Grant, err error)) {
	calls := make([]redisstore.Call, len(cs))
	for i, c := range cs {
		calls[i] = redisstore.Call{
			Keys: []string{redisstore.LockKey(c.Key)},
			Args: []any{c.Token + mark, redisstore.Millis(c.TTL)},
		}
	}
	d.store.RunEach(ctx, renewScript, calls, func(i int, reply any, err error) {
		done(i, backend.Grant{}, d.store.Owned(reply, err))
	})
}

// Release removes the record of c.Token.
func (d *Driver) Release(ctx context.Context, c backend.Claim) error {
	return d.store.Owned(d.store.Run(ctx, releaseScript, redisstore.Call{
		Keys: []string{redisstore.LockKey(c.Key)},
		Args: []any{c.Token + mark},
	}))
}

func init() { hasp.Register("spinlock", open) }
