package etcdlock

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hasplock/hasp/backend"
)

// hold is the Handle of a hold of this driver.
type hold struct {
	d       *driver
	token   string
	entry   *mvccpb.KeyValue // the entry as this driver has written it
	lease   *lease
	granted time.Time

	// True if the hold is released, lost or maybe moved. Only the call that sets this flag may end or
	// reuse the lease. After doubt, that is settle.
	over atomic.Bool

	mu     sync.Mutex // guards others and ended
	others []*lease   // leases that the entry may be under, after moves of unknown outcome
	ended  bool       // true if the entry is gone
}

func (d *driver) newHold(c backend.Claim, entry *mvccpb.KeyValue, l *lease) *hold {
	return &hold{d: d, token: c.Token, entry: entry, lease: l, granted: time.Now()}
}

// grant returns the grant of h. The holder may trust the hold for ttl, counted from the time at
// which the lease's term last began.
func (h *hold) grant(c backend.Claim, ttl time.Duration) backend.Grant {
	// Read Go's clock first. A suspend in between then makes Until too early, which is safe.
	now, age := time.Now(), h.d.age(h.lease)
	g := backend.Grant{Until: now.Add(ttl - backend.Drift(ttl) - age), Handle: h}
	if c.Fenced {
		g.Fence = uint64(h.entry.CreateRevision)
	}
	return g
}

// ownHold returns c's hold, even if its field over is set, or nil if another driver made the hold.
func (d *driver) ownHold(c backend.Claim) *hold {
	h, _ := c.Handle.(*hold)
	if h == nil || h.d != d || h.token != c.Token {
		return nil
	}
	return h
}

// A hold that will be renewed may begin on a pooled lease without a keep-alive, if the lease is
// younger than maxAge and younger than a tenth of the term.
const maxAge = time.Second

// Acquire takes a key whose queue is empty. A shared claim also takes a key whose queue contains
// only shared entries.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if err := d.check(ctx, c); err != nil {
		return backend.Grant{}, err
	}
	if err := d.turns.take(ctx); err != nil {
		return backend.Grant{}, &noChange{err}
	}
	defer d.turns.give()

	for {
		called := d.clock.now()
		l, err := d.pool.take(ctx, seconds(c.TTL), called)
		if err != nil {
			return backend.Grant{}, err
		}
		g, err := d.acquire(ctx, c, l, called)
		if !errors.Is(err, errGone) {
			return g, err
		}

		// Try again without the pooled leases, because they may have ended as well.
		d.pool.prune(0)
	}
}

// acquire makes an attempt with a lease. It returns errGone if the lease has ended.
func (d *driver) acquire(
	ctx context.Context, c backend.Claim, l *lease, called time.Duration,
) (backend.Grant, error) {
	// Part of the term of a pooled lease has passed. If that part is small, and the hold will be
	// renewed, go on. Otherwise begin the term anew by a keep-alive, at the same time as the put.
	var renewed chan beat
	age := called - time.Duration(l.began.Load())
	isYoung := c.Renewed && age < min(c.TTL/10, maxAge)
	if age > 0 && !isYoung {
		renewed = make(chan beat, 1)
		go func() { renewed <- d.cluster.beat(ctx, l.id) }()
	}

	entry := newEntry(c, l, time.Now())
	rivals := queueOf(c.Key)
	if c.Shared {
		rivals += "x"
	}
	isFree := clientv3.Compare(clientv3.CreateRevision(rivals), "=", 0).WithPrefix()
	r, err := d.changes.do(&change{
		ctx:       ctx,
		key:       c.Key,
		conds:     []clientv3.Cmp{isFree},
		then:      []clientv3.Op{put(string(entry.Key), entry.Value, l.id)},
		otherwise: []clientv3.Op{clientv3.OpGet(queueOf(c.Key), clientv3.WithFirstCreate()...)},
	})

	var late error
	if renewed != nil && err == nil && r.Succeeded {
		b := <-renewed
		b.began = called // the put may have come before the keep-alive, and proves no later moment
		late = b.outcome(l, r)
	}

	isUnknown := err != nil && !unchanged(err)
	isDoubtful := err == nil && r.Succeeded && late != nil
	switch {
	case isGone(err):
		return backend.Grant{}, errGone
	case isUnknown, isDoubtful:
		// End the lease, because it may hold the key, but perhaps not for the whole term.
		d.bury(l)
		return backend.Grant{}, errors.Join(err, late)
	case err != nil:
		d.pool.give(l)
		return backend.Grant{}, err
	case !r.Succeeded:
		d.pool.give(l)
		return backend.Grant{}, refusal(r.Responses[0].GetResponseRange().Kvs)
	}

	entry.CreateRevision = r.Header.Revision
	entry.ModRevision = r.Header.Revision
	return d.newHold(c, entry, l).grant(c, c.TTL), nil
}

// refusal returns the HeldError of a queue whose first entry is in kvs.
func refusal(kvs []*mvccpb.KeyValue) error {
	he := &backend.HeldError{}
	if len(kvs) > 0 {
		r, _ := parseRecord(kvs[0].Value)
		he.Owner, he.Shared = r.owner, isShared(kvs[0].Key)
	}
	return he
}

// Renew begins the terms of the leases anew, and reads the entries (see prove). If a hold needs a
// longer term than its lease has, Renew moves the hold to another lease.
func (d *driver) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	var open []*renewal
	var others []int // the indexes of the claims to renew by the token or by a move
	for i, c := range cs {
		h := d.ownHold(c)
		if err := d.check(ctx, c); err != nil {
			done(i, backend.Grant{}, err)
		} else if h == nil || h.over.Load() || seconds(c.TTL) > h.lease.ttl {
			others = append(others, i)
		} else {
			open = append(open, &renewal{i: i, h: h})
		}
	}

	d.prove(ctx, open, func(r *renewal, err error) {
		if errors.Is(err, errGone) {
			others = append(others, r.i)
		} else {
			done(r.i, backend.Grant{}, err)
		}
	})

	rest := make([]backend.Claim, len(others))
	for n, i := range others {
		rest[n] = cs[i]
	}
	answer := func(n int, g backend.Grant, err error) { done(others[n], g, err) }
	backend.RenewEach(ctx, rest, answer, d.renewOther)
}

// renewal is a keep-alive for a hold, and the result of a read of the hold's entry.
type renewal struct {
	i        int // the index of the claim
	h        *hold
	beat     beat
	attached bool      // the entry is under the lease
	read     txnAnswer // the answer to the read
	err      error     // the error of the read
}

// prove sends keep-alives for the leases of holds, then reads the entries, and calls the function
// done for each hold, with errGone if the hold is lost. If a keep-alive has no answer in half of
// the time that ctx leaves, that renewal fails, so that the other renewals need not wait for it.
// The read may still show that its hold is lost.
func (d *driver) prove(ctx context.Context, open []*renewal, done func(*renewal, error)) {
	d.beatAndRead(ctx, open)

	// The member may have been given up between the keep-alives and the read.
	isSplit := func(r *renewal) bool {
		answered := r.beat.err == nil && r.err == nil
		return answered && r.beat.m != r.read.m
	}
	if slices.ContainsFunc(open, isSplit) {
		d.beatAndRead(ctx, open)
	}
	for _, r := range open {
		done(r, r.outcome())
	}
}

func (d *driver) beatAndRead(ctx context.Context, open []*renewal) {
	within, cancel := ctx, context.CancelFunc(func() {})
	if end, ok := ctx.Deadline(); ok {
		within, cancel = context.WithTimeout(ctx, time.Until(end)/2)
	}
	var wg sync.WaitGroup
	for _, r := range open {
		wg.Go(func() { r.beat = d.cluster.beat(within, r.h.lease.id) })
	}
	wg.Wait()
	cancel()
	d.read(ctx, open)
}

// maxReads is how many entries one transaction reads. etcd allows 128 operations in a transaction,
// and requests of up to 1.5 MiB.
const maxReads = 100

// The method read fetches the entries of the holds in the slice open.
func (d *driver) read(ctx context.Context, open []*renewal) {
	var wg sync.WaitGroup
	for some := range slices.Chunk(open, maxReads) {
		wg.Go(func() {
			var reads []clientv3.Op
			for _, r := range some {
				reads = append(reads, clientv3.OpGet(string(r.h.entry.Key)))
			}
			res, err := d.txn(ctx, nil, reads)
			for i, r := range some {
				if r.err = err; err == nil {
					kvs := res.Responses[i].GetResponseRange().Kvs
					r.attached = isUnder(kvs, r.h.entry, r.h.lease)
					r.read = res
				}
			}
		})
	}

	wg.Wait()
}

// isUnder reports whether kvs, the answer to a read of an entry, has the same entry under a lease.
func isUnder(kvs []*mvccpb.KeyValue, entry *mvccpb.KeyValue, l *lease) bool {
	if len(kvs) == 0 {
		return false
	}
	return kvs[0].CreateRevision == entry.CreateRevision && kvs[0].Lease == l.id
}

// outcome returns errGone if the lease has ended, or the entry is not under the lease any more. In
// both cases the hold is lost, unless another driver has moved the entry.
func (r *renewal) outcome() error {
	if r.err == nil && !r.attached || r.beat.err == nil && r.beat.ttl <= 0 {
		r.h.abandon()
		return errGone
	}
	if r.err != nil {
		return r.err
	}
	return r.beat.outcome(r.h.lease, r.read)
}

// The method abandon ends the lease of h, because the entry of h is not under that lease any more.
// It does nothing if another call has set h.over.
func (h *hold) abandon() {
	if !h.over.Swap(true) {
		h.d.bury(h.lease)
	}
}

// The method doubt records that h's entry may be under h.lease or the argument other. Unless h has
// ended, both leases live on. The next renewal or release changes the entry and calls settle.
func (h *hold) doubt(other *lease) {
	if h == nil {
		return // the new lease serves the hold, or ends by itself
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.over.Store(true) // under mu, so that settle either ends h.lease, or finds it in others
	switch {
	case !h.ended:
		h.others = append(h.others, h.lease, other)
	case other != h.lease: // because a Release may have given h.lease back to the pool, another hold may use it
		h.d.bury(other)
	}
}

// The method settle ends the leases of h that no entry uses; h may be nil. It is called after the
// entry was moved to another lease, or removed. So a put of h that arrives late has no effect,
// because the entry has changed, or the lease of the put has ended.
func (h *hold) settle(ended bool) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.abandon()
	for _, l := range h.others {
		h.d.bury(l)
	}
	h.others = nil
	h.ended = h.ended || ended
}

// Release removes the entry with c's token, whether that is a hold or a place in the queue.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	if d.isClosed() {
		return errClosed
	}
	if c.Shared {
		c.KeepUntil = time.Time{}
	}
	h := d.ownHold(c)
	if h == nil || c.KeepUntil.After(time.Now()) || h.over.Swap(true) {
		return d.releaseByToken(ctx, c)
	}

	// Because h.over is true now, no other call gives the lease back to the pool.
	_, err := d.change(ctx, h.entry, clientv3.OpDelete(string(h.entry.Key)))
	if err == nil {
		h.settle(true) // a move may have begun meanwhile
		d.pool.give(h.lease)
		return nil
	}

	d.bury(h.lease)
	if errors.Is(err, errGone) {
		return d.releaseByToken(ctx, c) // the entry was moved to another lease, or removed
	}
	return err
}
