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

	// True if the hold is released, lost or maybe moved. Only the call that sets this flag may end
	// or reuse the lease. If doubt has set it, only settle may end the lease.
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
	// A new lease needs none: it was made after called, so its age is not positive.
	var beats chan beat // gets the keep-alive; nil if none is sent
	age := called - time.Duration(l.began.Load())
	isYoung := c.Renewed && age < min(c.TTL/10, maxAge)
	if age > 0 && !isYoung {
		beats = make(chan beat, 1)
		go func() { beats <- d.cluster.beat(ctx, l.id) }()
	}

	entry := newEntry(c, l, time.Now())
	// The key is free for c if no name with this prefix exists.
	isFree := clientv3.Compare(clientv3.CreateRevision(rivalsOf(c)), "=", 0).WithPrefix()
	r, err := d.changes.do(&change{
		ctx:       ctx,
		key:       c.Key,
		conds:     []clientv3.Cmp{isFree},
		then:      []clientv3.Op{put(string(entry.Key), entry.Value, l.id)},
		otherwise: []clientv3.Op{clientv3.OpGet(queueOf(c.Key), clientv3.WithFirstCreate()...)},
	})

	isPut := err == nil && r.Succeeded
	var beatErr error
	if isPut && beats != nil {
		b := <-beats
		// The put may have come before the keep-alive. So count the term only from called on.
		b.began = called
		beatErr = b.outcome(l, r)
	}

	isUnknown := err != nil && !unchanged(err)
	switch {
	case isGone(err):
		return backend.Grant{}, errGone
	case isUnknown, beatErr != nil:
		// The entry is there, or it may be. If a keep-alive has failed, the lease may end too
		// early. In both cases end the lease, and thereby the entry.
		d.bury(l)
		return backend.Grant{}, errors.Join(err, beatErr) // only one of them is not nil
	case err != nil: // the put was certainly not carried out
		d.pool.give(l)
		return backend.Grant{}, err
	case !isPut: // the key is taken
		d.pool.give(l)
		return backend.Grant{}, refusal(r.Responses[0].GetResponseRange().Kvs)
	}

	entry.CreateRevision = r.Header.Revision
	entry.ModRevision = r.Header.Revision
	return d.newHold(c, entry, l).grant(c, c.TTL), nil
}

// refusal returns the HeldError for a queue that begins with kvs. If kvs is empty, because the
// holder is not known, the error names none.
func refusal(kvs []*mvccpb.KeyValue) error {
	he := &backend.HeldError{}
	if len(kvs) > 0 {
		r, _ := parseRecord(kvs[0].Value)
		he.Owner = r.owner
		he.Shared = isShared(kvs[0].Key)
	}
	return he
}

// Renew begins the terms of the leases anew, and reads the entries (see prove). If a hold needs a
// longer term than its lease has, Renew moves the hold to another lease. It calls the function done
// once for each claim, with the claim's index.
func (d *driver) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	var renewals []*renewal
	var others []int // the indexes of the claims to renew by the token or by a move
	for i, c := range cs {
		if err := d.check(ctx, c); err != nil {
			done(i, backend.Grant{}, err)
			continue
		}
		h := d.ownHold(c)
		if h == nil || h.over.Load() || seconds(c.TTL) > h.lease.ttl {
			others = append(others, i)
		} else {
			renewals = append(renewals, &renewal{i: i, h: h})
		}
	}

	d.prove(ctx, renewals, func(r *renewal, err error) {
		if errors.Is(err, errGone) {
			// The hold may not be lost, but moved by another driver. renewOther finds it by its
			// token.
			others = append(others, r.i)
		} else {
			done(r.i, backend.Grant{}, err) // without an error, the zero Grant means the whole TTL
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

// prove sends keep-alives for the leases of holds, then reads the entries. It calls the function
// done for each hold: with nil if the lease's term has begun anew, with errGone if the hold is lost
// or another driver has moved it, and with another error if the outcome is unknown.
func (d *driver) prove(ctx context.Context, renewals []*renewal, done func(*renewal, error)) {
	d.beatAndRead(ctx, renewals)

	// Another member may have come into use between a keep-alive and the read. Answers of two
	// members prove nothing together, so ask once more.
	isSplit := func(r *renewal) bool {
		answered := r.beat.err == nil && r.err == nil
		return answered && r.beat.m != r.read.m
	}
	if slices.ContainsFunc(renewals, isSplit) {
		d.beatAndRead(ctx, renewals)
	}
	for _, r := range renewals {
		done(r, r.outcome())
	}
}

// beatAndRead sends the keep-alives, waits for the answers, then reads the entries. The keep-alives
// have half of the time that ctx leaves, so that time for the read is left if one has no answer.
// Then that renewal fails, but the read may still show that its hold is lost.
func (d *driver) beatAndRead(ctx context.Context, renewals []*renewal) {
	within := ctx // for the keep-alives
	if end, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		within, cancel = context.WithTimeout(ctx, time.Until(end)/2)
		defer cancel()
	}
	var wg sync.WaitGroup
	for _, r := range renewals {
		wg.Go(func() { r.beat = d.cluster.beat(within, r.h.lease.id) })
	}
	wg.Wait()
	d.read(ctx, renewals)
}

// maxReads is how many entries one transaction reads. etcd allows 128 operations in a transaction,
// and requests of up to 1.5 MiB.
const maxReads = 100

// The method read reads the entries of the holds, and sets the fields attached, read and err of
// their renewals.
func (d *driver) read(ctx context.Context, renewals []*renewal) {
	var wg sync.WaitGroup
	for batch := range slices.Chunk(renewals, maxReads) {
		wg.Go(func() {
			var reads []clientv3.Op
			for _, r := range batch {
				reads = append(reads, clientv3.OpGet(string(r.h.entry.Key)))
			}
			res, err := d.txn(ctx, nil, reads)
			for i, r := range batch {
				r.err = err
				if err == nil {
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

// outcome returns nil if the lease's term has begun anew. It abandons the hold and returns errGone
// if the lease has ended, or the entry is not under the lease any more. Then the hold is lost,
// unless another driver has moved the entry. After any other error the outcome is unknown.
func (r *renewal) outcome() error {
	leaseEnded := r.beat.err == nil && r.beat.ttl <= 0
	entryGone := r.err == nil && !r.attached
	if leaseEnded || entryGone {
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

// The method doubt is called after a move of unknown outcome from h.lease to the lease other. The
// entry may be under either lease, so unless h has ended, both leases live on. The next renewal or
// release changes the entry and calls settle. If another driver made the hold, h is nil.
func (h *hold) doubt(other *lease) {
	if h == nil {
		return // nothing renews the lease other until a later call finds the entry under it
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.over.Store(true) // under mu, so that settle either ends h.lease, or finds it in others
	switch {
	case !h.ended:
		h.others = append(h.others, h.lease, other)
	case other != h.lease:
		// The entry is gone, so end the lease other. Leave h.lease alone: a Release may have given
		// it back to the pool, and another hold may use it.
		h.d.bury(other)
	}
}

// The method settle ends the leases that h's entry was or may have been under. It is called after
// the entry was moved to another lease, or removed. If it was removed, ended is true. After that, a
// put of h that arrives late has no effect, because the entry has changed, or the lease of the put
// has ended. If h is nil, settle does nothing.
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
		c.KeepUntil = time.Time{} // has no effect on a shared hold
	}
	h := d.ownHold(c)
	if h == nil || c.KeepUntil.After(time.Now()) {
		return d.releaseByToken(ctx, c)
	}
	if h.over.Swap(true) { // it was set already, so the entry may be gone or under another lease
		return d.releaseByToken(ctx, c)
	}

	// This call has set h.over, so no other call gives the lease back to the pool.
	_, err := d.change(ctx, h.entry, clientv3.OpDelete(string(h.entry.Key)))
	if err == nil {
		// A move may have begun meanwhile, and have left leases in h.others. If settle ends h.lease
		// as one of them, give does not reuse it.
		h.settle(true)
		d.pool.give(h.lease)
		return nil
	}

	d.bury(h.lease) // must not be reused, because the entry may still be under it
	if errors.Is(err, errGone) {
		return d.releaseByToken(ctx, c) // find the entry, if it was moved and not removed
	}
	return err
}
