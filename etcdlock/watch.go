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
// names of entries: when Clients take turns, each waits for the same few entries. So a watch that
// no waiter needs stays open for a while.
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

// watch watches the entry with this name for deletions at the revision from or later. Each change
// of the watch sends a signal to wake. If the stream has ended, and the method current does not
// open another one yet, the result is a watch that has ended already.
func (wr *watcher) watch(name string, from int64, wake chan<- struct{}) *watch {
	ws := wr.current()
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if w := ws.idle[name]; w != nil {
		// This watch reports the deletions from the revision from on, because it began earlier, and
		// so at a smaller revision: revisions only grow on a connection.
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

// current returns the watches on the stream in use. If that stream has ended, current opens another
// one. But if etcd confirmed no watch on the stream that has ended, it waits with that until
// maxRest has passed since the stream was opened, and returns the watches that have ended.
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

	// Open the stream on a goroutine and under the client's context, because the stream must
	// outlive the waiter that needs it first.
	wr.m.cluster.spawn(func() {
		defer ws.fail()
		ws.run(ctx, pb.NewWatchClient(wr.m.client.ActiveConnection()))
	})
	return ws
}

// run opens the stream, then sends the requests and passes on the answers, until the stream ends.
func (ws *watches) run(ctx context.Context, client pb.WatchClient) {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer ws.end() // runs before wg.Wait, and ends the method write
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

// The method write sends the requests until the stream ends. If Send fails, write returns, and the
// Recv in run returns the reason.
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

// sendLocked lets the method write send a request, and does not block. If the stream has ended, the
// request is not sent.
func (ws *watches) sendLocked(r *pb.WatchRequest) {
	ws.out = append(ws.out, r)
	signal(ws.more)
}

// isReplaceable reports whether the stream has ended, and another one may be opened: see current.
func (ws *watches) isReplaceable() bool {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	return ws.over && (ws.proven || time.Since(ws.opened) >= maxRest)
}

// answer notes in a watch what etcd reports about it, and wakes its waiter.
func (ws *watches) answer(r *pb.WatchResponse) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if r.Created && r.Canceled {
		// etcd has refused the watch, probably because the auth token of the stream has expired. As
		// it would refuse each further watch, end the stream, so that the next one has a new token.
		ws.end()
		return
	}

	w := ws.byID[r.WatchId]
	if w == nil {
		return // stop or prune has cancelled the watch
	}
	switch {
	case r.Canceled: // because etcd has compacted the revision at which the watch was to begin
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

	signal(w.wake) // does nothing if the watch is idle, because wake is nil then
}

// fail marks all watches as ended, because their stream has ended, and wakes their waiters.
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

// stop is called when the waiter of w does not need the watch any more. The watch becomes idle, or
// is cancelled if the entry has an idle watch already, or there are maxIdle of them. If w is nil,
// stop does nothing.
func (w *watch) stop() {
	if w == nil {
		return
	}
	ws := w.watches
	ws.mu.Lock()
	defer ws.mu.Unlock()
	switch {
	case ws.byID[w.id] != w: // the watch has ended
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

// signal sends a signal on a channel that has room for one, unless a signal is in the channel
// already.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
