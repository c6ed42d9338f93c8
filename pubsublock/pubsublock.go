// Package pubsublock is the strategy that is woken: a lock on one Redis whose
// release is published to those who wait for it, as Redisson's RLock does it.
// Programs in Go and services in Java can share such a lock.
//
// # Guarantees
//
// One holder at a time for as long as the Redis keeps its data and its clock
// does not step by more than backend.Drift; beyond that the fence protects.
// Waiters of different processes get the key in no particular order. A Redis
// that fails over to a replica may lose the newest writes, and with them a
// lock; replicas=N makes that rarer. docs/redis.md says more.
//
// Who waits is woken by the release, and looks by itself once a second and
// when the holder's term ends. So a message that is lost, a connection that is
// half open, or a release by a strategy that publishes nothing costs a waiter
// a second at most.
//
// # Cost
//
// One round trip to take a free key, to hear that it is held, and to give it
// back. All waiting of a Client is over one more connection to each server; to
// subscribe to a key's channel is another command, once for as long as the key
// is in demand. A release has each process that waits look once. Renewals
// travel in batches.
//
// # URL
//
//	pubsublock+redis://user:password@host:port/db
//	pubsublock+redis-sentinel://user:password@host:port,host:port/master/db
//	pubsublock+redis-cluster://user:password@host:port,host:port
//	pubsublock+rediss://user:password@host:port/db?ca=/path/to/ca.pem
//	pubsublock+unix:///path/to/socket?db=0
//
// and rediss-sentinel and rediss-cluster, with the parameters
//
//	channel      how the channels' names begin (default redisson_lock__channel)
//	fence_ttl    how long a fence counter outlives its last use (default 720h)
//	replicas     how many replicas must confirm a hold and its renewals
//	ca           file of the certificate authorities to trust, in PEM   (rediss…)
//	cert, key    files of this client's certificate and key, in PEM     (rediss…)
//	server_name  name that the server's certificate must bear           (rediss…)
//	db           number of the database                                 (unix)
//	sentinel_user, sentinel_password  who we are to the sentinels       (…-sentinel)
//
// # Keys and channels
//
// The lock is a hash under the key itself, with the term as its time to live
// and one field, token#owner, whose value is 1: the record of an RLock, whose
// field is id:thread and whose value counts re-entries. Whatever else is under
// the key means that it is held, too.
//
// A release publishes 0 to redisson_lock__channel:{key}, or without the braces
// if the key has an opening brace of its own. On a cluster of Redis 7 or later
// the channel is sharded, as Redisson's is; a key with braces such that this
// name would be in another slot than the key has the channel
// hasp:{tag}:channel:key there. A user who may not publish frees the key all
// the same, and one who may not subscribe waits by asking, up to 100 ms apart.
//
// A fence counter is a string under hasp:{tag}:fence:key, where the tag puts
// it into the cluster slot of the key. A key of the user's that begins with
// "hasp:{" is kept under hasp:{tag}:lock:key instead.
//
// Redis 5 or later.
package pubsublock

import (
	"context"
	_ "embed"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// The defaults of Options.
const (
	DefaultChannel  = "redisson_lock__channel"
	DefaultFenceTTL = 30 * 24 * time.Hour
)

// Options are the settings of a [Driver]. Nil and the zero value mean the
// defaults.
type Options struct {
	// Channel is how the name of every channel begins; a colon and the key
	// follow. All who share a lock must agree on it. It has no opening brace.
	// Default DefaultChannel, which is Redisson's.
	Channel string

	// FenceTTL is how long the fence counter of a key is kept after its last
	// fenced hold began. Later fences still grow while the server's clock
	// does. Default 30 days, at least a millisecond.
	FenceTTL time.Duration
}

// Driver is a [backend.Driver] that keeps its locks in one Redis.
type Driver struct {
	store    *redisstore.Store
	channel  string
	fenceTTL time.Duration
	calls    *calls
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
		panic("pubsublock: New: client is nil")
	}
	d, err := newDriver(redisstore.New(rdb), o)
	if err != nil {
		panic("pubsublock: New: " + err.Error())
	}
	return d
}

func newDriver(s *redisstore.Store, o *Options) (*Driver, error) {
	d := &Driver{store: s, channel: DefaultChannel, fenceTTL: DefaultFenceTTL, calls: newCalls()}
	if o != nil && o.Channel != "" {
		d.channel = o.Channel
	}
	if o != nil && o.FenceTTL != 0 {
		d.fenceTTL = o.FenceTTL
	}
	if strings.Contains(d.channel, "{") {
		return nil, fmt.Errorf("%w: channel %q has an opening brace, which would decide the cluster slot in place of the key", backend.ErrInvalid, d.channel)
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

// Close ends what waits that were given up may still have to undo, and closes
// the connections of a Driver that was opened by URL, and of any the one that
// waiters listen on.
func (d *Driver) Close() error {
	d.calls.close()
	return d.store.Close()
}

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
	//go:embed break.lua
	breakSrc string

	acquireScript = redisstore.NewHold(acquireSrc)
	renewScript   = redisstore.NewHold(renewSrc)
	releaseScript = redisstore.NewScript(releaseSrc)
	inspectScript = redisstore.NewScript(inspectSrc)
	breakScript   = redisstore.NewScript(breakSrc)
)

// mark ends the token in a record.
const mark = redisstore.Mark

// Acquire takes c.Key if nothing is stored under it.
func (d *Driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	call := redisstore.Call{
		Keys: []string{redisstore.LockKey(c.Key)},
		Args: []any{c.Token + mark + c.Owner, redisstore.Millis(c.TTL)},
	}
	if c.Fenced {
		call.Keys = append(call.Keys, redisstore.DerivedKey("fence", c.Key))
		call.Args = append(call.Args, redisstore.Millis(d.fenceTTL))
	}
	reply, err := d.store.Run(ctx, acquireScript, call)
	if err != nil {
		return backend.Grant{}, err
	}
	switch parts, _ := reply.([]any); {
	case len(parts) == 2 && parts[0] == int64(1):
		fence, ok := parts[1].(string)
		if ok && fence == "" && !c.Fenced {
			return backend.Grant{}, nil
		}
		if n, err := strconv.ParseUint(fence, 10, 64); err == nil && n > 0 && c.Fenced {
			return backend.Grant{Fence: n}, nil
		}
	case len(parts) == 3 && parts[0] == int64(0):
		if found, ok := redisstore.Decode(append(parts[1:], "")); ok {
			return backend.Grant{}, found.Held()
		}
	case len(parts) == 1 && parts[0] == int64(-1):
		return backend.Grant{}, fmt.Errorf("%w: what is stored under %q is no fence; whoever put it there must remove it", backend.ErrInvalid, call.Keys[1])
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

// Release removes the record of c.Token and wakes those who wait for the key.
func (d *Driver) Release(ctx context.Context, c backend.Claim) error {
	return d.store.Owned(d.store.Run(ctx, releaseScript, redisstore.Call{
		Keys: []string{redisstore.LockKey(c.Key)},
		Args: []any{c.Token + mark, c.Owner, d.channelOf(c.Key), d.publish()},
	}))
}

// channelOf returns the channel on which a release of key is told.
func (d *Driver) channelOf(key string) string {
	return channel(d.channel, key, d.store.Sharded())
}

// channel returns Redisson's name of a channel, but one in the slot of the
// lock where a server publishes only to channels of its own slots.
func channel(prefix, key string, sharded bool) string {
	lock := redisstore.LockKey(key)
	name := prefix + ":{" + lock + "}"
	if strings.Contains(lock, "{") {
		name = prefix + ":" + lock
	}
	if sharded && redisstore.Slot(name) != redisstore.Slot(lock) {
		return redisstore.DerivedKey("channel", key)
	}
	return name
}

// publish is the command that publishes.
func (d *Driver) publish() string {
	if d.store.Sharded() {
		return "spublish"
	}
	return "publish"
}

func init() { hasp.Register("pubsublock", open) }
