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

// renewOther renews a hold that needs a longer term than its lease has, or whose lease is not known
// to this driver. It moves the hold to a new lease. If no entry with c's token holds the key, the
// error is ErrLost.
func (d *driver) renewOther(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	h := d.ownHold(c)
	for {
		var kv *mvccpb.KeyValue
		known := h != nil && !h.over.Load() // the entry is h.entry, as far as this driver knows
		if known {
			kv = h.entry
		} else {
			found, holds, err := d.find(ctx, c)
			if err != nil {
				return backend.Grant{}, err
			}
			if !holds {
				return backend.Grant{}, backend.ErrLost // the entry is that of a waiter
			}
			kv = found
		}

		g, err := d.move(ctx, c, h, kv)
		switch {
		case errors.Is(err, errGone) && known:
			h.doubt(h.lease) // sets h.over, so that the next round finds the entry by its token
		case errors.Is(err, errGone): // find it again, because it has changed since it was read
		case errors.Is(err, errNoSpace) && known:
			// etcd has no space to move the hold, so renew its present lease. If the hold is gone
			// from that lease, prove sets h.over, and the next round finds the entry by its token.
			d.prove(ctx, []*renewal{{h: h}}, func(_ *renewal, e error) { err = e })
			if !errors.Is(err, errGone) {
				return h.grant(c, min(c.TTL, h.lease.term())), err
			}
		default:
			return g, err
		}
	}
}

// move puts the hold with the entry kv under a new lease with the whole term, and returns a grant
// with a new Handle. If another driver made the hold, h is nil. Otherwise h is the old Handle. If
// the entry has changed since it was read as kv, move returns errGone.
func (d *driver) move(ctx context.Context, c backend.Claim, h *hold, kv *mvccpb.KeyValue) (backend.Grant, error) {
	secs := seconds(c.TTL)
	if h == nil || kv != h.entry {
		// The entry was found by its token, so its lease is not known. It may have a longer term
		// than c.TTL, and a renewal never shortens a term. Take the whole term of that lease and
		// not only the rest, because a leader that was deposed may report a rest that is too short.
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

	// A hold that was waited for has an entry without the time of its grant, so write that time
	// now. If it is not known because h is nil, take the present time.
	granted := time.Now()
	if h != nil {
		granted = h.granted
	}
	value := kv.Value
	if r, ok := parseRecord(value); ok && r.since.IsZero() {
		r.since = granted
		value = r.encode()
	}

	moved, err := d.rewrite(ctx, kv, value, l.id)
	switch {
	case err != nil && unchanged(err): // the new lease has no entry
		d.pool.give(l)
		return backend.Grant{}, err
	case err != nil: // the entry may be under either lease
		h.doubt(l)
		return backend.Grant{}, err
	}

	// End the old lease. It must not be reused, because its number is in the name of the entry,
	// which still exists. If the old lease is h.lease, settle ends it.
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
// returns errGone if the entry has changed since it was read as kv. After other errors, the put may
// have been carried out, unless unchanged(err) is true.
func (d *driver) rewrite(
	ctx context.Context, kv *mvccpb.KeyValue, value []byte, lease int64,
) (*mvccpb.KeyValue, error) {
	at, err := d.change(ctx, kv, put(string(kv.Key), value, lease))
	if err == nil {
		return &mvccpb.KeyValue{
			Key:            kv.Key,
			Value:          value,
			Lease:          lease,
			CreateRevision: kv.CreateRevision,
			ModRevision:    at,
		}, nil
	}
	if !errors.Is(err, errNoSpace) {
		return nil, err
	}

	// etcd has either refused the put already or carried it out, but errNoSpace does not say which.
	// The put cannot come later, so a read shows the outcome.
	r, readErr := d.get(ctx, string(kv.Key))
	switch {
	case readErr != nil || len(r.Kvs) == 0:
		return nil, err
	case r.Kvs[0].Lease == lease: // carried out
		return r.Kvs[0], nil
	case r.Kvs[0].ModRevision == kv.ModRevision: // refused
		return nil, &noChange{err}
	}
	return nil, err // another call has changed the entry meanwhile
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

// releaseByToken removes the entry that has c.Token. If that entry holds the key, and c.KeepUntil
// is in the future, it keeps the key taken until then. If there is no such entry, the error is
// ErrLost.
func (d *driver) releaseByToken(ctx context.Context, c backend.Claim) error {
	for {
		kv, holds, err := d.find(ctx, c)
		switch {
		case err != nil: // no entry has the token, or the read has failed
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
		// Find the entry again, because it has changed since find read it.
	}
}

// evict removes an entry of any driver, and ends the entry's lease. It returns errGone if the entry
// has changed since it was read.
//
// To revoke the lease first would be wrong: while the entry exists, the driver that made it may
// release the hold and reuse the lease for another hold, which the revocation would end. After the
// removal, that driver's Release finds no entry, and so does not reuse the lease.
//
// If this process dies between the removal and the revocation, the lease stays. But the holder's
// next renewal finds no entry, and so learns that the hold is lost.
func (d *driver) evict(ctx context.Context, kv *mvccpb.KeyValue) error {
	if _, err := d.change(ctx, kv, clientv3.OpDelete(string(kv.Key))); err != nil {
		return err
	}
	if err := d.revoke(ctx, kv.Lease); err != nil && !isGone(err) {
		d.buryForeign(kv.Lease) // tries again; err says that the lease may exist until then
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
		// Otherwise the entry may be under either lease. Both end by themselves, and a repeated
		// Release shows the outcome.
		return err
	}

	// End the old lease. If it is h.lease, the caller's settle ends it.
	if h := d.ownHold(c); h == nil || h.lease.id != kv.Lease {
		d.buryForeign(kv.Lease)
	}

	// End the lease at c.KeepUntil, because by itself it would end later: it lasts 2 s or more.
	time.AfterFunc(time.Until(c.KeepUntil), func() { d.bury(l) })
	return nil
}
