package etcdlock

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// watcher opens the watches of one member.
type watcher struct {
	m *member

	mu      sync.Mutex // guards the field watches
	watches *watches   // those on the stream in use; nil before the first watch
}

// watches are the watches of one member, which share a stream. The stream stays open as long as the
// member is in use, or until its auth token has expired. When the stream ends, the watches end.
type watches struct {
	opened time.Time
	end    context.CancelFunc // ends the stream
	more   chan struct{}      // signals that out has grown; has room for one signal

	mu     sync.Mutex         // guards the fields below
	out    []*pb.WatchRequest // the requests that are not sent yet
	byID   map[int64]*watch
	idle   map[string]*watch // the watches that no waiter uses, by their names
	last   int64             // the ID of the newest watch
	proven bool              // etcd has confirmed a watch
	over   bool              // the stream has ended
}

// watch reports deletions of one entry to one waiter at a time. Leases are reused, and so are the
// names of entries: when Clients take turns, each waits for the same few entries. So a watch that no
// waiter needs stays open for a while.
type watch struct {
	id      int64
	name    string
	m       *member
	watches *watches

	// The mutex of watches guards these fields.
	wake  chan<- struct{} // gets a signal at each change of the fields below
	since time.Time       // when the watch became idle

	at   atomic.Int64 // the revision at which etcd has confirmed the watch; 0 before that
	gone atomic.Int64 // the revision of the last deletion that was reported
	over atomic.Bool  // the watch has ended, and reports no deletion
}

// watch watches the entry with this name for deletions at the revision from or later. The result has
// ended already if a watch could not be confirmed lately.
func (wr *watcher) watch(name string, from int64, wake chan<- struct{}) *watch {
	ws := wr.current()
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if w := ws.idle[name]; w != nil {
		// The watch began at an earlier revision, because revisions only grow on a connection.
		delete(ws.idle, name)
		w.wake = wake
		return w
	}

	ws.last++
	w := &watch{id: ws.last, name: name, m: wr.m, watches: ws, wake: wake}
	if ws.over {
		w.over.Store(true)
		return w
	}
	ws.byID[w.id] = w
	create := &pb.WatchCreateRequest{
		Key:           []byte(name),
		StartRevision: from,
		WatchId:       w.id,
		Filters:       []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NOPUT},
	}

	request := &pb.WatchRequest_CreateRequest{CreateRequest: create}
	ws.sendLocked(&pb.WatchRequest{RequestUnion: request})
	return w
}

// current returns the watches on the stream in use. It opens a stream in place of one that has
// ended, but only once in maxRest if etcd has confirmed no watch.
func (wr *watcher) current() *watches {
	wr.mu.Lock()
	defer wr.mu.Unlock()
	old := wr.watches
	if old != nil && !old.isReplaceable() {
		return old
	}
	ctx, end := context.WithCancel(wr.m.client.Ctx())
	ws := &watches{
		opened: time.Now(),
		end:    end,
		more:   make(chan struct{}, 1),
		byID:   map[int64]*watch{},
		idle:   map[string]*watch{},
	}
	wr.watches = ws

	// A goroutine opens the stream, because if the call of a waiter opened it, the end of that call
	// would end it.
	wr.m.cluster.spawn(func() {
		defer ws.fail()
		ws.run(ctx, pb.NewWatchClient(wr.m.client.ActiveConnection()))
	})
	return ws
}

// run passes on requests and answers until the stream ends.
func (ws *watches) run(ctx context.Context, client pb.WatchClient) {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer ws.end()
	stream, err := client.Watch(ctx)
	if err != nil {
		return
	}
	wg.Go(func() { ws.write(ctx, stream) })
	for {
		r, err := stream.Recv()
		if err != nil {
			return
		}
		ws.answer(r)
	}
}

// The method write sends the requests. If Send fails, Recv returns the reason.
func (ws *watches) write(ctx context.Context, stream pb.Watch_WatchClient) {
	for {
		select {
		case <-ws.more:
		case <-ctx.Done():
			return
		}

		ws.mu.Lock()
		out := ws.out
		ws.out = nil
		ws.mu.Unlock()
		for _, r := range out {
			if stream.Send(r) != nil {
				return
			}
		}
	}
}

// sendLocked sends a request. It never blocks. If the stream has ended, nothing is sent.
func (ws *watches) sendLocked(r *pb.WatchRequest) {
	ws.out = append(ws.out, r)
	signal(ws.more)
}

func (ws *watches) isReplaceable() bool {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	return ws.over && (ws.proven || time.Since(ws.opened) >= maxRest)
}

// answer passes on what etcd reports.
func (ws *watches) answer(r *pb.WatchResponse) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if r.Created && r.Canceled {
		// etcd refuses each watch on this stream if the auth token of the stream has expired.
		ws.end()
		return
	}

	w := ws.byID[r.WatchId]
	if w == nil {
		return // it was cancelled
	}
	switch {
	case r.Canceled: // the revision at which it was to begin is compacted
		delete(ws.byID, w.id)
		w.over.Store(true)
		if ws.idle[w.name] == w {
			delete(ws.idle, w.name)
		}
	case r.Created:
		ws.proven = true
		w.at.Store(r.Header.Revision)
	}

	for _, e := range r.Events {
		if e.Type == mvccpb.Event_DELETE {
			w.gone.Store(e.Kv.ModRevision)
		}
	}

	signal(w.wake)
}

// fail ends all watches.
func (ws *watches) fail() {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.over = true
	for _, w := range ws.byID {
		w.over.Store(true)
		signal(w.wake)
	}
	ws.byID = nil
	ws.idle = nil
}

// stop says that its waiter does not need the watch any more; w may be nil.
func (w *watch) stop() {
	if w == nil {
		return
	}
	ws := w.watches
	ws.mu.Lock()
	defer ws.mu.Unlock()
	switch {
	case ws.byID[w.id] != w: // it has ended
	case ws.idle[w.name] != nil || len(ws.idle) >= maxIdle:
		ws.cancelLocked(w)
	default:
		w.since = time.Now()
		w.wake = nil
		ws.idle[w.name] = w
	}
}

func (ws *watches) cancelLocked(w *watch) {
	delete(ws.byID, w.id)
	cancel := &pb.WatchCancelRequest{WatchId: w.id}
	request := &pb.WatchRequest_CancelRequest{CancelRequest: cancel}
	ws.sendLocked(&pb.WatchRequest{RequestUnion: request})
}

// prune cancels the watches that no waiter has used for a while.
func (wr *watcher) prune() {
	wr.mu.Lock()
	ws := wr.watches
	wr.mu.Unlock()
	if ws == nil {
		return
	}
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for name, w := range ws.idle {
		if time.Since(w.since) >= idleTime {
			delete(ws.idle, name)
			ws.cancelLocked(w)
		}
	}
}

// signal sends a signal on a channel that has room for one.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
