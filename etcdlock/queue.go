package etcdlock

import (
	"context"
	"math"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// queue is what the waiters of this driver for one key know of its entries. The driver's mu
// guards its fields.
//
// A watch reports deletions only. The entries come from the reads of the waiters: each reads
// those that were created since the last read. So an event that is lost only delays a waiter.
// When a new watch is confirmed, deletions may have been missed, so a new epoch begins in which
// nothing is known.
//
// The watch has no start revision. It reports what happens after etcd has confirmed it, so
// a waiter reads the queue only then. A watch from a revision of the past would have to wait
// for a loop of etcd that runs ten times a second.
type queue struct {
	d       *Driver
	prefix  string
	stop    context.CancelFunc
	callers int                // that wait
	waiters map[string]*waiter // by the name of the entry
	armed   bool               // a watch is confirmed
	epoch   int                // how many watches were confirmed
	changed chan struct{}      // closed and replaced when armed becomes true

	known   int64              // each entry that was created up to this revision, and is there, is in order
	order   []*mvccpb.KeyValue // the entries, in order of their creation
	reading int                // reads under way
	gone    map[string]int64   // the deletions while there are any
}

// place is what is known of the place of a waiter.
type place struct {
	name  string // of the entry
	epoch int    // of the queue when its read began; what was read is valid in this epoch only
	mine  int64  // the create revision of the entry; 0 until the queue was read
	front bool   // no entry is ahead. It stays so: whatever comes later is behind
	lost  bool   // the entry was deleted
}

func (w *waiter) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// join adds a caller to the queue of a key. The first one starts the watch, and the last that
// leaves ends it.
func (d *Driver) join(key string) *queue {
	d.mu.Lock()
	defer d.mu.Unlock()
	q := d.queues[key]
	if q == nil {
		ctx, stop := context.WithCancel(d.cluster.ctx)
		q = &queue{d: d, prefix: queueOf(key), stop: stop, waiters: map[string]*waiter{}, changed: make(chan struct{})}
		d.cluster.spawn(func() { q.run(ctx) })
		d.queues[key] = q
	}
	q.callers++
	return q
}

func (q *queue) leave(w *waiter) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	delete(q.waiters, w.place.name)
	if q.callers--; q.callers == 0 {
		q.stop()
		delete(q.d.queues, w.c.Key)
	}
}

// begin prepares w for reading the entries that were created after the revision known. It
// returns false if there is no watch.
func (q *queue) begin(w *waiter, name string) (known int64, ok bool) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	if !q.armed {
		return 0, false
	}
	delete(q.waiters, w.place.name)
	q.waiters[name] = w
	w.place = place{name: name, epoch: q.epoch}
	if q.reading++; q.gone == nil {
		q.gone = map[string]int64{}
	}
	return q.known, true
}

// end takes in the entries that a waiter has read at a revision. Its own has the create revision
// mine, which is 0 if the read has failed.
func (q *queue) end(w *waiter, mine, revision int64, kvs []*mvccpb.KeyValue) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	gone := q.gone
	if q.reading--; q.reading == 0 {
		q.gone = nil
	}
	w.place.mine = mine
	switch {
	case mine == 0:
		return
	case gone[w.place.name] > mine:
		w.place.lost = true
		return
	case w.place.epoch != q.epoch:
		return // w reads again
	}

	for _, kv := range kvs {
		i, found := slices.BinarySearchFunc(q.order, kv, byAge)

		// A deletion that was reported during the read may be later than the read.
		if !found && gone[string(kv.Key)] <= kv.CreateRevision {
			q.order = slices.Insert(q.order, i, kv)
		}
	}
	q.known = max(q.known, revision)
	q.wakeFront()
}

// wakeFront wakes the waiters that no entry is ahead of.
func (q *queue) wakeFront() {
	for _, kv := range q.order[:holders(q.order)] {
		if w := q.waiters[string(kv.Key)]; w != nil && w.place.mine == kv.CreateRevision && !w.place.front {
			w.place.front = true
			w.signal()
		}
	}
}

// where is what a waiter knows of its place.
type where int

const (
	behind where = iota // others are ahead
	front               // the key is the waiter's
	unsure              // the queue must be read again
	lost                // the entry is gone
)

func (q *queue) where(w *waiter) where {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	switch {
	case w.place.lost:
		return lost
	case w.place.mine != 0 && w.place.front:
		return front
	case w.place.mine == 0 || !q.armed || w.place.epoch != q.epoch:
		return unsure
	}
	return behind
}

// held returns the HeldError for a waiter that is behind others, or nil.
func (q *queue) held(w *waiter) error {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	if w.place.mine == 0 || len(q.order) == 0 || q.order[0].CreateRevision >= w.place.mine {
		return nil
	}
	return refusal(q.order)
}

const (
	minPause = 20 * time.Millisecond // before a refused watch is tried again
	maxPause = time.Second           // … when that happens again and again
)

// run keeps a watch until the queue ends.
func (q *queue) run(ctx context.Context) {
	for p := minPause; ctx.Err() == nil; p = min(2*p, maxPause) {
		if m, err := q.d.cluster.member(ctx); err == nil && q.watch(ctx, m) {
			p = minPause / 2
		}
		pause(ctx, p)
	}
}

// watch takes in deletions until the watch ends. It reports whether etcd has confirmed the watch.
func (q *queue) watch(ctx context.Context, m *member) (confirmed bool) {
	m.mu.Lock()
	watcher := m.watcher
	m.mu.Unlock()
	for r := range watcher.Watch(ctx, q.prefix, clientv3.WithPrefix(), clientv3.WithFilterPut(), clientv3.WithCreatedNotify()) {
		switch {
		case r.Created:
			confirmed = true
			q.arm(true)
		case r.Canceled && ctx.Err() == nil:
			m.rewatch(watcher)
		default:
			for _, e := range r.Events {
				q.deleted(string(e.Kv.Key), e.Kv.ModRevision)
			}
		}
	}
	q.arm(false)
	return confirmed
}

// rewatch replaces a watcher after a watch was refused or ended by etcd. Its stream may have a
// token that has expired, and all further watches on it would be refused.
func (m *member) rewatch(old clientv3.Watcher) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.watcher == old {
		m.watcher = clientv3.NewWatcher(m.client)
		old.Close()
	}
}

// isArmed reports whether there is a watch. The channel is closed when there is the next one.
func (q *queue) isArmed() (bool, <-chan struct{}) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	return q.armed, q.changed
}

// arm notes whether there is a watch.
func (q *queue) arm(armed bool) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	if q.armed = armed; armed {
		q.epoch++
		q.known, q.order = 0, nil
		close(q.changed)
		q.changed = make(chan struct{})
	}
	for _, w := range q.waiters {
		w.signal()
	}
}

// ended is the revision of a deletion that was found out without an event.
const ended = math.MaxInt64

// deleted notes that an entry was deleted at a revision, and wakes the waiters that this concerns.
func (q *queue) deleted(name string, revision int64) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	if q.gone != nil {
		q.gone[name] = revision
	}
	// A name may have been used again.
	q.order = slices.DeleteFunc(q.order, func(kv *mvccpb.KeyValue) bool { return string(kv.Key) == name && kv.CreateRevision < revision })
	if w := q.waiters[name]; w != nil && w.place.mine != 0 && w.place.mine < revision {
		w.place.lost = true
		w.signal()
	}
	q.wakeFront()
}

// checkHead reads the first entry of a queue that callers wait in, which is another one each
// time. If the entry is gone, but its event has not come, the event may be lost.
func (d *Driver) checkHead(ctx context.Context) {
	d.mu.Lock()
	var q *queue
	name := root
	for _, q = range d.queues {
		if len(q.order) > 0 {
			name = string(q.order[0].Key)
		}
		break // at random
	}
	d.mu.Unlock()

	r, err := d.get(ctx, name)
	if err == nil && len(r.Kvs) == 0 && name != root {
		q.deleted(name, r.Header.Revision+1)
	}
}
