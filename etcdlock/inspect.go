package etcdlock

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hasplock/hasp/backend"
)

const (
	maxShown = 1000 // how many shared holders a Status shows
	atOnce   = 16   // how many requests for the rest of a term are sent at once
	pageSize = 1000 // how many entries one answer to List contains
)

// Inspect returns the holder and the queue. It takes one call for the queue, and one call for the
// rest of each holder's term.
func (d *driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	kvs, err := d.entries(ctx, key)
	if err != nil {
		return backend.Status{}, err
	}
	keys := []listed{{key: key, kvs: kvs}}
	if err := d.terms(ctx, keys); err != nil {
		return backend.Status{}, err
	}
	return keys[0].status(), nil
}

// Break removes the entries that held the key when it began, and ends their leases. The holders
// learn of the loss at their next renewals.
func (d *driver) Break(ctx context.Context, key string) error {
	kvs, err := d.entries(ctx, key)
	n := holders(kvs)
	if err != nil || n == 0 {
		return err
	}
	last := kvs[n-1].CreateRevision // later entries belong to waiters, also after a holder has left
	for err == nil && len(kvs) > 0 && kvs[0].CreateRevision <= last {
		err = d.evict(ctx, kvs[0])
		switch {
		case err == nil:
			kvs = kvs[1:]
		case errors.Is(err, errGone): // the hold has ended, or moved to another lease: read again
			kvs, err = d.entries(ctx, key)
		}
	}

	return err
}

// listed is a key with its entries, in the order of the queue.
type listed struct {
	key  string
	kvs  []*mvccpb.KeyValue
	left []time.Duration // the rest of each holder's term; 0 or less if the term has ended
}

// The method terms asks etcd for the rest of each holder's term, and stores it in the field left,
// rounded up to seconds. It returns the first error.
func (d *driver) terms(ctx context.Context, keys []listed) (first error) {
	var wg sync.WaitGroup
	room := make(slots, atOnce)
	var once sync.Once
	for i := range keys {
		l := &keys[i]
		l.left = make([]time.Duration, min(holders(l.kvs), maxShown))
		for n := range l.left {
			room <- struct{}{}
			wg.Go(func() {
				defer room.give()
				r, err := d.timeToLive(ctx, l.kvs[n].Lease)
				switch {
				case err == nil && r.GrantedTTL > 0:
					// Add 1, because etcd rounds down. Store at least 1, because a lease outlives
					// its term until etcd notices the end.
					l.left[n] = time.Duration(max(min(r.TTL+1, r.GrantedTTL), 1)) * time.Second
				case err != nil && !isGone(err):
					once.Do(func() { first = err })
				}
				// Otherwise the lease has ended, and the rest stays 0.
			})
		}
	}

	wg.Wait()
	return first
}

// status returns what Inspect and List report. It skips a holder whose lease has ended, because
// that holder's entry was removed after it was read. An entry without a lease was written by hand,
// and holds the key without end. Of several holders, the largest TTL and the largest fence count.
func (l *listed) status() (st backend.Status) {
	for n, left := range l.left {
		kv := l.kvs[n]
		if left <= 0 && kv.Lease != 0 {
			continue
		}
		st.Held = true
		st.TTL = max(st.TTL, left)
		if kv.Lease == 0 {
			st.TTL = -1 // no end
		}
		r, _ := parseRecord(kv.Value)
		if r.fenced {
			st.Fence = max(st.Fence, uint64(kv.CreateRevision))
		}
		if isShared(kv.Key) {
			st.Shared = append(st.Shared, r.owner)
		} else {
			st.Owner = r.owner
			st.Since = r.since
		}
	}

	for _, kv := range l.kvs[holders(l.kvs):] {
		r, _ := parseRecord(kv.Value)
		st.Waiters = append(st.Waiters, r.owner)
	}
	return st
}

// List yields the keys in the order of their names. It reads 1,000 entries at a time, and asks for
// the rest of each holder's term. The timeout bounds each of these pages. If a page fails, List
// yields the error and ends.
func (d *driver) List(
	ctx context.Context, prefix string, timeout time.Duration,
) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		from := root + escape(prefix)
		end := clientv3.GetPrefixRangeEnd(from)
		for from != "" {
			page, next, err := d.page(ctx, from, end, timeout)
			switch {
			case ctx.Err() != nil: // stop even if the page was read nevertheless
				err = ctx.Err()
			case isContextEnd(err): // only the timeout of this page has passed
				err = errNoAnswer
			}

			if err != nil {
				yield(backend.Entry{}, err)
				return
			}
			for i := range page {
				st := page[i].status()
				// All entries of an unused key have ended since they were read.
				isUsed := st.Held || len(st.Waiters) > 0
				if isUsed && !yield(backend.Entry{Key: page[i].key, Status: st}, nil) {
					return
				}
			}

			from = next
		}
	}
}

// page reads a page of entries, groups them by key, and sets their fields left. The result next is
// the name at which the next page begins, or "" after the last page.
func (d *driver) page(
	ctx context.Context, from, end string, timeout time.Duration,
) (page []listed, next string, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	r, err := d.get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(pageSize))
	if err != nil {
		return nil, "", err
	}
	for _, kv := range r.Kvs {
		key, hasKey := keyOf(string(kv.Key))
		_, hasRecord := parseRecord(kv.Value)
		if !hasKey || !hasRecord {
			continue // another program has written it
		}
		if n := len(page); n == 0 || page[n-1].key != key {
			page = append(page, listed{key: key})
		}
		l := &page[len(page)-1]
		l.kvs = append(l.kvs, kv)
	}

	for _, l := range page {
		slices.SortFunc(l.kvs, func(a, b *mvccpb.KeyValue) int {
			return cmp.Compare(a.CreateRevision, b.CreateRevision)
		})
	}

	if r.More {
		next = string(r.Kvs[len(r.Kvs)-1].Key) + "\x00"
		if len(page) > 0 {
			// The last key may have more entries, so read all entries of that key here, and begin
			// the next page after them. If foreign names followed that key, next is past it
			// already.
			last := &page[len(page)-1]
			if last.kvs, err = d.entries(ctx, last.key); err != nil {
				return nil, "", err
			}
			next = max(next, clientv3.GetPrefixRangeEnd(queueOf(last.key)))
		}
	}

	return page, next, d.terms(ctx, page)
}
