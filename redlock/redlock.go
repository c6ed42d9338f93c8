// Package redlock implements locks on several independent Redis masters. A caller holds a key if a
// quorum, more than half of the nodes, stores the caller's record. See
// https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/.
//
// # Guarantees
//
// A key has at most one holder at a time, even if a minority of the nodes is down, slow, paused,
// cut off, or restarted without data. The first quorum that answers decides each call. If the
// outcome of a call is unknown on a node, the driver releases the record that the call may have
// left there. If a node loses a hold, the next renewal writes the hold to that node again.
//
// A node that was restarted or has lost its data does not vote until MaxTTL has passed, because it
// may have forgotten a vote. The nodes of a new set vote at once. If a majority of the nodes
// answers, and all of these nodes have lost their data, the set counts as new.
//
// Each holder receives a larger fence than the holder before it, unless a node has lost its
// counter, and the nodes' clocks also differ by more than the time between the two holds.
//
// # Limits
//
// A key may have two holders if a node's clock steps by more than backend.Drift within a term, if
// operators delete keys or Redis evicts them, or if two servers answer at the address of one node.
// In these cases, only the fence protects the resource. See docs/redlock.md.
//
// Waiters usually, but not always, acquire the key in the order in which they began to wait.
// TryLock may report a free key as held while other callers wait for the key, for a second after
// the last waiter has died, and while a node hangs and another caller tries to take the key.
//
// # Cost
//
// Each call goes to all nodes at once. It takes one round trip to lock a free key, and one to
// unlock it. For these two calls together, each node executes five commands, counting those inside
// scripts, or six if the program passed its own clients. If other callers wanted the key within the
// last second, one node is asked first, which takes one more round trip. A fence takes one more
// round trip, and so does finding the holder of a held key. All waiters of a Client share one extra
// connection to each node. Renewals are sent in batches.
//
// # URL
//
//	redlock+redis://user:password@host:port,host:port,host:port/db
//	redlock+rediss://user:password@host:port,host:port,host:port/db?ca=/path/to/ca.pem
//
// with the parameters
//
//	max_ttl      the longest term that a caller may ask for (default 31s)
//	fence_ttl    how long a fence counter is kept after its last use (default 720h)
//	allow_unsafe_nodes  true: accept fewer than three nodes, an even number, or one server twice
//	allow_eviction      true: accept nodes that may evict keys
//
// and the parameters of TLS, which are in docs/redis.md.
//
// In a hasp.Config each node may have a URL of its own. All programs that share locks must name the
// same nodes and agree on max_ttl. If they differ, the largest value applies as soon as the nodes
// know it.
//
// # Keys and channels
//
// A lock is a string on each node, under the key itself. Its value is token#owner, or token~n#owner
// for a later attempt. If hasp.WithMinHold keeps the key after Unlock, the value begins with kept-.
// hasp and redsync exclude each other on the same nodes. A key with any other value counts as held
// on its node. A user's key that begins with "hasp:{" is stored under hasp:{tag}:lock:key instead.
// The other keys, and the channels that a release publishes to, are
//
//	hasp:{tag}:fence:key           the fence counter, a string
//	hasp:{tag}:turns:key           the queue of waiters by arrival, a sorted set
//	hasp:{tag}:looks:key           when each waiter last asked, a sorted set
//	hasp:{tag}:waits:key           a sign of waiters; these three expire 2 s after a waiter asked
//	hasp:{tag}:channel:key:driver  the channel of the first waiter's driver
//	hasp:{redlock}:mark            the node's mark, which shows whether the node has kept its data
//
// The driver needs Redis 6.2 or later.
package redlock

import (
	"cmp"
	"fmt"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// defaultMaxTTL is the default of [Options.MaxTTL]. A lock has a term of 30 s by default, and
// Extend and Detach add a drift of 303 ms to it. A shorter default would refuse these. A longer one
// would keep restarted nodes away for longer.
const defaultMaxTTL = 31 * time.Second

// Options are the settings of [New]. Nil and the zero value mean the defaults.
type Options struct {
	// Client contains the options of the hasp.Client that New returns. NewDriver ignores them.
	Client hasp.Options

	// MaxTTL is the longest term that any caller may ask for. Lock and Extend refuse a longer one.
	// A node that was restarted or has lost its data does not vote until this time has passed. The
	// default is 31 seconds, as the default term of a lock and its drift need, and the minimum is
	// backend.MinTTL. The time of hasp.WithMinHold may be longer, but if most nodes lose their data
	// meanwhile, even one by one, the key is free early.
	MaxTTL time.Duration

	// FenceTTL is how long a node keeps a key's fence counter after the key's last fenced hold was
	// taken or renewed. When the counter is gone, fences still grow as long as the servers' clocks
	// advance. The default is 30 days, and the minimum is a millisecond.
	FenceTTL time.Duration

	// AllowUnsafeNodes accepts fewer than three nodes, which tolerate no failure; an even number,
	// which tolerates as many failures as one node fewer; and one server twice. Then use two of its
	// databases: in a single one, its second vote finds the attempt's own record, so it is no.
	AllowUnsafeNodes bool
}

func init() { hasp.Register("redlock", openConfig, params...) }

// New returns a Client that keeps its locks on several masters, each with a Redis client of its
// own. Close does not close the Redis clients. Their settings apply to pipelines of hasp's
// commands, which are not retried: see docs/redis.md. The error is hasp.ErrInvalid if a Redis
// client is nil, a redis.ClusterClient or a redis.Ring, or if o is out of range. Unless
// o.AllowUnsafeNodes is set, it is also ErrInvalid if there are fewer than three Redis clients, an
// even number, or two with the same address. A server that [hasp.Open] would refuse never votes. Nor
// does the second of two nodes that are one server. The error of a call names these nodes if the
// others are no quorum.
func New(clients []goredis.UniversalClient, o *Options) (*hasp.Client, error) {
	o = cmp.Or(o, &Options{})
	d, err := NewDriver(clients, o)
	if err != nil {
		return nil, err
	}
	return hasp.New(d, &o.Client)
}

// NewDriver returns the driver that New uses. It is for the conformance suite, and for wrappers
// that are passed to [hasp.New].
func NewDriver(clients []goredis.UniversalClient, o *Options) (backend.Driver, error) {
	stores := make([]*redisstore.Store, len(clients))
	names := make([]string, len(clients))
	for i, rdb := range clients {
		if err := redisstore.CheckClient(rdb); err != nil {
			return nil, fmt.Errorf("redlock: client %d: %w", i+1, err)
		}
		switch rdb := rdb.(type) {
		case *goredis.ClusterClient:
			return nil, fmt.Errorf("redlock: %w: a node is one server, not a cluster", hasp.ErrInvalid)
		case *goredis.Client:
			// A client of sentinels has no address of its own. go-redis reports the same text for
			// all clients of sentinels.
			if addr := rdb.Options().Addr; addr != "FailoverClient" {
				names[i] = addr
			}
		}

		stores[i] = redisstore.New(rdb)
	}

	d, err := newDriver(stores, names, o)
	if err != nil {
		return nil, fmt.Errorf("redlock: %w", err)
	}
	return d, nil
}
