package etcdlock

import (
	"context"
	"math"
	"slices"
	"strconv"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"
)

// queue is what this driver's waiters for one key know about the entries of that key. The driver's
// mu guards the fields of queue, view and entryState.
//
// A watch reports only deletions. The waiters find new entries by reads. Each waiter reads the
// entries that were created since the last read of any waiter. A lost event only delays waiters.
//
// The watch has no start revision, so a waiter reads the queue only after the watch is confirmed. A
// watch from a past revision would have to wait for a loop of etcd that runs ten times a second.
type queue struct {
	d       *driver
	prefix  string
	stop    context.CancelFunc
	waiters map[*waiter]bool
	view    *view         // nil while there is no watch
	changed chan struct{} // closed and replaced when there is a new view
}

// view is what is known since a watch was confirmed. Earlier deletions may have been missed.
type view struct {
	known   int64              // the field order contains all entries that exist and were created up to this revision
	order   []*mvccpb.KeyValue // the entries, in order of their creation
	reading int                // how many reads are under way
	gone    map[string]int64   // maps names of entries that were deleted during these reads to the revisions of the deletions
}

// entryState is what is known of a waiter's entry, which is the waiter's place in the queue.
type entryState struct {
	view  *view  // the queue's view when the read began; the result is valid only in this view
	name  string // the entry's name
	mine  int64  // the create revision of the entry; 0 until the queue was read
	front bool   // true if no entry ahead excludes this entry; stays true, because later entries are behind
	lost  bool   // true if the entry was deleted, or is not under its lease
}

func (w *waiter) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// join adds a waiter to the queue of its key. The first waiter starts the watch, and the last
// waiter that leaves ends it.
func (d *driver) join(w *waiter) *queue {
	d.mu.Lock()
	defer d.mu.Unlock()
	q := d.queues[w.c.Key]
	if q == nil {
		ctx, stop := context.WithCancel(d.cluster.ctx)
		q = &queue{d: d, prefix: queueOf(w.c.Key), stop: stop, waiters: map[*waiter]bool{}, changed: make(chan struct{})}
		d.cluster.spawn(func() { q.run(ctx) })
		d.queues[w.c.Key] = q
	}
	q.waiters[w] = true
	return q
}

func (q *queue) leave(w *waiter) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	if delete(q.waiters, w); len(q.waiters) == 0 {
		q.stop()
		delete(q.d.queues, w.c.Key)
	}
}

// The method begin prepares a read by the waiter w. The read must fetch the entries that were
// created after the revision known. If there is no watch, the result ok is false.
func (q *queue) begin(w *waiter, name string) (known int64, ok bool) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	v := q.view
	if w.place = (entryState{view: v, name: name}); v == nil {
		return 0, false
	}
	if v.reading++; v.gone == nil {
		v.gone = map[string]int64{}
	}
	return v.known, true
}

// The method named end adds the entries kvs to the view. w has read them at the given revision. The parameter
// mine is the create revision of w's own entry, or 0 if the read has failed.
func (q *queue) end(w *waiter, mine, revision int64, kvs []*mvccpb.KeyValue) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	v := w.place.view
	gone := v.gone
	if v.reading--; v.reading == 0 {
		v.gone = nil
	}
	if w.place.mine = mine; mine == 0 {
		return
	}
	if gone[w.place.name] > mine {
		w.place.lost = true
		return
	}

	for _, kv := range kvs {
		i, found := slices.BinarySearchFunc(v.order, kv, byAge)

		// Leave out an entry whose deletion was reported during the read.
		if !found && gone[string(kv.Key)] <= kv.CreateRevision {
			v.order = slices.Insert(v.order, i, kv)
		}
	}
	v.known = max(v.known, revision)
	q.wakeFrontLocked()
}

// wakeFrontLocked wakes the waiters whose entries hold the key.
func (q *queue) wakeFrontLocked() {
	n := 0
	if q.view != nil {
		n = holders(q.view.order)
	}
	if n == 0 {
		return
	}
	last := q.view.order[n-1].CreateRevision
	for w := range q.waiters {
		if p := &w.place; p.view == q.view && p.mine != 0 && p.mine <= last && !p.front {
			p.front = true
			w.signal()
		}
	}
}

// The type where is the state of a waiter's place.
type where int

const (
	behind where = iota // an entry ahead excludes the waiter's entry
	front               // the key is the waiter's
	unsure              // the queue must be read again
	lost                // the entry is gone
)

func (q *queue) where(w *waiter) where {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	switch p := w.place; {
	case p.lost:
		return lost
	case p.mine == 0:
		return unsure
	case p.front:
		return front
	case p.view != q.view:
		return unsure
	}
	return behind
}

// The method held returns the HeldError for a waiter that is behind others, or nil.
func (q *queue) held(w *waiter) error {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	if v := q.view; v != nil && len(v.order) > 0 && v.order[0].CreateRevision < w.place.mine {
		return refusal(v.order)
	}
	return nil
}

const (
	minPause = 20 * time.Millisecond // the pause before a refused watch is tried again
	maxPause = time.Second           // the longest pause, after several refusals
)

// The method run starts a new watch whenever a watch has ended, until ctx ends.
func (q *queue) run(ctx context.Context) {
	for p := minPause; ctx.Err() == nil; p = min(2*p, maxPause) {
		if m, err := q.d.cluster.member(ctx); err == nil && q.watch(ctx, m) {
			p = minPause / 2
		}
		pause(ctx, p)
	}
}

// The method watch runs one watch for deletions. It reports whether etcd has confirmed the watch.
func (q *queue) watch(ctx context.Context, m *member) (confirmed bool) {
	// The client has a stream for each set of metadata. If the auth token of a stream has expired,
	// etcd refuses all further watches on that stream. So use another stream after etcd has refused
	// or ended a watch.
	refusals := m.refusals.Load()
	for r := range m.client.Watch(streamFor(ctx, refusals), q.prefix, clientv3.WithPrefix(), clientv3.WithFilterPut(), clientv3.WithCreatedNotify()) {
		switch {
		case r.Created:
			confirmed = true
			m.keepOpen(refusals)
			q.see(&view{})
		case r.Canceled && ctx.Err() == nil:
			m.refusals.CompareAndSwap(refusals, refusals+1)
		default:
			for _, e := range r.Events {
				q.deleted(string(e.Kv.Key), e.Kv.ModRevision)
			}
		}
	}
	q.see(nil)
	return confirmed
}

// streamFor returns a context for which the client uses the stream after that many refusals.
func streamFor(ctx context.Context, refusals int64) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "hasp-refusals", strconv.FormatInt(refusals, 10))
}

// The method see sets the view, or removes it if v is nil, and wakes all waiters.
func (q *queue) see(v *view) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	if q.view = v; v != nil {
		close(q.changed)
		q.changed = make(chan struct{})
	}
	for w := range q.waiters {
		w.signal()
	}
}

// lose records that w's entry of this name is not under its lease. The entry stays in the view,
// because w may have got the key meanwhile, and moved the entry to another lease.
func (q *queue) lose(w *waiter, name string) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	if w.place.name == name {
		w.place.lost = true
		w.signal()
	}
}

// The constant ended stands for the revision of a deletion that no event has reported.
const ended = math.MaxInt64

// The method deleted records that an entry was deleted at a revision, and wakes affected waiters.
func (q *queue) deleted(name string, revision int64) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	if v := q.view; v != nil {
		if v.gone != nil {
			v.gone[name] = max(v.gone[name], revision) // a read of checkHead may be older than the event
		}
		// Keep an entry that was created later under the same name.
		v.order = slices.DeleteFunc(v.order, func(kv *mvccpb.KeyValue) bool { return string(kv.Key) == name && kv.CreateRevision < revision })
	}
	for w := range q.waiters {
		if p := &w.place; p.name == name && p.mine != 0 && p.mine < revision {
			p.lost = true
			w.signal()
		}
	}
	q.wakeFrontLocked()
}

// checkHead chooses at random a queue that callers wait in, and reads its first entry. If the entry
// is gone, checkHead records the deletion, because the event of the deletion may be lost. If there
// is no answer, the call begins a search, because a member that hangs reports no events.
func (d *driver) checkHead() {
	d.mu.Lock()
	var q *queue
	name := root
	for _, q = range d.queues {
		if q.view != nil && len(q.view.order) > 0 {
			name = string(q.view.order[0].Key)
		}
		break // at random
	}
	d.mu.Unlock()
	if q == nil {
		return
	}

	ctx, cancel := context.WithTimeout(d.cluster.ctx, searchTime)
	defer cancel()
	r, err := d.get(ctx, name)
	if err == nil && len(r.Kvs) == 0 && name != root {
		q.deleted(name, r.Header.Revision+1)
	}
}
