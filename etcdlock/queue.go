package etcdlock

import (
	"context"
	"slices"
	"sort"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/hasplock/hasp/backend"
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

	known   int64            // each entry that was created up to this revision, and is there, is in order
	order   []place          // the entries, in order of their creation
	reading int              // reads under way
	gone    map[string]int64 // the deletions while there are any
}

// place is one entry.
type place struct {
	created int64 // its create revision
	name    string
	owner   string
}

// waiter is one Wait.
type waiter struct {
	name  string
	epoch int           // of the queue when its read began; what was read is valid in this epoch only
	mine  int64         // the create revision of its entry; 0 until the queue was read
	front bool          // no entry is ahead. It stays so: whatever comes later is behind
	lost  bool          // its entry was deleted
	wake  chan struct{} // signals a change; has room for one
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
		if !d.cluster.spawn(func() { q.run(ctx) }) {
			stop()
		}
		d.queues[key] = q
	}
	q.callers++
	return q
}

func (q *queue) leave(key string, w *waiter) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	q.forgetLocked(w)
	if q.callers--; q.callers == 0 {
		q.stop()
		delete(q.d.queues, key)
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
	q.forgetLocked(w)
	w.name, w.epoch = name, q.epoch
	q.waiters[name] = w
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
	if w.mine = mine; mine == 0 {
		return
	}
	if gone[w.name] > mine {
		w.lost = true
		return
	}
	if w.epoch != q.epoch {
		return // w reads again
	}

	for _, kv := range kvs {
		// A deletion that was reported during the read may be later than the read.
		if name := string(kv.Key); gone[name] <= kv.CreateRevision {
			q.add(name, kv)
		}
	}
	q.known = max(q.known, revision)
	q.wakeFront()
}

// forget makes w read the queue again.
func (q *queue) forget(w *waiter) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	q.forgetLocked(w)
}

func (q *queue) forgetLocked(w *waiter) {
	if q.waiters[w.name] == w {
		delete(q.waiters, w.name)
	}
	w.mine, w.front, w.lost = 0, false, false
}

func (q *queue) add(name string, kv *mvccpb.KeyValue) {
	i := sort.Search(len(q.order), func(i int) bool { return q.order[i].created >= kv.CreateRevision })
	if i == len(q.order) || q.order[i].created != kv.CreateRevision {
		r, _ := parseRecord(kv.Value)
		q.order = slices.Insert(q.order, i, place{kv.CreateRevision, name, r.owner})
	}
}

// wakeFront wakes the waiters that no entry is ahead of.
func (q *queue) wakeFront() {
	for i, p := range q.order {
		shared := isShared([]byte(p.name))
		if i > 0 && !shared {
			return
		}
		if w := q.waiters[p.name]; w != nil && w.mine == p.created && !w.front {
			w.front = true
			w.signal()
		}
		if !shared {
			return
		}
	}
}

// where is what a waiter knows of its place.
type where int

const (
	behind where = iota // others are ahead
	front               // the key is the waiter's
	unsure              // the queue must be read again
)

func (q *queue) where(w *waiter) where {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	switch {
	case w.lost, w.mine == 0:
		return unsure
	case w.front:
		return front
	case !q.armed || w.epoch != q.epoch:
		return unsure
	}
	return behind
}

// held returns the HeldError for a waiter that is behind others, or nil.
func (q *queue) held(w *waiter) error {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	if w.mine == 0 || len(q.order) == 0 || q.order[0].created >= w.mine {
		return nil
	}
	return &backend.HeldError{Owner: q.order[0].owner, Shared: isShared([]byte(q.order[0].name))}
}

const (
	minPause  = 20 * time.Millisecond // before a refused watch is tried again
	maxPause  = time.Second           // … when that happens again and again
	stuckTime = 2 * time.Second       // for the confirmation of a watch, and longer after each pause
)

// run keeps a watch until the queue ends.
func (q *queue) run(ctx context.Context) {
	for p := minPause; ctx.Err() == nil; p = min(2*p, maxPause) {
		w := &watch{confirmed: func() { q.arm(true) }, deleted: q.take, ended: make(chan struct{})}
		if m, err := q.d.cluster.member(ctx); err == nil && m.watch(q.prefix, w) == nil && q.follow(ctx, w, stuckTime+20*p) {
			p = minPause / 2
		}
		pause(ctx, p)
	}
}

// follow waits for the end of the watch or of the queue. It reports whether etcd has confirmed the
// watch. A stream whose watch is not confirmed in time is given up.
func (q *queue) follow(ctx context.Context, w *watch, late time.Duration) bool {
	t := time.NewTimer(late)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			if armed, _ := q.isArmed(); armed {
				continue
			}
			w.s.cancel()
			<-w.ended
		case <-w.ended:
		case <-ctx.Done():
			w.stop()
		}
		was, _ := q.isArmed()
		q.arm(false)
		return was
	}
}

// isArmed reports whether there is a watch. The channel is closed when there is the next one.
func (q *queue) isArmed() (bool, <-chan struct{}) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	return q.armed, q.changed
}

func (q *queue) isLost(w *waiter) bool {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	return w.lost
}

// lose notes that the entry name of w is gone, because its lease has ended.
func (q *queue) lose(w *waiter, name string) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	if q.waiters[name] == w {
		w.lost = true
		w.signal()
	}
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

// take takes in the entries that were deleted, and wakes the waiters that this concerns.
func (q *queue) take(events []*mvccpb.Event) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	for _, e := range events {
		if e.Type != mvccpb.Event_DELETE {
			continue
		}
		name, revision := string(e.Kv.Key), e.Kv.ModRevision
		if q.gone != nil {
			q.gone[name] = revision
		}
		// A name may have been used again.
		q.order = slices.DeleteFunc(q.order, func(p place) bool { return p.name == name && p.created < revision })
		if w := q.waiters[name]; w != nil && w.mine != 0 && w.mine < revision {
			w.lost = true
			w.signal()
		}
	}
	q.wakeFront()
}

// checkHead reads the first entry of a queue that callers wait in, which is another one each
// time. If the entry is gone, but its event has not come, the event may be lost.
func (d *Driver) checkHead(ctx context.Context, m *member) {
	d.mu.Lock()
	var q *queue
	name := root
	for _, q = range d.queues {
		if len(q.order) > 0 {
			name = q.order[0].name
		}
		break // at random
	}
	d.mu.Unlock()

	r, err := m.read(ctx, name)
	if err == nil && len(r.Kvs) == 0 && name != root {
		q.take([]*mvccpb.Event{{Type: mvccpb.Event_DELETE, Kv: &mvccpb.KeyValue{Key: []byte(name), ModRevision: r.Header.Revision + 1}}})
	}
}
