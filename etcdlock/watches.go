package etcdlock

import (
	"context"
	"errors"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// watches is the stream that all watches of a member share. A stream for each key would not
// do: a server allows 100 or 250 streams for each connection, and then answers nothing.
type watches struct {
	mu      sync.Mutex   // guards current
	current *watchStream // for new watches; nil if there is none
}

// watchStream is one stream for watches. etcd reports the events of each watch in order, and
// confirms watches in the order of the requests.
type watchStream struct {
	m      *member
	token  string // of the user, when the stream was opened: etcd checks each new watch by it
	ctx    context.Context
	cancel context.CancelFunc
	wake   chan struct{} // signals that out has grown; has room for one

	mu      sync.Mutex // guards all below
	out     []*pb.WatchRequest
	asked   []*watch         // not confirmed yet, in the order of the requests
	since   time.Time        // since when the first of asked is the first
	all     map[int64]*watch // by number
	last    int64            // number
	retired bool             // no new watch uses the stream
	failed  bool
}

// watch is the watch of a queue.
type watch struct {
	q     *queue
	s     *watchStream
	id    int64
	ended chan struct{} // closed when it reports nothing more
}

// watch begins a watch. The caller waits for its end, or stops it.
func (m *member) watch(q *queue) *watch {
	m.watches.mu.Lock()
	defer m.watches.mu.Unlock()
	if s := m.watches.current; s != nil {
		if w := s.add(q); w != nil {
			return w
		}
	}
	ctx, cancel := context.WithCancel(m.ctx)
	s := &watchStream{m: m, token: m.c.auth.current(), ctx: ctx, cancel: cancel, wake: make(chan struct{}, 1), all: map[int64]*watch{}}
	m.watches.current = s
	w := s.add(q)
	if !m.c.spawn(s.run) {
		s.fail()
	}
	return w
}

// add asks for a watch. It returns nil if the stream has failed or was retired.
func (s *watchStream) add(q *queue) *watch {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failed || s.retired {
		return nil
	}
	s.last++
	w := &watch{q: q, s: s, id: s.last, ended: make(chan struct{})}
	s.all[w.id] = w
	if len(s.asked) == 0 {
		s.since = time.Now()
	}
	s.asked = append(s.asked, w)
	s.m.asked() // the stream may hang before etcd has confirmed the watch
	s.sendLocked(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{
		WatchId: w.id, Key: []byte(q.prefix), RangeEnd: prefixEnd(q.prefix), Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NOPUT},
	}}})
	return w
}

// stop ends a watch whose queue has no waiters.
func (w *watch) stop() {
	s := w.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.removeLocked(w) {
		s.sendLocked(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: w.id}}})
	}
}

// removeLocked forgets a watch, and reports whether it was known. A retired stream ends with
// its last watch.
func (s *watchStream) removeLocked(w *watch) bool {
	if s.all[w.id] != w {
		return false
	}
	delete(s.all, w.id)
	close(w.ended)
	if s.retired && len(s.all) == 0 {
		s.cancel()
	}
	return true
}

func (s *watchStream) sendLocked(r *pb.WatchRequest) {
	s.out = append(s.out, r)
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// run keeps the stream until it fails. Its queues then ask for other watches.
func (s *watchStream) run() {
	c := s.m.c
	err := s.exchange()
	switch {
	case s.ctx.Err() != nil:
	case isUnavailable(err):
		c.leave(s.m)
	case isStale(err):
		_ = c.renewToken(s.ctx, s.m, s.token)
	}
	s.fail()
}

// fail ends all watches.
func (s *watchStream) fail() {
	s.cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failed = true
	for _, w := range s.all {
		s.removeLocked(w)
	}
	for range s.asked {
		s.m.done(false)
	}
	s.asked, s.out = nil, nil
}

// exchange opens the stream, and sends requests and takes in answers until it fails.
func (s *watchStream) exchange() error {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	stream, err := s.m.watching.Watch(ctx)
	if err != nil {
		return err
	}
	received := make(chan error, 1)
	s.m.c.wg.Go(func() {
		received <- s.receive(stream)
		cancel() // wakes send
	})
	s.send(ctx, stream)
	cancel()
	return <-received
}

// send sends requests until ctx ends or the stream fails; receive has the reason.
func (s *watchStream) send(ctx context.Context, stream pb.Watch_WatchClient) {
	for {
		s.mu.Lock()
		batch := s.out
		s.out = nil
		s.mu.Unlock()
		for _, r := range batch {
			if err := stream.Send(r); err != nil {
				return
			}
		}
		if len(batch) > 0 {
			continue
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return
		}
	}
}

// receive takes in the answers until the stream fails.
func (s *watchStream) receive(stream pb.Watch_WatchClient) error {
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}

		s.mu.Lock()
		w := s.all[r.WatchId]
		if r.Created {
			// Some versions of etcd refuse a watch without its number, but in order.
			if len(s.asked) == 0 {
				s.mu.Unlock()
				return errors.New("etcd confirmed a watch that was not asked for")
			}
			w = s.asked[0]
			s.asked, s.since = s.asked[1:], time.Now()
			s.m.done(true)
		}
		known := w != nil && s.all[w.id] == w // otherwise it was stopped meanwhile
		s.mu.Unlock()

		switch {
		case !known:
		case r.Canceled:
			s.refused(w)
		default:
			if r.Created {
				w.q.confirm()
			}
			w.q.take(r.Events)
		}
	}
}

// unstick ends the stream for new watches if it is stuck and confirms none.
func (ws *watches) unstick() {
	ws.mu.Lock()
	s := ws.current
	ws.mu.Unlock()
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.asked) > 0 && s.m.isStuck(s.since) {
		s.cancel()
	}
}

// refused ends a watch that etcd has refused or ended. etcd says permission denied also if
// the token of the stream has expired. Then new watches need a stream with a new token; the
// others go on.
func (s *watchStream) refused(w *watch) {
	end := func() {
		if s.m.c.renewToken(s.ctx, s.m, s.token) == nil {
			s.mu.Lock()
			s.retired = true
			s.mu.Unlock()
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.removeLocked(w)
	}
	if !s.m.c.spawn(end) {
		s.cancel()
	}
}
