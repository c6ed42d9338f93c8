package etcdlock

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/hasplock/hasp/backend"
)

// hold is the Handle of a hold of this driver.
type hold struct {
	d       *Driver
	token   string
	entry   *mvccpb.KeyValue // as this driver has written it
	lease   *lease
	granted time.Time
	over    atomic.Bool   // it was released, or lost, or moved to another lease
	busy    chan struct{} // has room for one: a Release or a move is under way

	mu     sync.Mutex // guards both
	others []*lease   // of moves of unknown outcome, the leases that they were to
	ended  bool       // the entry is gone
}

func (d *Driver) newHold(c backend.Claim, entry *mvccpb.KeyValue, l *lease) *hold {
	return &hold{d: d, token: c.Token, entry: entry, lease: l, granted: time.Now(), busy: make(chan struct{}, 1)}
}

// grant returns the grant of h. The holder may trust it for ttl from the last beginning of the
// lease's term on.
func (h *hold) grant(c backend.Claim, ttl time.Duration) backend.Grant {
	began := time.Duration(h.lease.began.Load())
	g := backend.Grant{Until: h.d.clock.time(began).Add(ttl - backend.Drift(ttl)), Handle: h}
	if c.Fenced {
		g.Fence = uint64(h.entry.CreateRevision)
	}
	return g
}

// maxAge limits the age of a pooled lease that is reused without a keep-alive. A tenth of
// the term limits it as well, and only holds that will be renewed may use such a lease.
const maxAge = time.Second

// handleOf returns the hold that c is about, or nil if c must go by its token.
func (d *Driver) handleOf(c backend.Claim) *hold {
	if h := d.ownHold(c); h != nil && !h.over.Load() {
		return h
	}
	return nil
}

// ownHold returns the hold that c is about, also if it is over, or nil if another driver
// made it.
func (d *Driver) ownHold(c backend.Claim) *hold {
	h, _ := c.Handle.(*hold)
	if h == nil || h.d != d || h.token != c.Token {
		return nil
	}
	return h
}

// Acquire takes a key whose queue is empty. A shared claim also takes a key whose queue has
// shared holds only.
func (d *Driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if err := d.check(ctx, c); err != nil {
		return backend.Grant{}, err
	}
	select {
	case d.turns <- struct{}{}:
		defer func() { <-d.turns }()
	case <-ctx.Done():
		return backend.Grant{}, &unsent{ctx.Err()}
	case <-d.closed:
		return backend.Grant{}, errClosed
	}
	for {
		called := d.clock.now()
		l, err := d.pool.take(ctx, seconds(c.TTL))
		if err != nil {
			return backend.Grant{}, err
		}
		g, err := d.acquire(ctx, c, l, called)
		if !errors.Is(err, errGone) {
			return g, err
		}
		// The put was refused, so nothing has changed. The next lease may be alive.
		d.pool.flush()
	}
}

// acquire makes an attempt with a lease. It returns errGone if the lease has ended.
func (d *Driver) acquire(ctx context.Context, c backend.Claim, l *lease, called time.Duration) (backend.Grant, error) {
	// A lease of the pool has run for a while. If the hold will be renewed, a little less
	// than its term will do. Otherwise the term begins anew beside the put.
	var b *beat
	if age := called - time.Duration(l.began.Load()); age > 0 && !(c.Renewed && age < min(c.TTL/10, maxAge)) {
		b = d.cluster.beat(ctx, l.id)
	}

	queue, entry := queueOf(c.Key), newEntry(c, l, time.Now())
	rivals := queue
	if c.Shared {
		rivals += "x"
	}
	r, err := call(ctx, d.cluster, func(m *member) (*pb.TxnResponse, error) {
		return m.kv.Txn(ctx, txn([]*pb.Compare{createdAt(rivals, prefixEnd(rivals), 0)},
			[]*pb.RequestOp{put(string(entry.Key), entry.Value, l.id)}, first(queue)))
	})
	var late error
	if b != nil {
		if <-b.done; b.err == nil && b.ttl > 0 && b.term == r.GetHeader().GetRaftTerm() {
			d.beganAt(l, b.began)
		} else if late = b.err; late == nil {
			late = errDoubtful
		}
		if late != nil {
			l.doubtful.Store(true)
		}
	}
	switch {
	case isGone(err):
		return backend.Grant{}, errGone
	case err != nil && !unchanged(err), err == nil && r.Succeeded && late != nil:
		// The key may be taken, or is taken, but perhaps not for the whole term.
		d.bury(l, "")
		return backend.Grant{}, errors.Join(err, late)
	case err != nil:
		d.pool.give(l)
		return backend.Grant{}, err
	case !r.Succeeded:
		d.pool.give(l)
		return backend.Grant{}, refusal(r.Responses[0].GetResponseRange().Kvs)
	}
	entry.CreateRevision, entry.ModRevision = r.Header.Revision, r.Header.Revision
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

// Renew begins the terms of the leases anew, and reads the entries: see prove. A hold that needs
// a longer term than its lease has moves to another lease.
func (d *Driver) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	var open []*renewal
	var others []int // go by the token, or move
	for i, c := range cs {
		h := d.handleOf(c)
		if err := d.check(ctx, c); err != nil {
			done(i, backend.Grant{}, err)
		} else if h == nil || seconds(c.TTL) > h.lease.ttl {
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
	if len(others) == 0 {
		return
	}

	rest := make([]backend.Claim, len(others))
	for n, i := range others {
		rest[n] = cs[i]
	}
	backend.RenewEach(ctx, rest, func(n int, g backend.Grant, err error) { done(others[n], g, err) }, d.renewOther)
}

// renewal is a keep-alive for a hold, and what a read of its entry says; see read.
type renewal struct {
	i        int // of the claim
	h        *hold
	beat     *beat
	attached bool   // the entry is under the lease
	term     uint64 // of the leader
	err      error
}

// prove sends keep-alives for the leases of holds, reads the entries when they were answered, and
// calls done for each, with errGone if the hold is lost, unless another driver has moved it to
// another lease. A keep-alive that is late delays no other hold, and does not hide that an entry
// is gone: the entries are read after a quarter of the time in any case. The late ones then have
// another turn.
func (d *Driver) prove(ctx context.Context, open []*renewal, done func(*renewal, error)) {
	for _, r := range open {
		r.beat = d.cluster.beat(ctx, r.h.lease.id)
	}
	for len(open) > 0 {
		turn := time.Second
		if end, ok := ctx.Deadline(); ok {
			turn = max(time.Until(end)/4, minTurn)
		}
		within, cancel := context.WithTimeout(ctx, turn)
		answered := make([]bool, len(open))
		for n, r := range open {
			select {
			case <-r.beat.done:
				answered[n] = true
			case <-within.Done():
			}
		}
		cancel()
		d.read(ctx, open)

		var late []*renewal
		for n, r := range open {
			if !answered[n] && ctx.Err() == nil && (r.err != nil || r.attached) {
				late = append(late, r)
			} else {
				done(r, r.outcome())
			}
		}
		open = late
	}
}

// minTurn is for one turn of prove.
const minTurn = 50 * time.Millisecond

// outcome takes in the answers to a keep-alive and to a read of the entry.
//
// A keep-alive alone proves nothing. A leader that was deposed may answer it, and so may the
// leader while it revokes the lease. The read proves that the lease was alive after the answer. If
// both answers are from the same term of a leader, it has begun the lease's term anew.
func (r *renewal) outcome() error {
	h := r.h
	if r.err == nil && !r.attached {
		h.abandon()
		return errGone
	}
	<-r.beat.done // at the latest when the context has ended
	switch b := r.beat; {
	case b.err == nil && b.ttl <= 0:
		h.over.Store(true)
		return errGone
	case b.err != nil:
		// It may still arrive, and prolong whatever the lease is used for then.
		h.lease.doubtful.Store(true)
		return b.err
	case r.err != nil:
		return r.err
	case b.term != r.term:
		h.lease.doubtful.Store(true)
		return errDoubtful
	default:
		h.d.beganAt(h.lease, b.began)
		return nil
	}
}

const (
	maxReads = 100     // entries that one transaction reads; etcd allows 128
	maxNames = 1 << 19 // bytes of their names; etcd takes requests of 1.5 MiB
)

// read reads the entries of holds.
func (d *Driver) read(ctx context.Context, all []*renewal) {
	var wg sync.WaitGroup
	for len(all) > 0 {
		var reads []*pb.RequestOp
		for size := 0; len(reads) < min(len(all), maxReads) && (size == 0 || size < maxNames); {
			entry := string(all[len(reads)].h.entry.Key)
			reads = append(reads, name(entry))
			size += len(entry)
		}
		some := all[:len(reads)]
		all = all[len(reads):]
		wg.Go(func() {
			res, err := call(ctx, d.cluster, func(m *member) (*pb.TxnResponse, error) { return m.kv.Txn(ctx, txn(nil, reads)) })
			for i, r := range some {
				if r.err = err; err == nil {
					kvs := res.Responses[i].GetResponseRange().Kvs
					r.attached = len(kvs) == 1 && kvs[0].CreateRevision == r.h.entry.CreateRevision && kvs[0].Lease == r.h.lease.id
					r.term = res.Header.RaftTerm
				}
			}
		})
	}
	wg.Wait()
}

// abandon ends the lease of a hold whose entry is not under it, unless a Release does that.
// A Release may also be why the entry is gone. Then it may have given the lease to another
// hold, so it must not be revoked here.
func (h *hold) abandon() {
	select {
	case h.busy <- struct{}{}:
		defer func() { <-h.busy }()
	default:
		return
	}
	if h.over.CompareAndSwap(false, true) {
		h.d.bury(h.lease, "")
	}
}

// renewOther renews a hold that needs a longer term than its lease has, or that is not
// known by its lease.
func (d *Driver) renewOther(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if h := d.handleOf(c); h != nil {
		g, err := d.lengthen(ctx, c, h.entry)
		if errors.Is(err, errNoSpace) {
			// etcd has no space to move the hold to another lease, but the present one lasts.
			d.prove(ctx, []*renewal{{h: h}}, func(_ *renewal, e error) { err = e })
			g = h.grant(c, min(c.TTL, time.Duration(h.lease.ttl)*time.Second))
		}
		if !errors.Is(err, errGone) {
			return g, err
		}
	}
	return d.renewByToken(ctx, c)
}

// Release removes the entry of the hold or of the place in the queue.
func (d *Driver) Release(ctx context.Context, c backend.Claim) error {
	select {
	case <-d.closed:
		return errClosed
	default:
	}
	if c.Shared {
		c.KeepUntil = time.Time{}
	}
	h := d.handleOf(c)
	if h == nil || c.KeepUntil.After(time.Now()) {
		return d.releaseByToken(ctx, c)
	}

	// Only one Release at a time may remove the name. The next hold of the lease may have
	// the same.
	select {
	case h.busy <- struct{}{}:
		defer func() { <-h.busy }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if h.over.Load() {
		return d.releaseByToken(ctx, c)
	}
	removed, err := d.removeEntry(ctx, h.lease, string(h.entry.Key), h.entry.CreateRevision)
	h.over.Store(true)
	if err == nil {
		d.settle(c, 0) // a move may have begun meanwhile
	}
	if err == nil && removed {
		d.pool.give(h.lease)
		return nil
	}
	d.bury(h.lease, "")
	if err == nil {
		err = backend.ErrLost
	}
	return err
}

// removeEntry removes an entry of a lease of this driver. It reports whether it was there,
// with the create revision, unless that is 0.
func (d *Driver) removeEntry(ctx context.Context, l *lease, name string, revision int64) (bool, error) {
	r, err := call(ctx, d.cluster, func(m *member) (*pb.DeleteRangeResponse, error) {
		return m.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte(name), PrevKv: true})
	})
	if err != nil || len(r.PrevKvs) == 0 {
		return false, err
	}
	if r.PrevKvs[0].Lease != l.id {
		// The entry was moved to another lease, by a renewal that was still under way or by
		// another driver, which may revoke this one.
		l.doubtful.Store(true)
		d.bury(d.foreign(r.PrevKvs[0].Lease), "")
	}
	return revision == 0 || r.PrevKvs[0].CreateRevision == revision, nil
}
