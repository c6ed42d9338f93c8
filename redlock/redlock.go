// Package redlock is the strategy that outlives its servers: a lock on several
// Redis masters that know nothing of each other, held by whoever has the votes
// of most of them (https://redis.io/docs/latest/develop/use/patterns/distributed-locks/).
//
// # Guarantees
//
// One holder at a time, whichever minority of the nodes is down, slow, paused,
// cut off or restarted empty, for as long as no node's clock steps by more
// than backend.Drift within a term; beyond that the fence protects. All is
// decided by the fastest nodes that suffice, never by the slowest. Waiters get
// the key in no particular order.
//
// A grant that arrives late is taken back where it has landed, and a release
// goes to a node after whatever was under way there. A node that has lost a
// hold is given it again once a renewal was confirmed by a quorum that still
// had it, and as long as the lease lasts.
//
// A node that was restarted, or that has lost its data, has forgotten its votes.
// It does not vote until MaxTTL has passed, the longest term that any caller may
// ask for. Then, as after any other absence, it takes part again by itself. The
// same holds for a replica that has taken over the address of a node. If a
// majority of the nodes answers, and no node that answers has ever been used,
// the set is new and votes at once. A set also votes at once, and frees its
// locks, if a majority has lost its data at the same time. docs/redis.md says
// more.
//
// Fences grow from holder to holder, whatever majorities these have, while the
// counters of most nodes survive or their clocks differ by less than the time
// between the holds. An emptied minority or clocks that differ are borne, and
// both at the same time are not.
//
// # Cost
//
// One round trip to the nodes, all at once, to take a free key and to give it
// back: three commands a node to lock and a script a node to unlock. A fence
// costs another round trip, and so does finding out who holds a key. All waiters
// of a Client share one more connection to each node. Renewals travel in
// batches.
//
// # URL
//
//	redlock+redis://user:password@host:port,host:port,host:port/db
//	redlock+rediss://user:password@host:port,host:port,host:port/db?ca=/path/to/ca.pem
//
// with the parameters
//
//	max_ttl      the longest term that anybody may ask for (default 2m)
//	fence_ttl    how long a fence counter outlives its last use (default 720h)
//	durable      true: nodes write to disk before they answer, and vote at once
//	             when they are restarted with their data
//	allow_unsafe_nodes  true: fewer than three nodes, an even number, or one twice
//	ca           file of the certificate authorities to trust, in PEM   (rediss)
//	cert, key    files of this client's certificate and key, in PEM     (rediss)
//	server_name  name that the servers' certificates must bear          (rediss)
//
// In a hasp.Config every node may have a URL of its own, with its own password.
// All who share locks must name the same nodes and agree on max_ttl and
// durable; of different max_ttl the longest counts once the nodes have heard
// of it.
//
// # Keys and channels
//
// The lock is a string on each node, under the key itself: token#owner, or
// token~n#owner for the n-th attempt of one that waits. So a lock of redsync's
// on the same nodes is held for us, and the other way round. Whatever else is
// under the key means that the node's vote is taken, too.
//
// A release publishes the token, and how many hear it, to hasp:{tag}:channel:key. A fence counter is a
// string under hasp:{tag}:fence:key. A key of the user's that begins with
// "hasp:{" is kept under hasp:{tag}:lock:key. hasp:{redlock}:mark is a node's
// mark, by which it is known whether it has kept its data.
//
// Redis 5 or later.
package redlock

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/go-redsync/redsync/v4/redis"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// The defaults of Options.
const (
	DefaultMaxTTL   = 2 * time.Minute
	DefaultFenceTTL = 30 * 24 * time.Hour
)

// Options are the settings of a [Driver]. Nil and the zero value mean the
// defaults.
type Options struct {
	// MaxTTL is the longest term that anybody may ask for, and how long a node
	// that was restarted or has lost its data does not vote. Lock and Extend
	// refuse more. Default DefaultMaxTTL, at least backend.MinTTL.
	MaxTTL time.Duration

	// FenceTTL is how long the fence counter of a key is kept after its last
	// fenced hold began or was renewed. Later fences still grow as long as the
	// servers' clocks advance. Default DefaultFenceTTL, at least a millisecond.
	FenceTTL time.Duration

	// Durable says that the nodes have what they were told on disk before they
	// answer (appendonly yes, appendfsync always). Then a node that is
	// restarted with its data votes at once.
	Durable bool

	// AllowUnsafeNodes admits fewer than three nodes, which survive nothing,
	// an even number, of which one may be lost no more than of one fewer, and
	// one server twice, which votes twice.
	AllowUnsafeNodes bool
}

// Driver is a [backend.Driver] that keeps its locks on several masters.
type Driver struct {
	nodes    []*node
	maxTTL   time.Duration
	fenceTTL time.Duration
	durable  bool
	unsafe   bool
	founding chan struct{} // has room for one caller that marks a new set
	longest  atomic.Int64  // the longest term that any caller may ask for, in ms, by the marks that were read
	splits   atomic.Int64  // votes that rivals have split
	work     sync.WaitGroup

	life context.Context // ends when Close begins
	end  context.CancelFunc

	mu       sync.Mutex          // guards all below, and what attempts say of it
	ended    bool                // nothing starts any more
	attempts map[string]*attempt // by token
	sweepAt  int                 // how many of them are worth looking for those that have run out
	chased   map[chased]bool     // releases that go on when Release has returned
	wants    map[string]*rivalry // of some keys
}

var (
	_ backend.Waiter    = (*Driver)(nil)
	_ backend.Inspector = (*Driver)(nil)
)

// New returns a Driver over the masters that clients lead to, one each. The
// clients stay their caller's: their settings are left as they are, except that
// no command of hasp is retried, and Close does not close them. New panics if a client is nil, a redis.ClusterClient or
// a redis.Ring, if the nodes are fewer than three, an even number or one twice
// and Options do not admit that, or if Options are out of range.
func New(clients []goredis.UniversalClient, o *Options) *Driver {
	stores := make([]*redisstore.Store, len(clients))
	names := make([]string, len(clients))
	for i, rdb := range clients {
		switch rdb := rdb.(type) {
		case nil:
			panic("redlock: New: client is nil")
		case *goredis.ClusterClient, *goredis.Ring:
			panic("redlock: New: a node is one server, not a cluster or a ring")
		case *goredis.Client:
			// Sentinels name the address later. Until then go-redis reports the same
			// placeholder for all such clients.
			if addr := rdb.Options().Addr; addr != "FailoverClient" {
				names[i] = addr
			}
		}
		stores[i] = redisstore.New(rdb)
	}
	d, err := newDriver(stores, names, o)
	if err != nil {
		panic("redlock: New: " + err.Error())
	}
	return d
}

// newDriver returns a Driver over stores. Names are the addresses of the
// nodes, as far as they are known.
func newDriver(stores []*redisstore.Store, names []string, o *Options) (*Driver, error) {
	d := &Driver{maxTTL: DefaultMaxTTL, fenceTTL: DefaultFenceTTL, founding: make(chan struct{}, 1), attempts: map[string]*attempt{}, chased: map[chased]bool{}, wants: map[string]*rivalry{}}
	d.life, d.end = context.WithCancel(context.Background())
	if o == nil {
		o = &Options{}
	}
	d.durable, d.unsafe = o.Durable, o.AllowUnsafeNodes
	if o.MaxTTL != 0 {
		d.maxTTL = o.MaxTTL
	}
	if o.FenceTTL != 0 {
		d.fenceTTL = o.FenceTTL
	}
	switch {
	case d.maxTTL < backend.MinTTL:
		return nil, fmt.Errorf("%w: max_ttl %v is below %v", backend.ErrInvalid, d.maxTTL, backend.MinTTL)
	case d.fenceTTL < time.Millisecond:
		return nil, fmt.Errorf("%w: fence_ttl %v is below 1ms", backend.ErrInvalid, d.fenceTTL)
	}
	if err := checkNodes(names, d.unsafe); err != nil {
		return nil, err
	}
	for i, s := range stores {
		n := &node{d: d, i: i, store: s, name: s.Name()}
		if names[i] == "" {
			n.name = fmt.Sprintf("node %d", i+1)
		}
		n.marks.turn = make(chan struct{}, 1)
		d.nodes = append(d.nodes, n)
	}
	return d, nil
}

// checkNodes refuses what is no set of nodes that can outvote a minority.
func checkNodes(names []string, unsafe bool) error {
	const hint = "; allow_unsafe_nodes=true admits it"
	switch {
	case len(names) == 0:
		return fmt.Errorf("%w: no nodes: want at least 3, as in redlock+redis://a:6379,b:6379,c:6379", backend.ErrInvalid)
	case !unsafe && len(names) == 1:
		return fmt.Errorf("%w: 1 node: the loss of one must leave a majority, so want at least 3"+hint, backend.ErrInvalid)
	case unsafe:
		return nil
	case len(names) < 3:
		return fmt.Errorf("%w: %d nodes: the loss of one must leave a majority, so want at least 3"+hint, backend.ErrInvalid, len(names))
	case len(names)%2 == 0:
		return fmt.Errorf("%w: %d nodes: an even number survives the loss of no more nodes than %d would, and votes may be split in half"+hint, backend.ErrInvalid, len(names), len(names)-1)
	}
	for i, name := range names {
		if name != "" && slices.Contains(names[:i], name) {
			return fmt.Errorf("%w: node %s is named twice, and would vote twice"+hint, backend.ErrInvalid, name)
		}
	}
	return nil
}

// Traits says that the driver excludes all who use the same nodes, gives
// fences, and returns when its callers want it to.
func (d *Driver) Traits() backend.Traits {
	return backend.Traits{Fenced: true, MaxTTL: d.maxTTL, Reach: backend.Network, Ends: backend.EndsPromptly}
}

// The scripts; each says in its head what it takes and returns.
var (
	//go:embed acquire.lua
	acquireSrc string
	//go:embed raise.lua
	raiseSrc string
	//go:embed renew.lua
	renewSrc string
	//go:embed repair.lua
	repairSrc string
	//go:embed release.lua
	releaseSrc string
	//go:embed inspect.lua
	inspectSrc string
	//go:embed break.lua
	breakSrc string
	//go:embed mark.lua
	markSrc string

	acquireScript = redisstore.NewScript(acquireSrc)
	raiseScript   = redisstore.NewScript(raiseSrc)
	renewScript   = redisstore.NewScript(renewSrc)
	repairScript  = redisstore.NewScript(repairSrc)
	releaseScript = redisstore.NewScript(releaseSrc)
	inspectScript = redisstore.NewScript(inspectSrc)
	breakScript   = redisstore.NewScript(breakSrc)
	markScript    = redisstore.NewScript(markSrc)
)

// mark ends the token in a record.
const mark = redisstore.Mark

// Acquire takes c.Key if a quorum of the nodes has nothing stored under it. It asks
// all nodes at once, unless rivals wanted the key a moment ago. It never sleeps.
func (d *Driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if d.yields(c.Key) > 0 {
		// This driver has just released the key, and others wait for it. The survey
		// gives them a round trip to take it first.
		if s := d.survey(ctx, c, nobody); s.voted(d) && !s.unheld(d) {
			return backend.Grant{}, d.heldBy(s)
		}
	}
	lead := nobody
	if d.rivalled(c.Key) {
		lead = d.leader(c.Key)
	}
	g, err := d.attempt(ctx, c, 0, lead)
	if _, refused := err.(*backend.HeldError); !refused {
		return g, err
	}
	d.refused(c.Key)

	s := d.survey(ctx, c, nobody)
	switch err := d.unanswered(ctx, s); {
	case err != nil && lead != nobody:
		return backend.Grant{}, err // only the lead has refused, not a quorum
	case s.holder == nil && s.unheld(d):
		// The records that refused this attempt are about to be released, such as
		// the votes of a rival that was also refused. If several rivals ask again at
		// once, one of them nearly always wins.
		if g, err := d.attempt(ctx, c, 1, nobody); !errors.Is(err, backend.ErrHeld) {
			return g, err
		}
	}
	return backend.Grant{}, d.heldBy(s)
}

// Release removes the record of c.Token from all nodes, and tells those who
// wait for the key. It returns as soon as a quorum has said how it was.
func (d *Driver) Release(ctx context.Context, c backend.Claim) error {
	a, err := d.releasing(c)
	if err != nil {
		return err
	}
	defer d.work.Done()
	b := newBallot(d.nodes, having)
	pools := make([]redis.Pool, len(d.nodes))
	for i, n := range d.nodes {
		d.work.Add(1)
		pools[i] = &pool{give: func() (bool, error) {
			defer d.work.Done()
			v, err := n.giveBack(c, a)
			b.cast(i, v, err)
			return v == yes, err
		}}
	}
	d.work.Go(func() {
		_, _ = mutex(c, c.Token, pools).UnlockContext(context.Background()) // b knows more
	})
	select {
	case <-b.done:
	case <-ctx.Done():
		b.end(left)
	}
	return b.err()
}

// giveBack releases c on the node, after whatever is under way there for it,
// and goes on in the background where that is not answered.
func (n *node) giveBack(c backend.Claim, a *attempt) (vote, error) {
	times, until := 1, time.Now().Add(c.TTL+c.Timeout)
	if a != nil {
		// A command in flight may still write the record. It ends within its Timeout.
		// Close waits for it; otherwise the record would stay for a term.
		<-n.d.busy(a, n.i)
		var there, doubt bool
		if there, doubt, until = n.d.leaving(a, n.i); !there {
			return no, nil
		}
		if doubt {
			times = 2
		}
	}
	channel := redisstore.DerivedKey("channel", c.Key)
	began := time.Now()
	err := n.admit()
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), c.Timeout)
		err = n.release(ctx, c, c.Token, channel)
		cancel()
	}
	pause := firstRetry
	if err == nil || definite(err) {
		times--
		pause = c.Timeout
	}
	if times > 0 {
		n.d.chase(n, c, func() { n.undo(c, c.Token, channel, times, pause, until) })
	}
	switch {
	case err == nil:
		return yes, nil
	case definite(err):
		return no, nil
	}
	return failed, n.plain(err, time.Since(began))
}

func init() { hasp.Register("redlock", openConfig) }
