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
// TryLock may report a free key as held while other callers wait for the key, and for a second
// after the last waiter has died.
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
//	max_ttl      the longest term that a caller may ask for (default 2m)
//	fence_ttl    how long a fence counter is kept after its last use (default 720h)
//	durable      true: nodes write to disk before they answer, and vote at once
//	             when they are restarted with their data
//	allow_unsafe_nodes  true: accept fewer than three nodes, an even number, or one server twice
//	allow_eviction      true: accept nodes that may evict keys
//
// and the parameters of TLS, which are in docs/redis.md.
//
// In a hasp.Config each node may have a URL of its own. All programs that share locks must name the
// same nodes and agree on max_ttl and durable. If they differ in max_ttl, the largest value applies
// as soon as the nodes know it.
//
// # Keys and channels
//
// A lock is a string on each node, under the key itself. Its value is token#owner, or token~n#owner
// for a later attempt. If hasp.WithMinHold keeps the key after Unlock, the value begins with kept-.
// A shared lock is a sorted set with a member in this form for each holder. The member's score is
// the time in ms, on the node's clock, at which the holder's term ends. hasp and redsync exclude
// each other on the same nodes. A key with any other value counts as held on its node, and so does
// a set that never expires. A user's key that begins with "hasp:{" is stored under
// hasp:{tag}:lock:key instead. The other keys, and the channels that a release publishes to, are
//
//	hasp:{tag}:fence:key           the fence counter, a string
//	hasp:{tag}:intent:key          the intent of a waiting writer, which keeps out new readers
//	hasp:{tag}:turns:key           the queue of waiters by arrival, a sorted set
//	hasp:{tag}:looks:key           when each waiter last asked, a sorted set
//	hasp:{tag}:waits:key           a sign of waiters; these three expire 2 s after a waiter asked
//	hasp:{tag}:channel:key:driver  the channel of the first waiter's driver
//	hasp:{tag}:channel:key         the channel of the readers
//	hasp:{redlock}:mark            the node's mark, which shows whether the node has kept its data
//
// The driver needs Redis 6.2 or later.
package redlock

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// defaultMaxTTL is the default of [Options.MaxTTL].
const defaultMaxTTL = 2 * time.Minute

// closeTimeout is the longest time that Close waits for calls in flight, and for the releases of
// the records that these calls leave on nodes.
const closeTimeout = 3 * time.Second

var errClosed = errors.New("redlock: driver is closed")

// Options are the settings of [New]. Nil and the zero value mean the defaults.
type Options struct {
	// Client contains the options of the hasp.Client that New returns. NewDriver ignores them.
	Client hasp.Options

	// MaxTTL is the longest term that any caller may ask for. Lock and Extend refuse a longer one.
	// A node that was restarted or has lost its data does not vote until this time has passed. The
	// default is two minutes, the minimum is backend.MinTTL. The time of hasp.WithMinHold may be
	// longer, but if most nodes lose their data meanwhile, even one by one, the key is free early.
	MaxTTL time.Duration

	// FenceTTL is how long a node keeps a key's fence counter after the key's last fenced hold was
	// taken or renewed. When the counter is gone, fences still grow as long as the servers' clocks
	// advance. The default is 30 days, and the minimum is a millisecond.
	FenceTTL time.Duration

	// Durable says that the nodes write each command to disk before they answer it (appendonly yes,
	// appendfsync always). A node that is restarted with its data then votes at once.
	Durable bool

	// AllowUnsafeNodes accepts fewer than three nodes, which tolerate no failure; an even number,
	// which tolerates as many failures as one node fewer; and one server twice. Then use two of its
	// databases: in a single one, its second vote finds the attempt's own record, so it is no.
	AllowUnsafeNodes bool
}

// driver is a [backend.Driver] that keeps its locks on several masters.
type driver struct {
	id    string // part of the names of the channels that wake this driver's waiters
	nodes []*node
	opts  Options // with the defaults filled in

	longestTTL atomic.Int64  // the longest term that any caller may ask for, with drift, in ms, as far as this driver knows
	markTurn   chan struct{} // a mutex whose lock can time out; full while a caller marks a new set

	work       sync.WaitGroup     // goroutines and calls that Close waits for
	closing    context.Context    // done when Close begins; no work begins after that
	beginClose context.CancelFunc // cancels the context closing

	// mu guards the fields below, and the fields of attempts and nodes whose comments say so.
	mu       sync.Mutex
	attempts map[string]*attempt // by token
	sweepAt  int                 // the number of attempts at which register removes the expired attempts
	wants    map[string]*rivalry // by key
}

var (
	_ backend.Waiter    = (*driver)(nil)
	_ backend.Inspector = (*driver)(nil)
)

func init() { hasp.Register("redlock", openConfig, params...) }

// New returns a Client that keeps its locks on several masters, each with a Redis client of its
// own. Close does not close the Redis clients. Their settings apply to pipelines of hasp's commands,
// which are not retried: see docs/redis.md. The error is hasp.ErrInvalid if a Redis client is nil,
// a redis.ClusterClient or a redis.Ring, or if o is out of range. Unless o.AllowUnsafeNodes is set,
// it is also ErrInvalid if there are fewer than three Redis clients, an even number, or two with the
// same address. A server that [hasp.Open] would refuse is refused by the first call to it.
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

// newDriver returns a driver over stores. The argument names contains the address of each node, or
// "" if the address is not known.
func newDriver(stores []*redisstore.Store, names []string, o *Options) (*driver, error) {
	o = cmp.Or(o, &Options{})
	d := &driver{
		id:       rand.Text(),
		opts:     *o,
		markTurn: make(chan struct{}, 1),
		attempts: map[string]*attempt{},
		wants:    map[string]*rivalry{},
	}
	d.opts.MaxTTL = cmp.Or(o.MaxTTL, defaultMaxTTL)
	d.closing, d.beginClose = context.WithCancel(context.Background())

	if d.opts.MaxTTL < backend.MinTTL {
		return nil, fmt.Errorf("%w: max_ttl %v is below %v", backend.ErrInvalid, d.opts.MaxTTL, backend.MinTTL)
	}
	var err error
	if d.opts.FenceTTL, err = redisstore.CheckFenceTTL(o.FenceTTL); err != nil {
		return nil, err
	}
	if err := checkNodes(names, d.opts.AllowUnsafeNodes); err != nil {
		return nil, err
	}

	for i, s := range stores {
		n := &node{d: d, i: i, store: s, name: s.Name(), cleanups: map[string]*cleanup{}}
		if names[i] == "" {
			n.name = fmt.Sprintf("node %d", i+1)
		}
		n.marks.turn = make(chan struct{}, 1)
		d.nodes = append(d.nodes, n)
	}
	return d, nil
}

// unsafeHint is the end of each error text that Options.AllowUnsafeNodes prevents.
const unsafeHint = ", or set allow_unsafe_nodes=true"

// checkNodes returns an error if the set of nodes tolerates no failure, or no more
// failures than a smaller set.
func checkNodes(names []string, allowUnsafe bool) error {
	switch {
	case len(names) == 0:
		return fmt.Errorf("%w: no nodes: name at least 3, as in redlock+redis://a:6379,b:6379,c:6379", backend.ErrInvalid)
	case allowUnsafe:
		return nil
	case len(names) <= 2:
		return fmt.Errorf("%w: of %d nodes none may fail: name at least 3"+unsafeHint, backend.ErrInvalid, len(names))
	case len(names)%2 == 0:
		return fmt.Errorf("%w: %d nodes tolerate no more failures than %d do: name an odd number"+unsafeHint, backend.ErrInvalid, len(names), len(names)-1)
	}
	for i, name := range names {
		if name != "" && slices.Contains(names[:i], name) {
			return fmt.Errorf("%w: node %s is named twice, and would vote twice: name it once"+unsafeHint, backend.ErrInvalid, name)
		}
	}
	return nil
}

// Traits describes the driver.
func (d *driver) Traits() backend.Traits {
	return backend.Traits{Fenced: true, MinHold: true, Shared: true, MaxTTL: d.opts.MaxTTL, Reach: backend.Network, Cancellation: backend.CancelPrompt}
}

// quorum is the smallest majority of the nodes.
func (d *driver) quorum() int { return len(d.nodes)/2 + 1 }

// checkTTL returns an error if ttl is longer than MaxTTL. A restarted node votes again when MaxTTL
// has passed, so all earlier leases must have ended at that time.
func (d *driver) checkTTL(ttl time.Duration) error {
	if ttl > d.opts.MaxTTL {
		return fmt.Errorf("%w: a term of %v is longer than max_ttl, %v: ask for a shorter term, or raise max_ttl in all programs", backend.ErrInvalid, ttl, d.opts.MaxTTL)
	}
	return nil
}

// Acquire takes c.Key if it is free on a quorum of the nodes. For a shared claim, a node with a
// shared record also counts as free. Acquire asks all nodes at once, unless the claim is exclusive
// and other callers wanted the key within the last second. In that case, it first asks only one
// node, the lead, which refuses even a free key if other callers wait for the key. Acquire does not
// wait, but asks a few times if only the queue refused it, or if no caller seems to hold the key.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	// Rivals that ask the same node first do not split the votes. Readers need no lead, because
	// they do not exclude each other.
	lead := noLead
	if !c.Shared && d.rivalled(c.Key) {
		lead = d.leader(c.Key)
	}

	p := &queueState{}
	g, err := d.tryAcquire(ctx, c, 0, lead, p)
	number := 1
	for pause := minSleep; p.answer.Load() == behindFree && isHeld(err) && pause < leadTimeout; pause *= 2 {
		// Only the queue has refused the key, which is free on the lead. Ask again, because the
		// first waiter may be about to take the key, or may have held it and still be in the queue.
		doze(ctx, pause)
		p = &queueState{}
		g, err = d.tryAcquire(ctx, c, number, lead, p)
		number++
	}
	for round := 0; isHeld(err); round++ {
		d.refused(c.Key)
		// An intent keeps this reader out until the intent ends, whatever records the nodes have.
		if rest := p.intent.Load(); rest > 0 {
			return backend.Grant{}, &backend.HeldError{RetryAfter: time.Duration(rest) * time.Millisecond}
		}
		s := d.clearSurvey(ctx, c)

		switch err := s.outage(ctx); {
		case err != nil && lead != noLead:
			return backend.Grant{}, err // only the lead has refused, not a quorum
		case s.holder != nil && !s.joins(*s.holder), !s.unheld(), round == maxRounds:
			return backend.Grant{}, s.heldError()
		case p.answer.Load() == behind:
			// Give up, because one of the callers that wait for the key receives it next.
			return backend.Grant{}, s.heldError()
		}

		// Ask again, because the records that blocked this attempt, such as a rival's votes, are
		// about to be released. If only the queue refused the attempt, the first waiter has not
		// taken the free key, so that waiter has probably died. If several rivals ask again at
		// once, one of them nearly always wins.
		g, err = d.tryAcquire(ctx, c, number, noLead, p)
		number++
	}
	return g, err
}

// maxRounds is how often Acquire asks all nodes again if they have refused a free key.
const maxRounds = 3

// isHeld reports whether an attempt was refused.
func isHeld(err error) bool {
	_, held := err.(*backend.HeldError)
	return held
}

// spawn runs f on a goroutine that Close waits for. It returns false, and does not
// run f, if Close has begun.
func (d *driver) spawn(f func()) bool {
	if !d.beginWork() {
		return false
	}
	defer d.work.Done()
	d.work.Go(f)
	return true
}

// beginWork counts the caller as work that Close waits for. It returns false if Close has begun.
func (d *driver) beginWork() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	// Close cancels d.closing while it holds mu, and then waits for d.work. So d.work never grows
	// from zero during that wait.
	if d.closing.Err() != nil {
		return false
	}
	d.work.Add(1)
	return true
}

// Close waits at most 3 s for the commands in flight, and for the release of the records that these
// commands leave on nodes. A record that stays would block its key for a term. Close then closes
// the connections of waiters and, if the driver was opened by URL, all other connections.
func (d *driver) Close() error {
	d.mu.Lock()
	d.beginClose() // after this, only goroutines that d.work counts add to d.work
	d.mu.Unlock()

	done := make(chan struct{})
	go func() {
		d.work.Wait()
		close(done)
	}()

	// If a call does not end in time, the goroutine above ends only when that call ends.
	select {
	case <-done:
	case <-time.After(closeTimeout):
	}

	// Close the connections last, because the releases need them.
	var err error
	for _, n := range d.nodes {
		err = errors.Join(err, n.store.Close())
	}
	return err
}
