package etcdlock

import (
	"context"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
)

// queue watches the entries of one key for all waiters of this driver. The driver's mu
// guards its fields.
//
// The watch has no start revision. It reports what happens after etcd has confirmed it, so
// a waiter reads the queue only then. A watch from a revision of the past would have to wait
// for a loop of etcd that runs ten times a second.
//
// A watch reports deletions only. The entries come from the reads of the waiters: each reads
// those that were created since the last read. When a new watch is confirmed, deletions may
// have been missed, so a new epoch begins in which nothing is known.
type queue struct {
	d       *Driver
	prefix  string
	stop    context.CancelFunc
	waiters map[*waiter]bool
	armed   bool          // a watch is confirmed
	epoch   int           // how many watches were confirmed
	changed chan struct{} // closed and replaced when armed becomes true
	turns   chan struct{} // has room for the waiters that may read at once

	known         int64 // every entry that was created up to this revision, and is there, is in one of the lines
	alone, shared line
}

// maxReading is how many waiters read the queue at once. etcd looks at the whole queue for
// each. If thousands came together, their calls would take longer than they may.
const maxReading = 16

// waiter is one Wait.
type waiter struct {
	name  string
	epoch int              // of the queue when the read began; what was read is valid in this epoch only
	mine  int64            // the create revision of its entry; 0 until the queue was read
	front bool             // no entry is ahead. It stays so: whatever comes later is behind
	gone  map[string]int64 // entries that were deleted while the queue is read, with the revisions
	lost  bool             // its entry was deleted
	wake  chan struct{}    // signals a change; has room for one
}

// line is the entries of one kind, shared or not.
type line struct {
	created map[string]int64 // create revisions, by name
	order   []int64          // the same, ascending
}

func (l *line) add(name string, created int64) {
	old := l.created[name]
	if old >= created {
		return
	}
	// A name may be used again before the event of its deletion comes.
	l.remove(name, created)
	l.created[name] = created
	i, _ := slices.BinarySearch(l.order, created)
	l.order = slices.Insert(l.order, i, created)
}

// remove takes in that name was deleted at a revision.
func (l *line) remove(name string, revision int64) {
	created, ok := l.created[name]
	if !ok || created >= revision {
		return
	}
	delete(l.created, name)
	if i, ok := slices.BinarySearch(l.order, created); ok {
		l.order = slices.Delete(l.order, i, i+1)
	}
}

// before reports whether the line has an entry that was created before a revision.
func (l *line) before(revision int64) bool { return len(l.order) > 0 && l.order[0] < revision }

// join adds a waiter to the queue of a key. The first waiter starts the watch, and the
// last that leaves ends it.
func (d *Driver) join(key string, w *waiter) *queue {
	d.mu.Lock()
	defer d.mu.Unlock()
	q := d.queues[key]
	if q == nil {
		ctx, stop := context.WithCancel(d.cluster.ctx)
		q = &queue{d: d, prefix: queueOf(key), stop: stop, waiters: map[*waiter]bool{}, changed: make(chan struct{}), turns: make(chan struct{}, maxReading)}
		if !d.cluster.spawn(func() { q.run(ctx) }) {
			stop()
		}
		d.queues[key] = q
	}
	q.waiters[w] = true
	return q
}

func (q *queue) leave(key string, w *waiter) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	delete(q.waiters, w)
	if len(q.waiters) == 0 {
		q.stop()
		delete(q.d.queues, key)
	}
}

// begin prepares w for reading the entries that were created after the revision known. It
// returns false, and a channel that tells when to ask again, if there is no watch.
func (q *queue) begin(w *waiter, name string) (known int64, ok bool, changed <-chan struct{}) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	w.name, w.epoch, w.mine, w.front, w.gone, w.lost = name, q.epoch, 0, false, map[string]int64{}, false
	return q.known, q.armed, q.changed
}

// read takes in the entries that a waiter has read at a revision. Its own has the create
// revision mine.
func (q *queue) read(w *waiter, mine, revision int64, kvs []*mvccpb.KeyValue) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	gone := w.gone
	w.mine, w.gone = mine, nil
	if deleted := gone[w.name]; deleted > mine {
		w.lost = true
		return
	}
	if w.epoch != q.epoch {
		return // w reads again
	}

	for _, kv := range kvs {
		// A deletion that was reported during the read may be later than the read.
		if name := string(kv.Key); gone[name] <= kv.CreateRevision {
			q.line(name).add(name, kv.CreateRevision)
		}
	}
	q.known = max(q.known, revision)
	w.front = q.isFront(w)
}

func (q *queue) line(name string) *line {
	if isShared([]byte(name)) {
		return &q.shared
	}
	return &q.alone
}

func (q *queue) isFront(w *waiter) bool {
	return !q.alone.before(w.mine) && (isShared([]byte(w.name)) || !q.shared.before(w.mine))
}

// forget makes w read the queue again.
func (q *queue) forget(w *waiter) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	w.mine, w.front, w.gone, w.lost = 0, false, nil, false
}

func (w *waiter) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// place is what a waiter knows of its place.
type place int

const (
	behind place = iota // others are ahead
	front               // the key is the waiter's
	unsure              // the queue must be read again
)

func (q *queue) place(w *waiter) place {
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

// The queue of a key that etcd refuses to watch is tried again after a pause, which grows.
const (
	minPause = 20 * time.Millisecond
	maxPause = time.Second
)

// run keeps a watch until the queue ends.
func (q *queue) run(ctx context.Context) {
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		if m, err := q.d.cluster.member(ctx); err == nil {
			w := m.watch(q)
			select {
			case <-w.ended:
			case <-ctx.Done():
				w.stop()
				return
			}
			if q.disarm() {
				pause = minPause
			}
		}

		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

// disarm notes that there is no watch. It reports whether there was one.
func (q *queue) disarm() (was bool) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	was, q.armed = q.armed, false
	for w := range q.waiters {
		w.signal()
	}
	return was
}

// confirm notes that a watch was confirmed.
func (q *queue) confirm() {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	q.armed = true
	q.epoch++
	q.known, q.alone, q.shared = 0, line{created: map[string]int64{}}, line{created: map[string]int64{}}
	close(q.changed)
	q.changed = make(chan struct{})
	for w := range q.waiters {
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
		q.line(name).remove(name, revision)
		for w := range q.waiters {
			switch {
			case w.gone != nil:
				w.gone[name] = revision
			case name == w.name && w.mine != 0 && revision > w.mine:
				w.lost = true
				w.signal()
			}
		}
	}
	for w := range q.waiters {
		if w.mine != 0 && !w.front && w.epoch == q.epoch && q.isFront(w) {
			w.front = true
			w.signal()
		}
	}
}
