package etcdlock

import (
	"context"
	"errors"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/hasplock/hasp/backend"
)

// This file has what goes by the token, because the hold is another driver's or its state
// is not known, and what moves a hold to another lease.

// renewByToken renews the hold of a token.
func (d *Driver) renewByToken(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	for {
		kv, holds, err := d.find(ctx, c)
		if err == nil && !holds {
			err = backend.ErrLost
		}
		if err != nil {
			return backend.Grant{}, err
		}

		b, err := d.cluster.beat(ctx, kv.Lease)
		if err != nil {
			return backend.Grant{}, err
		}
		ttl, err := b.wait(ctx)
		switch {
		case err != nil:
			return backend.Grant{}, err
		case ttl <= 0:
			return backend.Grant{}, backend.ErrLost
		}

		g, err := d.attach(ctx, c, kv, ttl)
		if !errors.Is(err, errGone) {
			return g, err
		}
	}
}

// attach puts a hold under a lease that is long enough: its present one, which has a term
// of ttl, or a new one. It returns errGone if the entry has changed since it was read.
//
// If the outcome is unknown, the entry may be under either lease. So neither is revoked. The
// next renewal or release goes by the token and finds out: see settle.
func (d *Driver) attach(ctx context.Context, c backend.Claim, kv *mvccpb.KeyValue, ttl int64) (backend.Grant, error) {
	if ttl >= seconds(c.TTL) {
		return d.move(ctx, c, kv, nil)
	}
	l, err := d.pool.grant(ctx, seconds(c.TTL))
	if err != nil {
		return backend.Grant{}, err
	}
	return d.move(ctx, c, kv, l)
}

// move puts a hold under a lease, or again under its present one if l is nil. The entry keeps
// its name and its create revision, and so its place and its fence. move returns errGone if
// the entry has changed since it was read.
//
// The put is necessary also if the lease stays. It fails if another driver has ended the
// hold meanwhile, and has perhaps used the lease for another one. And if an earlier put is
// still under way, whose outcome is unknown, that one then finds the entry changed.
func (d *Driver) move(ctx context.Context, c backend.Claim, kv *mvccpb.KeyValue, l *lease) (backend.Grant, error) {
	name, id := string(kv.Key), kv.Lease
	if l != nil {
		id = l.id
	}
	h := d.ownHold(c)
	r, err := call(ctx, d.cluster, func(m *member) (*pb.TxnResponse, error) {
		return m.kv.Txn(ctx, txn([]*pb.Compare{changedAt(name, kv.ModRevision)}, []*pb.RequestOp{put(name, kv.Value, id)}))
	})
	if err == nil && !r.Succeeded {
		err = errGone
	}
	switch {
	case err != nil && !unchanged(err):
		if h != nil {
			h.over.Store(true)
			h.mu.Lock()
			ended := h.ended
			if l != nil && !ended {
				h.others = append(h.others, l)
			}
			h.mu.Unlock()
			if l != nil && ended {
				// A Release has removed the entry meanwhile, and will not come again.
				d.bury(l, "", "")
			}
		}
		return backend.Grant{}, err
	case l == nil:
		if err == nil {
			d.settle(c, id)
		}
		return backend.Grant{}, err
	case err != nil:
		d.pool.give(l)
		return backend.Grant{}, err
	}

	// The name has the number of the old lease, so that lease is not used again.
	if h != nil {
		h.over.Store(true)
	}
	d.bury(d.foreign(kv.Lease), "", "")
	d.settle(c, id)
	moved := &mvccpb.KeyValue{Key: kv.Key, Value: kv.Value, Lease: l.id, CreateRevision: kv.CreateRevision, ModRevision: r.Header.Revision}
	g := d.newHold(c, moved, l, time.Duration(l.began.Load()), c.TTL)
	g.Fence = 0
	return g, nil
}

// settle ends the leases that moves of unknown outcome have left, except the one that the
// hold is under now, or 0 if the entry is gone. It is called after the entry has changed, so
// a late put changes nothing.
func (d *Driver) settle(c backend.Claim, used int64) {
	h := d.ownHold(c)
	if h == nil {
		return
	}
	h.mu.Lock()
	others := h.others
	h.others, h.ended = nil, h.ended || used == 0
	h.mu.Unlock()
	if len(others) == 0 {
		return
	}
	for _, l := range append(others, h.lease) {
		if l.id != used {
			d.bury(l, "", "")
		}
	}
}

// find returns the entry of a claim's token, and whether it holds the key. If there is
// none, it returns ErrLost.
func (d *Driver) find(ctx context.Context, c backend.Claim) (kv *mvccpb.KeyValue, holds bool, err error) {
	kvs, err := d.entries(ctx, c.Key)
	if err != nil {
		return nil, false, err
	}
	for i, kv := range kvs {
		if has(kv, c.Token) {
			return kv, i < holders(kvs), nil
		}
	}
	return nil, false, backend.ErrLost
}

// entries returns the entries of a key, in the order of the queue.
func (d *Driver) entries(ctx context.Context, key string) ([]*mvccpb.KeyValue, error) {
	if err := d.checkKey(ctx, key); err != nil {
		return nil, err
	}
	queue := queueOf(key)
	r, err := call(ctx, d.cluster, func(m *member) (*pb.RangeResponse, error) {
		return m.kv.Range(ctx, &pb.RangeRequest{Key: []byte(queue), RangeEnd: prefixEnd(queue),
			SortTarget: pb.RangeRequest_CREATE, SortOrder: pb.RangeRequest_ASCEND})
	})
	if err != nil {
		return nil, err
	}
	return r.Kvs, nil
}

// releaseByToken removes the entry of the token, or leaves it until c.KeepUntil.
func (d *Driver) releaseByToken(ctx context.Context, c backend.Claim) error {
	// If the lease is being revoked, its end is the end of the token.
	d.mu.Lock()
	b := d.burials[c.Token]
	d.mu.Unlock()
	if b != nil {
		select {
		case <-b.done:
		case <-ctx.Done():
			return ctx.Err()
		}
		if b.ended {
			d.settle(c, 0)
			return nil
		}
	}

	for {
		kv, holds, err := d.find(ctx, c)
		if errors.Is(err, backend.ErrLost) {
			d.settle(c, 0)
		}
		if err != nil {
			return err
		}
		if holds && c.KeepUntil.After(time.Now()) {
			err = d.keep(ctx, c, kv)
		} else {
			err = d.evict(ctx, kv)
		}
		if !errors.Is(err, errGone) {
			if h := d.handleOf(c); h != nil && err == nil {
				h.over.Store(true)
			}
			if err == nil {
				d.settle(c, 0)
			}
			return err
		}
	}
}

// evict removes an entry of any driver, and ends its lease. It returns errGone if the entry
// has changed since it was read.
//
// The entry goes first, because until then its driver may end the hold and use the lease for
// another one. If this process dies in between, the lease goes on. Then the holder learns
// at its next renewal, which reads the entry, that the hold is lost.
//
// If the entry was removed here, the driver that made it finds that out at its Release, and
// does not use the lease again. So the lease can be revoked without harm to another hold.
func (d *Driver) evict(ctx context.Context, kv *mvccpb.KeyValue) error {
	name := string(kv.Key)
	r, err := call(ctx, d.cluster, func(m *member) (*pb.TxnResponse, error) {
		return m.kv.Txn(ctx, txn([]*pb.Compare{changedAt(name, kv.ModRevision)}, []*pb.RequestOp{remove(name)}))
	})
	switch {
	case err != nil:
		return err
	case !r.Succeeded:
		return errGone
	}
	if err := d.revoke(ctx, kv.Lease); err != nil {
		d.bury(d.foreign(kv.Lease), "", "")
		return err
	}
	return nil
}

// keep leaves the key taken until c.KeepUntil, by no token: it puts the entry under another
// lease. This process ends the lease at that time. If it cannot, because it has ended, or the
// driver is closed, the lease ends with its term, up to 2.5 s later.
func (d *Driver) keep(ctx context.Context, c backend.Claim, kv *mvccpb.KeyValue) error {
	rec, _ := parseRecord(kv.Value)
	rec.token = kept
	l, err := d.pool.grant(ctx, seconds(time.Until(c.KeepUntil)))
	if err != nil {
		return err
	}
	name := string(kv.Key)
	r, err := call(ctx, d.cluster, func(m *member) (*pb.TxnResponse, error) {
		return m.kv.Txn(ctx, txn([]*pb.Compare{changedAt(name, kv.ModRevision)}, []*pb.RequestOp{put(name, rec.encode(), l.id)}))
	})
	switch {
	case err != nil && !unchanged(err):
		// The repeat of the Release finds out. The leases end by themselves.
		return err
	case err != nil:
		d.pool.give(l)
		return err
	case !r.Succeeded:
		d.pool.give(l)
		return errGone
	}
	d.bury(d.foreign(kv.Lease), "", "")

	// The term of a lease is at least 2 s and whole seconds, and etcd ends it late.
	time.AfterFunc(time.Until(c.KeepUntil), func() { d.bury(l, "", "") })
	return nil
}
