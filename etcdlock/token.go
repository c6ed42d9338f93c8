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
func (d *Driver) renewByToken(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
	for {
		kv, holds, err := d.find(ctx, c)
		if err == nil && !holds {
			err = backend.ErrLost
		}
		if err != nil {
			return g, err
		}
		b := d.cluster.beat(ctx, kv.Lease)
		<-b.done
		switch {
		case b.err != nil:
			return g, b.err
		case b.ttl <= 0:
			return g, backend.ErrLost
		case b.ttl < seconds(c.TTL):
			g, err = d.lengthen(ctx, c, kv)
		default:
			// The entry is put again under its lease. That fails if another driver has ended the
			// hold meanwhile, and has perhaps used the lease for another one. And an earlier put
			// of unknown outcome then finds the entry changed.
			if _, err = d.rewrite(ctx, kv, kv.Value, kv.Lease); err == nil {
				d.settle(c, kv.Lease)
			}
		}
		if !errors.Is(err, errGone) {
			return g, err
		}
	}
}

// lengthen moves a hold to a new lease with the whole term.
func (d *Driver) lengthen(ctx context.Context, c backend.Claim, kv *mvccpb.KeyValue) (backend.Grant, error) {
	l, err := d.pool.grant(ctx, seconds(c.TTL))
	if err != nil {
		return backend.Grant{}, err
	}
	h, err := d.move(ctx, c, kv, l)
	if err != nil {
		return backend.Grant{}, err
	}
	return h.grant(c, c.TTL), nil
}

// move puts a hold under another lease. It returns errGone if the entry has changed since it was
// read.
//
// If the outcome is unknown, the entry may be under either lease. So neither is revoked. The
// next renewal or release goes by the token and finds out: see settle.
func (d *Driver) move(ctx context.Context, c backend.Claim, kv *mvccpb.KeyValue, l *lease) (*hold, error) {
	h, granted, value := d.ownHold(c), time.Now(), kv.Value
	if h != nil {
		granted = h.granted
	}
	if r, ok := parseRecord(value); ok && r.since.IsZero() {
		r.since = granted
		value = r.encode()
	}
	moved, err := d.rewrite(ctx, kv, value, l.id)
	switch {
	case err != nil && unchanged(err):
		d.pool.give(l)
		return nil, err
	case err != nil && h != nil:
		h.over.Store(true)
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.ended {
			d.bury(l, "") // a Release has removed the entry meanwhile, and will not come again
		} else {
			h.others = append(h.others, l)
		}
		return nil, err
	case err != nil:
		return nil, err
	}

	// The name has the number of the old lease, so that lease is not used again.
	if h != nil {
		h.over.Store(true)
	}
	d.bury(d.foreign(kv.Lease), "")
	d.settle(c, l.id)
	n := d.newHold(c, moved, l)
	n.granted = granted
	return n, nil
}

// rewrite puts an entry again, with a value and under a lease, and returns it. The entry keeps its
// name and its create revision, and so its place and its fence. rewrite returns errGone if the
// entry has changed since it was read.
func (d *Driver) rewrite(ctx context.Context, kv *mvccpb.KeyValue, value []byte, lease int64) (*mvccpb.KeyValue, error) {
	name := string(kv.Key)
	r, err := call(ctx, d.cluster, func(m *member) (*pb.TxnResponse, error) {
		return m.kv.Txn(ctx, txn([]*pb.Compare{changedAt(name, kv.ModRevision)}, []*pb.RequestOp{put(name, value, lease)}))
	})
	switch {
	case err != nil:
		return nil, err
	case !r.Succeeded:
		return nil, errGone
	}
	return &mvccpb.KeyValue{Key: kv.Key, Value: value, Lease: lease, CreateRevision: kv.CreateRevision, ModRevision: r.Header.Revision}, nil
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
			d.bury(l, "")
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
		if r, ok := parseRecord(kv.Value); ok && r.token == c.Token {
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
	for {
		kv, holds, err := d.find(ctx, c)
		switch {
		case err != nil:
		case holds && c.KeepUntil.After(time.Now()):
			err = d.keep(ctx, c, kv)
		default:
			err = d.evict(ctx, kv)
		}
		if errors.Is(err, errGone) {
			continue
		}
		if h := d.ownHold(c); h != nil && err == nil {
			h.over.Store(true)
		}
		if err == nil || errors.Is(err, backend.ErrLost) {
			d.settle(c, 0)
		}
		return err
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
	if err := d.revoke(ctx, kv.Lease); err != nil && !isGone(err) {
		d.bury(d.foreign(kv.Lease), "")
		return err
	}
	return nil
}

// keep leaves the key taken until c.KeepUntil, by no token: it puts the entry under another
// lease. This process ends the lease at that time. If it cannot, because it has ended, or the
// driver is closed, the lease ends with its term, up to 2.5 s later.
func (d *Driver) keep(ctx context.Context, c backend.Claim, kv *mvccpb.KeyValue) error {
	l, err := d.pool.grant(ctx, seconds(time.Until(c.KeepUntil)))
	if err != nil {
		return err
	}
	rec, _ := parseRecord(kv.Value)
	rec.token = kept
	if _, err = d.rewrite(ctx, kv, rec.encode(), l.id); err != nil {
		if unchanged(err) {
			d.pool.give(l)
		}
		return err // if the outcome is unknown, the repeat of the Release finds out; the leases end by themselves
	}
	d.bury(d.foreign(kv.Lease), "")

	// The term of a lease is at least 2 s and whole seconds, and etcd ends it late.
	time.AfterFunc(time.Until(c.KeepUntil), func() { d.bury(l, "") })
	return nil
}
