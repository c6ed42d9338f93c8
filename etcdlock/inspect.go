package etcdlock

import (
	"context"
	"errors"
	"iter"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/hasplock/hasp/backend"
)

const (
	maxShown = 1000 // shared holders of a Status
	atOnce   = 16   // questions for the rest of a term
	pageSize = 1000 // entries in one answer of a list
)

// Inspect returns the holder and the queue. It takes one call, and one for the rest of each
// holder's term.
func (d *Driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	kvs, err := d.entries(ctx, key)
	if err != nil {
		return backend.Status{}, err
	}
	all := []listed{{key: key, kvs: kvs}}
	if err := d.terms(ctx, all); err != nil {
		return backend.Status{}, err
	}
	return all[0].status(), nil
}

// Break removes the entries that hold the key, and ends their leases, so that the holders
// learn of it at their next renewals.
func (d *Driver) Break(ctx context.Context, key string) error {
	kvs, err := d.entries(ctx, key)
	if err != nil {
		return err
	}
	for _, kv := range kvs[:holders(kvs)] {
		for {
			err := d.evict(ctx, kv)
			if err == nil {
				break
			}
			if !errors.Is(err, errGone) {
				return err
			}

			// It has ended, or moved to another lease.
			again, err := d.entries(ctx, key)
			if err != nil {
				return err
			}
			i := slices.IndexFunc(again, func(a *mvccpb.KeyValue) bool {
				return string(a.Key) == string(kv.Key) && a.CreateRevision == kv.CreateRevision
			})
			if i < 0 {
				break
			}
			kv = again[i]
		}
	}
	return nil
}

// listed is a key with its entries, in the order of the queue.
type listed struct {
	key  string
	kvs  []*mvccpb.KeyValue
	left []time.Duration // the rest of each holder's term; 0 or less if it has ended
}

// terms asks for the rest of the holders' terms, rounded up to seconds.
func (d *Driver) terms(ctx context.Context, all []listed) error {
	var wg sync.WaitGroup
	room := make(chan struct{}, atOnce)
	var mu sync.Mutex
	var failed error
	for i := range all {
		l := &all[i]
		l.left = make([]time.Duration, min(holders(l.kvs), maxShown))
		for n := range l.left {
			room <- struct{}{}
			wg.Go(func() {
				defer func() { <-room }()
				r, err := call(ctx, d.cluster, func(m *member) (*pb.LeaseTimeToLiveResponse, error) {
					return m.leases.LeaseTimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: l.kvs[n].Lease})
				})
				switch {
				case err == nil && r.GrantedTTL > 0:
					// etcd rounds down. A term that has ended goes on until etcd notices that.
					l.left[n] = time.Duration(max(min(r.TTL+1, r.GrantedTTL), 1)) * time.Second
				case err == nil: // there is no such lease
				case !isGone(err):
					mu.Lock()
					failed = err
					mu.Unlock()
				}
			})
		}
	}
	wg.Wait()
	return failed
}

// status returns what Inspect and List report. An entry without its lease was removed after
// it was read.
func (l *listed) status() (st backend.Status) {
	for n, left := range l.left {
		kv := l.kvs[n]
		if left <= 0 && kv.Lease != 0 {
			continue
		}
		st.Held = true
		st.TTL = max(st.TTL, left)
		if kv.Lease == 0 {
			st.TTL = -1 // written by hand
		}
		r, _ := parseRecord(kv.Value)
		if r.fenced {
			st.Fence = max(st.Fence, uint64(kv.CreateRevision))
		}
		if isShared(kv.Key) {
			st.Shared = append(st.Shared, r.owner)
		} else {
			st.Owner, st.Since = r.owner, r.since
		}
	}
	for _, kv := range l.kvs[holders(l.kvs):] {
		r, _ := parseRecord(kv.Value)
		st.Waiters = append(st.Waiters, r.owner)
	}
	return st
}

// List yields the keys in the order of their names. It reads 1,000 entries at a time, and
// asks for the rest of each holder's term.
func (d *Driver) List(ctx context.Context, prefix string, timeout time.Duration) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		from, end := []byte(root+escape(prefix)), prefixEnd(root+escape(prefix))
		var rest listed // the last key of a page, whose entries may go on in the next
		for more := true; more; {
			page, next, err := d.page(ctx, from, end, timeout)
			if err != nil {
				yield(backend.Entry{}, err)
				return
			}
			if len(page) > 0 && page[0].key == rest.key {
				page[0].kvs = append(rest.kvs, page[0].kvs...)
			} else if rest.key != "" {
				page = append([]listed{rest}, page...)
			}
			rest = listed{}
			if from, more = next, next != nil; more && len(page) > 0 {
				rest = page[len(page)-1]
				page = page[:len(page)-1]
			}
			if !d.yieldAll(ctx, page, timeout, yield) {
				return
			}
		}
	}
}

// page reads a page of entries. Next is where the next page begins, or nil.
func (d *Driver) page(ctx context.Context, from, end []byte, timeout time.Duration) (page []listed, next []byte, err error) {
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	r, err := call(within, d.cluster, func(m *member) (*pb.RangeResponse, error) {
		return m.kv.Range(within, &pb.RangeRequest{Key: from, RangeEnd: end, Limit: pageSize})
	})
	if err != nil {
		return nil, nil, ofCaller(ctx, err)
	}
	for _, kv := range r.Kvs {
		key, ok := keyOf(string(kv.Key))
		if _, ours := parseRecord(kv.Value); !ok || !ours {
			continue
		}
		if n := len(page); n == 0 || page[n-1].key != key {
			page = append(page, listed{key: key})
		}
		l := &page[len(page)-1]
		l.kvs = append(l.kvs, kv)
	}
	if r.More {
		next = append(r.Kvs[len(r.Kvs)-1].Key, 0)
	}
	return page, next, nil
}

// ofCaller returns the error of a call whose timeout has ended, but not its caller's context.
func ofCaller(ctx context.Context, err error) error {
	if ctx.Err() == nil && isContextEnd(err) {
		return errors.New("etcd: no answer")
	}
	return err
}

func (d *Driver) yieldAll(ctx context.Context, page []listed, timeout time.Duration, yield func(backend.Entry, error) bool) bool {
	within, cancel := context.WithTimeout(ctx, timeout)
	for i := range page {
		slices.SortFunc(page[i].kvs, func(a, b *mvccpb.KeyValue) int { return int(a.CreateRevision - b.CreateRevision) })
	}
	err := d.terms(within, page)
	cancel()
	if err != nil {
		yield(backend.Entry{}, ofCaller(ctx, err))
		return false
	}
	for i := range page {
		if st := page[i].status(); st.Held || len(st.Waiters) > 0 {
			if !yield(backend.Entry{Key: page[i].key, Status: st}, nil) {
				return false
			}
		}
	}
	return true
}
