package etcdlock

import (
	"context"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// queue watches the entries of one key for all waiters of this driver. The driver's mu
// guards its fields.
//
// The watch has no start revision. It reports what happens after etcd has confirmed it, so
// a waiter reads the queue only then. A watch from a revision of the past would have to wait
// for a loop of etcd that runs ten times a second.
type queue struct {
	d       *Driver
	prefix  string
	stop    context.CancelFunc
	waiters map[*waiter]bool
	armed   bool          // a watch is confirmed
	epoch   int           // how many watches were confirmed
	changed chan struct{} // closed and replaced when armed becomes true
}

// waiter is one Wait.
type waiter struct {
	name  string
	epoch int              // of the queue when the read began; what was read is valid in this epoch only
	mine  int64            // the create revision of its entry; 0 until the queue was read
	ahead map[string]int64 // the entries that it waits for, with their create revisions
	gone  map[string]int64 // entries that were deleted before the queue was read, with the revisions
	lost  bool             // its entry was deleted
	wake  chan struct{}    // signals a change; has room for one
}

// join adds a waiter to the queue of a key. The first waiter starts the watch, and the
// last that leaves ends it.
func (d *Driver) join(key string, w *waiter) *queue {
	d.mu.Lock()
	defer d.mu.Unlock()
	q := d.queues[key]
	if q == nil {
		ctx, stop := context.WithCancel(d.cluster.ctx)
		q = &queue{d: d, prefix: queueOf(key), stop: stop, waiters: map[*waiter]bool{}, changed: make(chan struct{})}
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

// begin prepares w for reading the queue. It returns false, and a channel that tells when to
// ask again, if there is no watch.
func (q *queue) begin(w *waiter, name string) (ok bool, changed <-chan struct{}) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	w.name, w.epoch, w.mine, w.ahead, w.gone, w.lost = name, q.epoch, 0, nil, map[string]int64{}, false
	return q.armed, q.changed
}

// read takes in the entries of the queue, of which w's own has the create revision mine.
func (q *queue) read(w *waiter, mine int64, kvs []*mvccpb.KeyValue) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	w.mine = mine
	w.ahead = map[string]int64{}
	shared := isShared([]byte(w.name))
	for _, kv := range kvs {
		if kv.CreateRevision < w.mine && !(shared && isShared(kv.Key)) {
			w.ahead[string(kv.Key)] = kv.CreateRevision
		}
	}
	for name, revision := range w.gone {
		w.deletedLocked(name, revision)
	}
	w.gone = nil
}

// deletedLocked takes in that an entry was deleted at a revision.
func (w *waiter) deletedLocked(name string, revision int64) {
	switch created, ok := w.ahead[name]; {
	case w.mine == 0:
		if w.gone != nil {
			w.gone[name] = revision // the queue is being read
		}
	case name == w.name && revision > w.mine:
		w.lost = true
		w.signal()
	case ok && revision > created:
		if delete(w.ahead, name); len(w.ahead) == 0 {
			w.signal()
		}
	}
}

// forget makes w read the queue again.
func (q *queue) forget(w *waiter) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	w.mine, w.ahead, w.gone, w.lost = 0, nil, nil, false
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
	case w.lost, w.mine == 0, len(w.ahead) > 0 && (!q.armed || w.epoch != q.epoch):
		return unsure
	case len(w.ahead) == 0:
		return front // and stays so: whatever comes later is behind
	}
	return behind
}

// run keeps a watch open until the queue ends.
func (q *queue) run(ctx context.Context) {
	for ctx.Err() == nil {
		q.watch(ctx)
		q.d.mu.Lock()
		q.armed = false
		for w := range q.waiters {
			w.signal()
		}
		q.d.mu.Unlock()

		t := time.NewTimer(20 * time.Millisecond)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
		}
	}
}

// watch opens a watch and takes in its events until it fails.
func (q *queue) watch(ctx context.Context) {
	m, err := q.d.cluster.member(ctx)
	if err != nil {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(m.ctx, cancel)() // a member that was given up

	// The stream may hang before etcd has confirmed the watch.
	m.asked()
	confirmed := false
	defer func() {
		if !confirmed {
			m.done(false)
		}
	}()
	token := q.d.cluster.auth.current()
	stream, err := m.watches.Watch(ctx)
	if err == nil {
		err = stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{
			Key: []byte(q.prefix), RangeEnd: prefixEnd(q.prefix), Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NOPUT},
		}}})
	}
	for err == nil {
		var r *pb.WatchResponse
		if r, err = stream.Recv(); err != nil {
			break
		}
		if r.Canceled {
			// etcd says permission denied also if the token has expired.
			_ = q.d.cluster.renewToken(ctx, m, token)
			return
		}
		if r.Created && !confirmed {
			confirmed = true
			m.done(true)
			q.confirm()
		}
		q.take(r.Events)
	}
	switch {
	case ctx.Err() != nil:
	case isUnavailable(err):
		q.d.cluster.leave(m)
	case isStale(err):
		_ = q.d.cluster.renewToken(ctx, m, token)
	}
}

// confirm notes that a watch was confirmed.
func (q *queue) confirm() {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	q.armed = true
	q.epoch++
	close(q.changed)
	q.changed = make(chan struct{})
	for w := range q.waiters {
		w.signal()
	}
}

// take tells the waiters of the entries that were deleted.
func (q *queue) take(events []*mvccpb.Event) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	for _, e := range events {
		if e.Type == mvccpb.Event_DELETE {
			for w := range q.waiters {
				w.deletedLocked(string(e.Kv.Key), e.Kv.ModRevision)
			}
		}
	}
}
