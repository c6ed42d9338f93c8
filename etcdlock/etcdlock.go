// Package etcdlock keeps locks in an etcd, and serves waiters in order of arrival over all
// processes.
//
// # Guarantees
//
// A key has one holder at a time, as long as a majority of the members keeps its data. A
// hold is in etcd's log, so it survives the loss of a minority, and a change of the leader.
// The fence is the revision at which the holder joined the queue. So an etcd that has lost its
// data may give smaller fences than before. TryLock does not pass a queue. Shared claims that
// follow one another hold the key together.
//
// A term never ends early. It ends up to half a second late, because etcd looks for leases
// that have ended twice a second. After a change of the leader all terms begin anew.
//
// A waiter that died, or is cut off, keeps its place for the parameter window, 5 s by default,
// and up to half a second more.
//
// A hold lasts while etcd has both its lease and its entry. A renewal keeps the lease alive and
// reads the entry. To end a hold by hand, use hasp's Break or revoke the lease.
// The holder learns of it at its next renewal.
//
// # Cost
//
// To lock a free key takes one transaction. If the driver has a lease left from an earlier hold, the call also
// sends a keep-alive, unless the hold is renewed and the lease's term began less than a
// second and less than a tenth of the term ago. The first hold of a lease also takes a call
// that creates the lease. To unlock takes one call. A refused TryLock takes one transaction
// that writes nothing. A waiter takes one transaction, and a release wakes it by an event. A
// renewal is a message on streams that all renewals share, and one read for up to 100 holds.
// docs/etcdlock.md has the whole table.
//
// # URL
//
//	etcdlock+etcd://user:password@host:2379,host:2379,host:2379
//	etcdlock+etcds://user:password@host:2379,host:2379,host:2379?ca=/path/to/ca.pem
//
// with all members as hosts, and the parameters
//
//	window       how long a waiter keeps its place without a sign of life (default 5s)
//	ca           file of the certificate authorities to trust, in PEM   (etcds)
//	cert, key    files of this client's certificate and key, in PEM     (etcds)
//	server_name  name that the servers' certificates must bear          (etcds)
//
// The user needs the right readwrite on the prefix hasp/.
//
// etcd 3.4 or later.
package etcdlock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// etcd counts terms in whole seconds, and grants none below its election timeout and a
// half, which is 2 s unless the timeout was changed. maxTTL is the longest term of a lease.
const (
	minTTL  = 2 * time.Second
	ttlUnit = time.Second
	maxTTL  = clientv3.MaxLeaseTTL * time.Second
)

// maxName is how long the escaped key may be. A request names it up to ten times, and etcd
// takes requests of 1.5 MiB.
const maxName = 100 << 10

// maxAsking is how many callers ask for a lease or a place at once. If thousands asked together,
// their calls would take longer than they may, and be repeated.
const maxAsking = 64

// closing is how long Close waits for the end of leases, in all.
const closing = time.Second

// Driver is a [backend.Waiter] that keeps its locks in an etcd and serves waiters in order
// of arrival.
type Driver struct {
	cluster *cluster
	client  *clientv3.Client // opened by URL, or nil
	pool    pool
	window  int64 // Options.Window in seconds
	clock   *clock
	turns   chan struct{} // has room for the callers that may ask for a place at once
	wg      sync.WaitGroup
	cancel  context.CancelFunc // ends the cluster's context, and everything with it
	closed  chan struct{}      // closed when Close begins
	once    sync.Once          // closes closed

	mu      sync.Mutex        // guards all below, and every queue and waiter
	toBury  []*burial         // that are not under way
	burying int               // goroutines of buryAll
	queues  map[string]*queue // by key: the queues that callers wait in
	active  int               // Waits and burials
	quiet   chan struct{}     // closed when there are none, once Close has begun
}

var (
	_ backend.Waiter    = (*Driver)(nil)
	_ backend.Inspector = (*Driver)(nil)
	_ backend.Lister    = (*Driver)(nil)
)

// DefaultWindow is the default of [Options.Window].
const DefaultWindow = 5 * time.Second

// Options are the settings of a [Driver]. Nil and the zero value mean the defaults.
type Options struct {
	// Window is how long a waiter keeps its place in the queue without a sign of life
	// from its process. So it is how long a waiter that has died, or is cut off, can delay
	// those behind it. It is rounded up to whole seconds. The default is 5 s, the minimum
	// 2 s.
	Window time.Duration
}

// New returns a Driver over the etcd that client is for. The client remains the caller's,
// who closes it after the Driver. The Driver makes connections of its own, one at a time,
// with the settings of client: its endpoints, its TLS, its user. New panics if client is
// nil or has no endpoints, or if the options are out of range.
func New(client *clientv3.Client, o *Options) *Driver {
	if client == nil {
		panic("etcdlock: New: client is nil")
	}
	if len(client.Endpoints()) == 0 {
		panic("etcdlock: New: client has no endpoints")
	}
	window := DefaultWindow
	if o != nil && o.Window != 0 {
		window = o.Window
	}
	if window < minTTL {
		panic(fmt.Sprintf("etcdlock: New: window %v is below %v", window, minTTL))
	}
	d := &Driver{window: seconds(window), clock: newClock(), turns: make(chan struct{}, maxAsking), closed: make(chan struct{}), queues: map[string]*queue{}}
	d.pool = pool{d: d, idle: map[int64][]idleLease{}}
	ctx, cancel := context.WithCancel(context.Background())
	d.cancel = cancel
	d.cluster = &cluster{dial: client.Dial, endpoints: client.Endpoints(), check: d.checkHead, clock: d.clock, beats: make(chan struct{}, maxBeats), ctx: ctx, wg: &d.wg}
	return d
}

// Traits reports that the driver serves waiters in order of arrival, that it grants fences
// and shared holds, obeys KeepUntil, and cleans up after calls that fail, that terms are whole
// seconds of 2 or more, that it excludes all clients of the same etcd, and that its calls end
// promptly.
func (d *Driver) Traits() backend.Traits {
	return backend.Traits{Ordered: true, Fenced: true, Keeps: true, Shared: true, Cleans: true,
		MinTTL: minTTL, TTLUnit: ttlUnit, MaxTTL: maxTTL, Reach: backend.Network, Ends: backend.EndsPromptly}
}

// check returns an error if c can never be granted.
func (d *Driver) check(ctx context.Context, c backend.Claim) error {
	switch {
	case c.Key == "" || c.Token == "":
		return fmt.Errorf("%w: empty key or token", backend.ErrInvalid)
	case c.TTL < backend.MinTTL:
		return fmt.Errorf("%w: ttl %v is below %v", backend.ErrInvalid, c.TTL, backend.MinTTL)
	case c.TTL > maxTTL:
		return fmt.Errorf("%w: ttl %v is above %v", backend.ErrInvalid, c.TTL, maxTTL)
	}
	return d.checkKey(ctx, c.Key)
}

// checkKey returns an error if a call about key makes no sense.
func (d *Driver) checkKey(ctx context.Context, key string) error {
	if n := len(queueOf(key)); n > maxName {
		return fmt.Errorf("%w: the key is too long: etcd takes about %d bytes, and this one has %d", backend.ErrInvalid, maxName, n)
	}
	select {
	case <-d.closed:
		return errClosed
	default:
		return ctx.Err()
	}
}

// definite reports whether a call that returned err has changed nothing.
func definite(err error) bool {
	for _, target := range []error{backend.ErrHeld, backend.ErrLost, backend.ErrInvalid, errors.ErrUnsupported, errGone} {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

// unchanged is definite, and also true of a full disk, which is an outage for callers.
func unchanged(err error) bool {
	return definite(err) || errors.Is(err, errNoSpace) || errors.As(err, new(*unsent))
}

// Close ends all waits, revokes the leases that no hold uses, and closes the connections.
// It waits for etcd for a second at most: what is left then ends with its term. If the
// Driver was opened by URL, Close also closes the client.
func (d *Driver) Close() error {
	d.once.Do(func() { close(d.closed) })
	d.pool.close()

	// Waits that end now leave the queue. What they and the pool begin may take a moment.
	d.mu.Lock()
	quiet := make(chan struct{})
	if d.quiet = quiet; d.active == 0 {
		d.quietLocked()
	}
	d.mu.Unlock()
	t := time.NewTimer(closing)
	defer t.Stop()
	select {
	case <-quiet:
	case <-t.C:
	}

	d.cancel()
	d.cluster.close()
	d.wg.Wait()
	if d.client != nil {
		return d.client.Close()
	}
	return nil
}

// begin counts a Wait, which Close waits for, as for a burial. finish ends it.
func (d *Driver) begin() {
	d.mu.Lock()
	d.active++
	d.mu.Unlock()
}

func (d *Driver) finish() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.finishLocked()
}

func (d *Driver) finishLocked() {
	if d.active--; d.active == 0 {
		d.quietLocked()
	}
}

func (d *Driver) quietLocked() {
	if d.quiet != nil {
		close(d.quiet)
		d.quiet = nil
	}
}

func init() { hasp.Register("etcdlock", open) }
