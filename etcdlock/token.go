package etcdlock

import (
	"context"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hasplock/hasp/backend"
)

// This file contains the calls that find a hold by its token, because another driver made the hold,
// or the hold's state is not known. It also contains the calls that move a hold to another lease.

// renewOther moves a hold to a new lease, because the hold needs a longer term than its lease has,
// or this driver does not know the hold's lease.
func (d *driver) renewOther(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	h := d.ownHold(c)
	for {
		var kv *mvccpb.KeyValue
		known := h != nil && !h.over.Load()
		if known {
			kv = h.entry
		} else {
			found, holds, err := d.find(ctx, c)
			if err != nil {
				return backend.Grant{}, err
			}
			if !holds {
				return backend.Grant{}, backend.ErrLost
			}
			kv = found
		}

		g, err := d.move(ctx, c, h, kv)
		switch {
		case errors.Is(err, errGone) && known:
			h.doubt(h.lease)
		case errors.Is(err, errGone): // try again, because the entry has changed since it was read
		case errors.Is(err, errNoSpace) && known:
			// Renew the present lease, because etcd has no space to move the hold to another one.
			d.prove(ctx, []*renewal{{h: h}}, func(_ *renewal, e error) { err = e })
			if !errors.Is(err, errGone) {
				return h.grant(c, min(c.TTL, h.lease.term())), err
			}
		default:
			return g, err
		}
	}
}

// move puts a hold under a new lease with the whole term. If another driver made the hold, h is
// nil. If the entry has changed since it was read as kv, move returns errGone.
func (d *driver) move(ctx context.Context, c backend.Claim, h *hold, kv *mvccpb.KeyValue) (backend.Grant, error) {
	secs := seconds(c.TTL)
	if h == nil || kv != h.entry {
		// The present lease may have a longer term than c.TTL, and a renewal never shortens a term. Take
		// the whole of that term, because a leader that was deposed may report a rest that is too short.
		r, err := d.timeToLive(ctx, kv.Lease)
		if err != nil {
			return backend.Grant{}, err
		}
		secs = max(secs, r.GrantedTTL)
	}

	l, err := d.pool.grant(ctx, secs)
	if err != nil {
		return backend.Grant{}, &noChange{err} // the hold is as it was
	}
	// The entry of a waiter has no time since. Without h, the time of the move is the best that is
	// known of the grant.
	granted := time.Now()
	value := kv.Value
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
		return backend.Grant{}, err
	case err != nil:
		h.doubt(l)
		return backend.Grant{}, err
	}

	// End the old lease, which must not be reused because its number is in the entry's name. If it is
	// the hold's own, settle ends it.
	if h == nil || kv.Lease != h.lease.id {
		d.buryForeign(kv.Lease)
	}
	h.settle(false)
	n := d.newHold(c, moved, l)
	n.granted = granted
	return n.grant(c, c.TTL), nil
}

// rewrite puts an entry again, with another value and another lease, and returns the new entry. The
// new entry has the same name and create revision, and therefore the same place and fence. rewrite
// returns errGone if the entry has changed since it was read.
func (d *driver) rewrite(
	ctx context.Context, kv *mvccpb.KeyValue, value []byte, lease int64,
) (*mvccpb.KeyValue, error) {
	at, err := d.change(ctx, kv, put(string(kv.Key), value, lease))
	if errors.Is(err, errNoSpace) {
		// etcd has either refused the put or carried it out. So the put cannot come later, and a
		// read shows the outcome.
		if r, e := d.get(ctx, string(kv.Key)); e == nil && len(r.Kvs) == 1 {
			switch now := r.Kvs[0]; {
			case now.Lease == lease:
				return now, nil
			case now.ModRevision == kv.ModRevision:
				err = &noChange{err}
			}
		}
	}

	return &mvccpb.KeyValue{
		Key:            kv.Key,
		Value:          value,
		Lease:          lease,
		CreateRevision: kv.CreateRevision,
		ModRevision:    at,
	}, err
}

// The method change applies the operation op to an entry, and returns the revision of this change.
// It returns errGone if the entry has changed since it was read.
func (d *driver) change(ctx context.Context, kv *mvccpb.KeyValue, op clientv3.Op) (int64, error) {
	same := clientv3.Compare(clientv3.ModRevision(string(kv.Key)), "=", kv.ModRevision)
	key, _ := keyOf(string(kv.Key))
	r, err := d.changes.do(&change{
		ctx:   ctx,
		key:   key,
		conds: []clientv3.Cmp{same},
		then:  []clientv3.Op{op},
	})

	switch {
	case err != nil:
		return 0, err
	case !r.Succeeded:
		return 0, errGone
	}

	return r.Header.Revision, nil
}

// txnAnswer is the answer to a transaction, and the member that it came from.
type txnAnswer struct {
	*clientv3.TxnResponse
	m *member
}

// txn sends a transaction: the operations in then if all conditions are true, or else those in
// otherwise.
func (d *driver) txn(
	ctx context.Context, conds []clientv3.Cmp, then []clientv3.Op, otherwise ...clientv3.Op,
) (txnAnswer, error) {
	return call(ctx, d.cluster, func(m *member) (txnAnswer, error) {
		r, err := m.client.Txn(ctx).If(conds...).Then(then...).Else(otherwise...).Commit()
		return txnAnswer{r, m}, err
	})
}

// The function put returns the operation that stores an entry under a lease.
func put(name string, value []byte, lease int64) clientv3.Op {
	return clientv3.OpPut(name, string(value), clientv3.WithLease(clientv3.LeaseID(lease)))
}

// find returns the entry that has the token of c, and whether that entry holds the key. If there is
// no such entry, the error is ErrLost.
func (d *driver) find(ctx context.Context, c backend.Claim) (kv *mvccpb.KeyValue, holds bool, err error) {
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
func (d *driver) entries(ctx context.Context, key string) ([]*mvccpb.KeyValue, error) {
	if err := d.checkKey(ctx, key); err != nil {
		return nil, err
	}
	oldestFirst := clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend)
	r, err := d.get(ctx, queueOf(key), clientv3.WithPrefix(), oldestFirst)
	if err != nil {
		return nil, err
	}
	return r.Kvs, nil
}

// get reads entries. It never uses WithKeysOnly, with which etcd 3.7 leaves out the lease.
func (d *driver) get(
	ctx context.Context, name string, opts ...clientv3.OpOption,
) (*clientv3.GetResponse, error) {
	return call(ctx, d.cluster, func(m *member) (*clientv3.GetResponse, error) {
		return m.client.Get(ctx, name, opts...)
	})
}

// releaseByToken removes the entry that has c.Token, or keeps it until c.KeepUntil.
func (d *driver) releaseByToken(ctx context.Context, c backend.Claim) error {
	for {
		kv, holds, err := d.find(ctx, c)
		switch {
		case err != nil:
		case holds && c.KeepUntil.After(time.Now()):
			err = d.keep(ctx, c, kv)
		default:
			err = d.evict(ctx, kv)
		}

		if err == nil || errors.Is(err, backend.ErrLost) {
			d.ownHold(c).settle(true) // does nothing if another driver made the hold
		}
		if !errors.Is(err, errGone) {
			return err
		}
	}
}

// evict removes an entry of any driver, and ends the entry's lease. It returns errGone if the entry
// has changed since it was read.
//
// The entry is removed before the lease is revoked, because while the entry exists, its driver may
// end the hold and reuse the lease. If this process dies between the removal and the revocation,
// the holder's next renewal finds no entry, and so learns that the hold is lost.
//
// After the removal, the entry's driver finds no entry at its Release, and does not reuse the
// lease. So the revocation affects no other hold.
func (d *driver) evict(ctx context.Context, kv *mvccpb.KeyValue) error {
	if _, err := d.change(ctx, kv, clientv3.OpDelete(string(kv.Key))); err != nil {
		return err
	}
	if err := d.revoke(ctx, kv.Lease); err != nil && !isGone(err) {
		d.buryForeign(kv.Lease)
		return err
	}
	return nil
}

// The method keep leaves the key taken until c.KeepUntil, although no token holds it. For that, the
// method puts the entry under another lease, which this process ends at that time. If the process
// ends or the driver is closed before that time, the lease ends with its term, up to 2.5 s later.
func (d *driver) keep(ctx context.Context, c backend.Claim, kv *mvccpb.KeyValue) error {
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
		return err // the outcome is unknown until a repeated Release; the leases end by themselves
	}

	if h := d.ownHold(c); h == nil || h.lease.id != kv.Lease {
		d.buryForeign(kv.Lease) // otherwise settle ends the lease
	}

	// End the lease at c.KeepUntil, because by itself it would end later: it lasts 2 s or more.
	time.AfterFunc(time.Until(c.KeepUntil), func() { d.bury(l) })
	return nil
}
