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
	d     *Driver
	token string
	entry *mvccpb.KeyValue // as this driver has written it
	lease *lease
	over  atomic.Bool   // it was released, or lost, or moved to another lease
	busy  chan struct{} // has room for one: a Release or a move is under way

	mu     sync.Mutex // guards both
	others []*lease   // of moves of unknown outcome, the leases that they were to
	ended  bool       // the entry is gone
}

// newHold returns the grant of an entry. The holder may trust it for ttl from began on, by
// the clock.
func (d *Driver) newHold(c backend.Claim, entry *mvccpb.KeyValue, l *lease, began, ttl time.Duration) backend.Grant {
	g := backend.Grant{Until: d.clock.time(began).Add(ttl - backend.Drift(ttl)),
		Handle: &hold{d: d, token: c.Token, entry: entry, lease: l, busy: make(chan struct{}, 1)}}
	if c.Fenced {
		g.Fence = uint64(entry.CreateRevision)
	}
	return g
}

// maxAge limits the age of a pooled lease that is reused without a keep-alive. A tenth of
// the term limits it as well, and only holds that will be renewed may use such a lease.
const maxAge = time.Second

// newEntry returns the entry that a claim makes with a lease. Its revisions are 0.
func newEntry(c backend.Claim, l *lease) *mvccpb.KeyValue {
	r := record{fenced: c.Fenced, token: c.Token, since: time.Now(), owner: c.Owner}
	return &mvccpb.KeyValue{Key: []byte(entryName(c.Key, l.id, c.Shared)), Value: r.encode(), Lease: l.id}
}

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
	began := called
	if at := time.Duration(l.began.Load()); at < called && c.Renewed && called-at < min(c.TTL/10, maxAge) {
		began = at
	} else if at < called {
		var err error
		if b, err = d.cluster.beat(ctx, l.id); err != nil {
			d.bury(l, "", "")
			return backend.Grant{}, err
		}
	}

	queue, entry := queueOf(c.Key), newEntry(c, l)
	rivals := queue
	if c.Shared {
		rivals += "x"
	}
	r, err := call(ctx, d.cluster, func(m *member) (*pb.TxnResponse, error) {
		return m.kv.Txn(ctx, txn([]*pb.Compare{createdAt(rivals, prefixEnd(rivals), 0)},
			[]*pb.RequestOp{put(string(entry.Key), entry.Value, l.id)}, first(queue)))
	})
	switch {
	case isGone(err):
		return backend.Grant{}, errGone
	case err != nil:
		if unchanged(err) {
			d.pool.give(l)
		} else {
			d.bury(l, c.Token, "")
		}
		return backend.Grant{}, err
	}

	if b != nil {
		ttl, err := b.wait(ctx)
		if err == nil && ttl > 0 {
			d.beganAt(l, b.began)
		}
		if r.Succeeded && (err != nil || ttl <= 0) {
			// The key is taken, but perhaps not for the whole term.
			if err == nil {
				err = errors.New("etcd: the lease ended just when the key was taken")
			}
			d.bury(l, c.Token, "")
			return backend.Grant{}, err
		}
		if err != nil || ttl <= 0 {
			l.doubtful.Store(true)
		}
	}
	if !r.Succeeded {
		d.pool.give(l)
		return backend.Grant{}, refusal(r.Responses[0].GetResponseRange().Kvs)
	}
	entry.CreateRevision, entry.ModRevision = r.Header.Revision, r.Header.Revision
	return d.newHold(c, entry, l, began, c.TTL), nil
}

// refusal returns the HeldError of a queue whose first entry is in kvs.
func refusal(kvs []*mvccpb.KeyValue) error {
	he := &backend.HeldError{}
	if len(kvs) > 0 {
		if r, ok := parseRecord(kvs[0].Value); ok {
			he.Owner = r.owner
		}
		he.Shared = isShared(kvs[0].Key)
	}
	return he
}

// Renew begins the terms of the leases anew, on streams that all renewals share. It also
// reads the entries: if another process has removed one and died before it revoked the lease,
// the hold is lost although its lease lives. A hold that needs a longer term than its lease
// has moves to another lease.
func (d *Driver) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	type sent struct {
		i int
		h *hold
		*beat
	}
	var beats []sent
	var others []int // go by the token, or move
	for i, c := range cs {
		if err := d.check(ctx, c); err != nil {
			done(i, backend.Grant{}, err)
			continue
		}
		h := d.handleOf(c)
		if h == nil || seconds(c.TTL) > h.lease.ttl {
			others = append(others, i)
			continue
		}
		b, err := d.cluster.beat(ctx, h.lease.id)
		if err != nil {
			done(i, backend.Grant{}, err)
			continue
		}
		beats = append(beats, sent{i, h, b})
	}

	hs := make([]*hold, len(beats))
	for n, s := range beats {
		hs[n] = s.h
	}
	attached, failed := d.attached(ctx, hs)
	// A stream may answer late, and must not delay what is known of the holds on other streams.
	take := func(n int) {
		s := beats[n]
		if err := s.h.renewed(ctx, s.beat, attached[n], failed[n]); errors.Is(err, errGone) {
			others = append(others, s.i)
		} else {
			done(s.i, backend.Grant{}, err)
		}
	}
	var late []int
	for n, s := range beats {
		select {
		case <-s.beat.done:
			take(n)
		default:
			late = append(late, n)
		}
	}
	answered := make(chan int, len(late))
	for _, n := range late {
		go func() { _, _ = beats[n].beat.wait(ctx); answered <- n }()
	}
	for range late {
		take(<-answered)
	}
	if len(others) == 0 {
		return
	}

	rest := make([]backend.Claim, len(others))
	for n, i := range others {
		rest[n] = cs[i]
	}
	backend.RenewEach(ctx, rest, func(n int, g backend.Grant, err error) { done(others[n], g, err) }, d.renewOther)
}

const (
	maxReads = 100     // entries that one transaction reads; etcd allows 128
	maxNames = 1 << 19 // bytes of their names; etcd takes requests of 1.5 MiB
)

// attached reports which holds have an entry that is under their lease. A hold whose read
// failed has an error instead.
func (d *Driver) attached(ctx context.Context, hs []*hold) (is []bool, failed []error) {
	is, failed = make([]bool, len(hs)), make([]error, len(hs))
	var wg sync.WaitGroup
	for from := 0; from < len(hs); {
		var reads []*pb.RequestOp
		for size := 0; from+len(reads) < len(hs) && len(reads) < maxReads && (size == 0 || size < maxNames); {
			entry := string(hs[from+len(reads)].entry.Key)
			reads = append(reads, name(entry))
			size += len(entry)
		}
		first := from
		from += len(reads)
		wg.Go(func() {
			r, err := call(ctx, d.cluster, func(m *member) (*pb.TxnResponse, error) { return m.kv.Txn(ctx, txn(nil, reads)) })
			for i := range reads {
				if failed[first+i] = err; err == nil {
					h, kvs := hs[first+i], r.Responses[i].GetResponseRange().Kvs
					is[first+i] = len(kvs) == 1 && kvs[0].CreateRevision == h.entry.CreateRevision && kvs[0].Lease == h.lease.id
				}
			}
		})
	}
	wg.Wait()
	return is, failed
}

// renewed takes in the answers to a beat of the hold's lease and to the read of its entry. It
// returns errGone if the hold is lost, unless another driver has moved it to another lease.
func (h *hold) renewed(ctx context.Context, b *beat, attached bool, failed error) error {
	ttl, err := b.wait(ctx)
	switch {
	case err != nil:
		// It may still arrive, and prolong whatever the lease is used for then.
		h.lease.doubtful.Store(true)
		return err
	case ttl <= 0:
		h.over.Store(true)
		return errGone
	case failed != nil:
		return failed
	case !attached:
		h.abandon()
		return errGone
	}
	h.d.beganAt(h.lease, b.began)
	return nil
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
		h.d.bury(h.lease, "", "")
	}
}

// renewOther renews a hold that needs a longer term than its lease has, or that is not
// known by its lease.
func (d *Driver) renewOther(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if h := d.handleOf(c); h != nil {
		g, err := d.attach(ctx, c, h.entry, 0)
		if errors.Is(err, errNoSpace) {
			g, err = d.renewShort(ctx, c, h)
		}
		if !errors.Is(err, errGone) {
			return g, err
		}
	}
	return d.renewByToken(ctx, c)
}

// renewShort renews a hold for the term of its lease, which is shorter than was asked for:
// etcd has no space to move the hold to another lease.
func (d *Driver) renewShort(ctx context.Context, c backend.Claim, h *hold) (backend.Grant, error) {
	b, err := d.cluster.beat(ctx, h.lease.id)
	if err != nil {
		return backend.Grant{}, err
	}
	attached, failed := d.attached(ctx, []*hold{h})
	if err := h.renewed(ctx, b, attached[0], failed[0]); err != nil {
		return backend.Grant{}, err
	}
	term := min(c.TTL, time.Duration(h.lease.ttl)*time.Second)
	return backend.Grant{Until: d.clock.time(b.began).Add(term - backend.Drift(term))}, nil
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
	switch {
	case err != nil:
		d.bury(h.lease, c.Token, "")
		return err
	case !removed:
		d.bury(h.lease, "", "")
		return backend.ErrLost
	}
	d.pool.give(h.lease)
	return nil
}

// removeEntry removes an entry of a lease of this driver. It reports whether it was there,
// with the create revision, unless that is 0.
func (d *Driver) removeEntry(ctx context.Context, l *lease, name string, revision int64) (bool, error) {
	r, err := call(ctx, d.cluster, func(m *member) (*pb.DeleteRangeResponse, error) {
		return m.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte(name), PrevKv: true})
	})
	if err != nil {
		return false, err
	}
	if len(r.PrevKvs) == 1 && r.PrevKvs[0].Lease != l.id {
		// The entry was moved to another lease, by a renewal that was still under way or by
		// another driver, which may revoke this one.
		l.doubtful.Store(true)
		d.bury(d.foreign(r.PrevKvs[0].Lease), "", "")
	}
	return len(r.PrevKvs) == 1 && (revision == 0 || r.PrevKvs[0].CreateRevision == revision), nil
}
