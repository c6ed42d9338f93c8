package redlock

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// driver is a [backend.Driver] that keeps its locks on several masters. Its parts own their state:
// members know the nodes, holds keep the records of this driver on the nodes, and a contest takes
// keys. A ballot counts the votes on one question.
type driver struct {
	m       *members
	hs      *holds
	ct      *contest
	maxTTL  time.Duration
	missing error // the errors of the nodes that Open did not reach; nil if it reached all
}

var (
	_ backend.Waiter    = (*driver)(nil)
	_ backend.Inspector = (*driver)(nil)
	_ backend.Lister    = (*driver)(nil)
	_ backend.Degraded  = (*driver)(nil)
)

// newDriver returns a driver over stores. The argument names contains the address of each node, or
// "" if the address is not known. The error is ErrInvalid.
func newDriver(stores []*redisstore.Store, names []string, o *Options) (*driver, error) {
	opts := *cmp.Or(o, &Options{})
	opts.MaxTTL = cmp.Or(opts.MaxTTL, defaultMaxTTL)
	if opts.MaxTTL < backend.MinTTL {
		return nil, invalid("max_ttl %v is below %v", opts.MaxTTL, backend.MinTTL)
	}
	var err error
	if opts.FenceTTL, err = redisstore.CheckFenceTTL(opts.FenceTTL); err != nil {
		return nil, err
	}
	if err := checkNodes(names, opts.AllowUnsafeNodes); err != nil {
		return nil, err
	}

	m := newMembers(stores, names, &opts)
	ct := &contest{id: rand.Text(), m: m, wanted: map[string]time.Time{}}
	ct.hs = newHolds(m, &opts, ct.refused)
	return &driver{m: m, hs: ct.hs, ct: ct, maxTTL: opts.MaxTTL}, nil
}

// invalid returns an error that is backend.ErrInvalid.
func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %w", backend.ErrInvalid, fmt.Errorf(format, args...))
}

// unsafeHint is the end of each error text that Options.AllowUnsafeNodes prevents.
const unsafeHint = ", or set allow_unsafe_nodes=true (Options.AllowUnsafeNodes)"

// checkNodes returns an error if there are no nodes. Unless allowUnsafe is set, it also returns an
// error if the set tolerates no failure, or no more failures than a smaller set, or if a node would
// vote twice. The argument names is that of newDriver.
func checkNodes(names []string, allowUnsafe bool) error {
	n := len(names)
	switch {
	case n == 0:
		return invalid("no nodes: name at least 3, as in redlock+redis://a:6379,b:6379,c:6379")
	case allowUnsafe:
		return nil
	case n <= 2:
		const text = "of %d nodes none may fail: name at least 3 (for one Redis use spinlock)"
		return invalid(text+unsafeHint, n)
	case n%2 == 0:
		const text = "%d nodes tolerate no more failures than %d do: name an odd number"
		return invalid(text+unsafeHint, n, n-1)
	}

	for i, name := range names {
		if name != "" && slices.Contains(names[:i], name) {
			return invalid("node %s is named twice, and would vote twice: name it once"+unsafeHint, name)
		}
	}

	return nil
}

// Traits describes the driver.
func (d *driver) Traits() backend.Traits {
	return backend.Traits{
		Fenced:       true,
		MinHold:      true,
		MaxTTL:       d.maxTTL,
		Reach:        backend.Network,
		Cancellation: backend.CancelPrompt,
	}
}

// Missing returns the errors of the nodes that Open did not reach, or nil if it reached all.
func (d *driver) Missing() error { return d.missing }

// Acquire takes c.Key if it is free on a quorum of the nodes.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return d.ct.acquire(ctx, c)
}

// Wait takes c.Key when it becomes free, and queues until then.
func (d *driver) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return newWaiting(d.ct, c).wait(ctx)
}

// Renew prolongs holds, and writes them to the nodes that have lost them.
func (d *driver) Renew(
	ctx context.Context, cs []backend.Claim, done func(i int, g backend.Grant, err error),
) {
	d.hs.renew(ctx, cs, done)
}

// Release removes the record of c.Token from all nodes.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	return d.hs.release(ctx, c)
}

// Inspect reports the holder of key, whose record a quorum of the nodes stores. The Status has no
// Since and no Waiters, because records do not contain these values. If the holder does not use
// hasp, the Status has no Owner.
func (d *driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	wait := func(surveys []*survey) time.Duration {
		s := surveys[0] // of the only key
		if s.holder != nil || s.free >= d.m.quorum() {
			return 0 // a quorum agrees
		}
		return forever
	}
	s := d.m.query(ctx, []string{key}, inspectTimeout, nil, wait)[0]
	if err := s.outage(ctx); err != nil {
		return backend.Status{}, err
	}
	return s.status(), nil
}

// List yields the keys whose record a quorum of the nodes has.
func (d *driver) List(
	ctx context.Context, prefix string, timeout time.Duration,
) iter.Seq2[backend.Entry, error] {
	return list(ctx, d.m, prefix, timeout)
}

// Break removes whatever is stored under key from all nodes that answer, and publishes the release.
// It waits for all nodes: a removal that arrived later could remove the next holder's record. If a
// node does not answer within inspectTimeout, Break returns nil if a quorum has answered.
func (d *driver) Break(ctx context.Context, key string) error {
	if !d.m.begin() {
		return errClosed
	}
	defer d.m.work.Done()

	// Make this driver's own renewals of the key fail, because they would write the record again.
	d.hs.end(key)

	// Wait for all nodes, as said above. If ctx ends, the calls continue, so the key may still
	// become free.
	return d.m.poll(ctx, true, func(n *node) error {
		// Ask a suspect node as well, because its record would stay.
		return n.exchange(inspectTimeout, func(ctx context.Context) error {
			_, err := n.store.Run(ctx, breakScript, redisstore.Call{
				Keys: keysOf(key),
				Args: []string{channelOf(key), "broken"}, // no waiter has the token "broken"
			})
			return err
		})
	})
}

// Close waits at most 3 s for the commands in flight, and for the release of the records that these
// commands leave on nodes. A record that stays would block its key for a term. Close then closes
// the connections of waiters and, if the driver was opened by URL, all other connections.
func (d *driver) Close() error { return d.m.close() }
