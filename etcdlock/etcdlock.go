// Package etcdlock keeps locks in an etcd. It serves the waiters of all processes in order of
// arrival.
//
// # Guarantees
//
// A key has one holder at a time, as long as a majority of the members keeps the data. A hold is in
// etcd's log, so it survives a change of the leader, and the loss of a minority of the members. The
// fence is the revision at which the holder joined the queue, so after etcd has lost its data,
// fences may be smaller than before. TryLock does not overtake waiters. Shared claims that are
// neighbours in the queue hold the key together.
//
// etcd checks twice a second which leases have ended, so a term ends up to half a second late. A
// term ends early only if the leader's process was stopped and goes on. Then another caller may get
// the key before the holder learns of it, so check the fence: see docs/etcdlock.md. After a change
// of the leader all terms begin anew.
//
// A waiter that died, or is cut off, keeps its place in the queue for the time in the parameter
// window (5 s by default), plus up to half a second.
//
// A hold lasts as long as etcd has the hold's lease and entry. A renewal keeps the lease alive and
// reads the entry. To end a hold by hand, use hasp's Break or revoke the lease. The holder learns
// of the loss at its next renewal.
//
// # Cost
//
// A lock of a free key takes one transaction. While four are under way, further locks and unlocks
// wait, and go together in the next one. If the driver has no fresh lease left from an earlier
// hold, the lock also takes a keep-alive, or a call that makes a lease. An unlock takes one call. A
// waiter takes one transaction, and a release wakes the waiter by an event. A renewal takes a
// keep-alive, and one read serves the renewals of up to 100 holds. docs/etcdlock.md lists the cost
// of all calls.
//
// # URL
//
//	etcdlock+etcd://user:password@host:2379,host:2379,host:2379
//	etcdlock+etcds://user:password@host:2379,host:2379,host:2379?ca=/path/to/ca.pem
//
// The hosts are all members of one etcd. The parameters are:
//
//	window       how long a waiter keeps its place without a sign of life (default 5s)
//	ca           file of the certificate authorities to trust, in PEM   (etcds)
//	cert, key    files of this client's certificate and key, in PEM     (etcds)
//	server_name  name that the servers' certificates must bear          (etcds)
//
// The files are read again for each connection, so that certificates can be renewed. The user needs
// the permission readwrite on the prefix hasp/.
//
// The members must be etcd 3.5 or later.
package etcdlock

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// Read the files in this order: this one, entry.go, hold.go, gather.go, token.go, lease.go,
// wait.go, watch.go, cluster.go, user.go, beat.go. docs/etcdlock.md says why the protocol is safe.

// etcd counts terms in whole seconds. The shortest term is one and a half times its election
// timeout, rounded up, which is 2 s by default. maxTTL is the longest term that etcd grants.
const (
	minTTL  = 2 * time.Second
	ttlUnit = time.Second
	maxTTL  = clientv3.MaxLeaseTTL * time.Second
)

// maxName bounds the length of an escaped key with its prefix. A request names up to 100 keys, and
// etcd accepts requests of up to 1.5 MiB.
const maxName = 8 << 10

// maxAtOnce bounds how many callers ask for a lease or a place in a queue at once, and how many
// leases are ended at once. Without a bound, thousands of calls would be sent after an outage, time
// out, and be repeated.
const maxAtOnce = 64

// The constant closing bounds how long Close waits until leases have ended.
const closing = time.Second

// slots bounds how many calls are under way at once.
type slots chan struct{}

// take waits for a slot. If ctx ends first, the error is that of ctx.
func (s slots) take(ctx context.Context) error {
	select {
	case s <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s slots) give() { <-s }

// driver is a [backend.Waiter] that keeps its locks in an etcd and serves waiters in order
// of arrival.
type driver struct {
	cluster *cluster
	pool    pool
	changes gather
	window  int64 // Options.Window in seconds
	clock   *clock
	turns   slots              // has room for the callers that may ask for a lease or a place at once
	burials slots              // has room for the revocations that may be under way at once
	active  atomic.Int64       // counts the Waits and revocations under way
	cancel  context.CancelFunc // ends the cluster's context
	open    context.Context    // ends when Close begins
	shut    context.CancelFunc // ends the context open

	mu      sync.Mutex       // guards waiters
	waiters map[*waiter]bool // the Waits under way
}

var (
	_ backend.Waiter    = (*driver)(nil)
	_ backend.Inspector = (*driver)(nil)
	_ backend.Lister    = (*driver)(nil)
)

// defaultWindow is the default of [Options.Window].
const defaultWindow = 5 * time.Second

// Options are the settings of [New]. Nil and the zero value mean the defaults.
type Options struct {
	// Client is the options of the Client that New returns. NewDriver ignores it.
	Client hasp.Options

	// Window is how long a waiter keeps its place in the queue without a sign of life from its
	// process. A waiter that died or is cut off delays the waiters behind it for this long. Window
	// is rounded up to whole seconds. The default is 5 s, the minimum 2 s.
	Window time.Duration
}

// New returns a Client whose locks are in the etcd of conf. The Client creates etcd clients of its
// own, each for one endpoint, with the user and the connection settings of conf. If conf has
// neither a Logger nor a LogConfig, these clients log nothing. If conf has no endpoints, or a value
// in o is out of range, the error is hasp.ErrInvalid.
//
// Like Open, New asks the etcd for its version, and whether the user may read. It waits for answers
// for up to 13 s.
func New(conf clientv3.Config, o *Options) (*hasp.Client, error) {
	// The search for a member takes up to signInTime. The questions to that member have the rest.
	ctx, cancel := context.WithTimeout(cmp.Or(conf.Context, context.Background()), signInTime+searchTime)
	defer cancel()
	o = cmp.Or(o, &Options{})
	d, err := connect(ctx, conf, o, nil)
	if err != nil {
		return nil, fmt.Errorf("etcdlock: %w", backend.Outage(ctx, err))
	}
	return hasp.New(d, &o.Client)
}

// NewDriver returns only the driver that New would use, and does not ask the etcd. It is for the
// conformance suite, or for a wrapper that is passed to [hasp.New].
func NewDriver(conf clientv3.Config, o *Options) (backend.Driver, error) {
	d, err := newDriver(conf, o, nil)
	if err != nil {
		return nil, fmt.Errorf("etcdlock: %w", err)
	}
	return d, nil
}

// certificates reads the files of certificates. It is called for each connection, because programs
// live longer than certificates.
type certificates func() (*tls.Config, error)

// connect returns a driver for an etcd that has answered. If certs is nil, conf has the
// certificates.
func connect(
	ctx context.Context, conf clientv3.Config, o *Options, certs certificates,
) (*driver, error) {
	d, err := newDriver(conf, o, certs)
	if err != nil {
		return nil, err
	}
	if err := d.probe(ctx); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// newDriver returns a driver that has not asked the etcd yet, or an error if conf or o is invalid.
// If certs is nil, conf has the certificates.
func newDriver(conf clientv3.Config, o *Options, certs certificates) (*driver, error) {
	if len(conf.Endpoints) == 0 {
		return nil, invalid("conf has no endpoints")
	}
	o = cmp.Or(o, &Options{})
	window := cmp.Or(o.Window, defaultWindow)
	if window < minTTL {
		return nil, invalid("window %v is below %v", window, minTTL)
	}
	d := &driver{
		window:  seconds(window),
		clock:   newClock(),
		turns:   make(slots, maxAtOnce),
		burials: make(slots, maxAtOnce),
		waiters: map[*waiter]bool{},
	}

	d.changes.d = d
	d.pool = pool{d: d, idle: map[int64][]*lease{}}
	conf.Context, d.cancel = context.WithCancel(context.Background())
	d.open, d.shut = context.WithCancel(conf.Context)
	d.cluster = &cluster{
		conf:  settings(conf),
		certs: certs,
		all:   conf.Endpoints,
		clock: d.clock,
		beats: make(slots, maxBeats),
		ids:   map[string]uint64{},
		ctx:   conf.Context,
	}

	d.cluster.spawn(d.tick)
	return d, nil
}

// tick prunes the pool and the watches once a second. While callers wait, it also makes one of them
// read, which checks that etcd answers. It returns when the driver is closed.
func (d *driver) tick() {
	for d.cluster.ctx.Err() == nil {
		d.wakeOne()
		if m := d.cluster.inUse(); m != nil {
			m.watcher.prune()
		}
		d.pool.prune(idleTime)
		pause(d.cluster.ctx, liveness)
	}
}

// settings returns conf with the settings that the clients of the members need.
func settings(conf clientv3.Config) clientv3.Config {
	if conf.Logger == nil && conf.LogConfig == nil {
		conf.Logger = zap.NewNop()
	}
	// One attempt, because the driver itself repeats the calls that are safe to repeat. 0 would be
	// etcd's default.
	conf.MaxUnaryRetries = 1
	conf.AutoSyncInterval = 0 // each client has one endpoint

	// An answer about entries may exceed 4 MiB, the default of gRPC.
	conf.MaxCallRecvMsgSize = math.MaxInt32

	conf.DialTimeout = searchTime // also bounds a search: see find
	if conf.Username != "" {
		conf.DialTimeout = signInTime // a server checks passwords slowly
	}
	return conf
}

// Traits reports that the driver serves waiters in order of arrival, grants fences and shared
// holds, obeys KeepUntil, and cleans up after calls that fail. Terms are whole seconds, 2 or more.
// The driver excludes all clients of the same etcd, and ends a call soon after the call's context.
func (d *driver) Traits() backend.Traits {
	return backend.Traits{
		Ordered:      true,
		Fenced:       true,
		MinHold:      true,
		Shared:       true,
		Cleans:       true,
		MinTTL:       minTTL,
		TTLUnit:      ttlUnit,
		MaxTTL:       maxTTL,
		Reach:        backend.Network,
		Cancellation: backend.CancelPrompt,
	}
}

// check returns an error if c can never be granted, Close has begun, or ctx is done.
func (d *driver) check(ctx context.Context, c backend.Claim) error {
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

// checkKey returns an error if key is too long, Close has begun, or ctx is done.
func (d *driver) checkKey(ctx context.Context, key string) error {
	if n := len(queueOf(key)); n > maxName {
		return fmt.Errorf("%w: the key is too long: it may have %d bytes, and this one has %d",
			backend.ErrInvalid, maxName, n)
	}
	if d.isClosed() {
		return errClosed
	}
	return ctx.Err()
}

// isClosed reports whether Close has begun.
func (d *driver) isClosed() bool { return d.open.Err() != nil }

// Close ends all waits, revokes the leases that no hold uses, and closes the connections. It waits
// for etcd for a second at most. Leases that were not revoked in that second end with their terms.
func (d *driver) Close() error {
	d.shut()
	d.pool.prune(0)

	// Wait until the leases of the pool, and of the Waits that end now, have been revoked.
	for end := time.Now().Add(closing); d.active.Load() > 0 && time.Now().Before(end); {
		time.Sleep(2 * time.Millisecond)
	}

	d.cancel()
	d.cluster.close()
	return nil
}

func init() { hasp.Register("etcdlock", open, append([]string{"window"}, tlsParams...)...) }
