package etcdlock

import (
	"context"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// watches is the stream that all watches of a member share. A stream for each key would not
// do: a server allows 100 or 250 streams for each connection, and then answers nothing.
//
// The watcher of etcd's client does the same, but it cannot run in the virtual time of the
// simulation: it waits for a channel of its package.
type watches struct {
	mu     sync.Mutex // guards stream
	stream *watchStream
}

// watchStream is a stream of watches. If etcd refuses or ends one of them, all end: the right to
// the entries was withdrawn, or the token of the stream has expired.
type watchStream struct {
	pb.Watch_WatchClient
	m       *member
	token   string // of the user, when the stream was opened
	cancel  context.CancelFunc
	sending sync.Mutex // is held to send

	mu     sync.Mutex // guards all below
	all    map[int64]*watch
	last   int64 // number
	failed bool
}

// watch reports the deletions of entries that happen after etcd has confirmed it.
type watch struct {
	confirmed func()                // is called once, first
	deleted   func([]*mvccpb.Event) // is called for events in their order
	ended     chan struct{}         // closed when nothing more is reported
	s         *watchStream
	id        int64
}

// watch begins w. The caller waits for its end, or stops it.
func (m *member) watch(prefix string, w *watch) error {
	m.watches.mu.Lock()
	defer m.watches.mu.Unlock()
	if s := m.watches.stream; s != nil && s.add(prefix, w) {
		return nil
	}
	ctx, cancel := context.WithCancel(m.ctx)
	s := &watchStream{m: m, token: m.c.auth.current(), cancel: cancel, all: map[int64]*watch{}}
	var err error
	if s.Watch_WatchClient, err = m.watching.Watch(ctx); err == nil && !m.c.spawn(s.receive) {
		err = errClosed
	}
	if err != nil {
		cancel()
		return err
	}
	m.watches.stream = s
	s.add(prefix, w)
	return nil
}

// add asks for w. It returns false if the stream has failed.
func (s *watchStream) add(prefix string, w *watch) bool {
	s.mu.Lock()
	if s.failed {
		s.mu.Unlock()
		return false
	}
	s.last++
	w.s, w.id = s, s.last
	s.all[w.id] = w
	s.mu.Unlock()
	s.send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{
		WatchId: w.id, Key: []byte(prefix), RangeEnd: prefixEnd(prefix), Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NOPUT},
	}}})
	return true
}

// send sends a request. If that fails, receive has the reason.
func (s *watchStream) send(r *pb.WatchRequest) {
	s.sending.Lock()
	defer s.sending.Unlock()
	_ = s.Send(r)
}

// stop ends a watch that nobody needs.
func (w *watch) stop() {
	w.s.mu.Lock()
	known := w.s.all[w.id] == w
	delete(w.s.all, w.id)
	w.s.mu.Unlock()
	if known {
		w.s.send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: w.id}}})
	}
}

// receive takes in the answers until the stream fails. Its queues then ask for other watches.
func (s *watchStream) receive() {
	c := s.m.c
	for {
		r, err := s.Recv()
		s.mu.Lock()
		w := s.all[r.GetWatchId()]
		s.mu.Unlock()
		refused := err == nil && r.Canceled && (r.Created || w != nil)
		switch {
		case err != nil || refused:
			if s.m.ctx.Err() == nil && isUnavailable(err) {
				c.leave(s.m)
			}
			// etcd 3.4 says permission denied also if the token has expired.
			if c.auth != nil && (refused || isStale(err)) {
				ctx, cancel := context.WithTimeout(s.m.ctx, searchTime)
				_ = c.auth.renew(ctx, s.m, s.token)
				cancel()
			}
			s.fail()
			return
		case w == nil: // it was stopped meanwhile
		case r.Created:
			w.confirmed()
		default:
			w.deleted(r.Events)
		}
	}
}

// fail ends all watches.
func (s *watchStream) fail() {
	s.cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failed = true
	for _, w := range s.all {
		close(w.ended)
	}
	s.all = nil
}
