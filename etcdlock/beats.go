package etcdlock

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// A member that is not the leader forwards each keep-alive to the leader, and answers those
// of a stream one after another: one in each round trip between the members. So there are
// several streams, and more of them if answers are slow.
const (
	fewStreams = 8  // that are used if answers come at once
	maxStreams = 64 // a server may allow 100 streams or 250 for each connection
	backlog    = 4  // unanswered requests of a stream from which on another one is used
)

// beats keeps leases alive on a stream of a member. Requests are sent without waiting
// for the answers to those before. etcd answers in order.
type beats struct {
	m    *member
	wake chan struct{} // signals that out has grown; has room for one
	open atomic.Int64  // requests without an answer

	mu      sync.Mutex         // guards all below
	running bool               // a stream is open
	out     []*beat            // not sent yet
	sent    []*beat            // sent and not answered
	since   time.Time          // since when the stream owes an answer
	cancel  context.CancelFunc // ends the stream; nil if none is open
}

// beat is one request to begin a lease's term anew.
type beat struct {
	lease int64
	began time.Duration // by the clock, before it was sent, so the term ends later than began + ttl
	done  chan struct{}

	// Set when done is closed.
	ttl int64 // the lease's term in seconds; 0 or less if the lease has ended
	err error
}

// beat sends a request for a lease. The caller waits for done.
func (c *cluster) beat(ctx context.Context, lease int64) (*beat, error) {
	m, err := c.member(ctx)
	if err != nil {
		return nil, err
	}
	return m.beat(lease), nil
}

// tryBeat is beat, but it returns nil if no member is in use now.
func (c *cluster) tryBeat(lease int64) *beat {
	c.mu.Lock()
	m := c.current
	searching := c.search != nil
	c.mu.Unlock()
	if m == nil || searching {
		return nil
	}
	return m.beat(lease)
}

func (m *member) beat(lease int64) *beat {
	b := &beat{lease: lease, began: m.c.clock.now(), done: make(chan struct{})}
	m.asked()
	m.leastBusy(lease).add(b)
	return b
}

// leastBusy returns the stream for a request. Each lease has a stream of its own choice among
// the first few. If many requests of that one have no answer, the stream with the fewest
// is used.
func (m *member) leastBusy(lease int64) *beats {
	best := &m.beats[uint64(lease)%fewStreams]
	least := best.open.Load()
	if least < backlog {
		return best
	}
	for i := range m.beats {
		if n := m.beats[i].open.Load(); n < least {
			best, least = &m.beats[i], n
		}
		if least == 0 {
			break
		}
	}
	return best
}

// wait returns the term of the lease in seconds, which is 0 or less if the lease has ended.
func (b *beat) wait(ctx context.Context) (ttl int64, err error) {
	select {
	case <-b.done:
		return b.ttl, b.err
	case <-ctx.Done():
	}
	select {
	case <-b.done: // select chooses at random if both are ready
		return b.ttl, b.err
	default:
		return 0, ctx.Err()
	}
}

func (s *beats) add(b *beat) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open.Add(1) == 1 {
		s.since = time.Now()
	}
	s.out = append(s.out, b)
	if !s.running {
		s.running = true
		if !s.m.c.spawn(s.run) {
			s.failLocked(errClosed)
		}
		return
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// run keeps a stream until it fails. If etcd has refused the token, run sends the requests
// that have no answer again, with a new token.
func (s *beats) run() {
	c := s.m.c
	var err error
	for refused := false; ; refused = true {
		token := c.auth.current()
		var answered bool
		answered, err = s.stream()
		if s.m.ctx.Err() != nil || !isStale(err) || refused && !answered || c.renewToken(s.m.ctx, s.m, token) != nil {
			break
		}
		s.mu.Lock()
		s.out, s.sent = append(s.sent, s.out...), nil
		s.mu.Unlock()
	}

	if s.m.ctx.Err() == nil && isUnavailable(err) {
		c.leave(s.m)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failLocked(explain(c.ctx, s.m.endpoint, err))
}

// stream opens a stream and sends requests until the stream fails. It reports whether there
// was an answer.
func (s *beats) stream() (answered bool, err error) {
	ctx, cancel := context.WithCancel(s.m.ctx)
	defer cancel()
	s.mu.Lock()
	s.since, s.cancel = time.Now(), cancel
	s.mu.Unlock()
	stream, err := s.m.leases.LeaseKeepAlive(ctx)
	if err != nil {
		return false, err
	}
	received := make(chan error, 1)
	s.m.c.wg.Go(func() {
		var err error
		answered, err = s.receive(stream)
		received <- err
		cancel() // wakes send
	})
	s.send(ctx, stream)
	cancel()
	err = <-received
	return answered, err
}

// send sends requests until ctx ends or the stream fails; receive has the reason.
func (s *beats) send(ctx context.Context, stream pb.Lease_LeaseKeepAliveClient) {
	for {
		// A request must be in sent before its answer can come.
		s.mu.Lock()
		batch := s.out
		s.out = nil
		s.sent = append(s.sent, batch...)
		s.mu.Unlock()

		for _, b := range batch {
			if err := stream.Send(&pb.LeaseKeepAliveRequest{ID: b.lease}); err != nil {
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
func (s *beats) receive(stream pb.Lease_LeaseKeepAliveClient) (answered bool, err error) {
	for {
		r, err := stream.Recv()
		if err != nil {
			return answered, err
		}
		s.mu.Lock()
		if len(s.sent) == 0 || s.sent[0].lease != r.ID {
			s.mu.Unlock()
			return answered, errors.New("etcd answered a keep-alive out of order")
		}
		b := s.sent[0]
		s.sent = s.sent[1:]
		s.since = time.Now()
		s.mu.Unlock()
		answered = true
		s.open.Add(-1)
		b.ttl = r.TTL
		s.m.done(true)
		close(b.done)
	}
}

// unstick ends the stream if it is stuck. etcd itself may block a stream: a keep-alive of a lease
// that has expired waits until the lease is revoked.
func (s *beats) unstick() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cancel != nil && len(s.sent)+len(s.out) > 0 && s.m.isStuck(s.since) {
		s.cancel()
	}
}

// failLocked ends all requests with err. The next request opens a new stream.
func (s *beats) failLocked(err error) {
	for _, bs := range [][]*beat{s.sent, s.out} {
		for _, b := range bs {
			s.open.Add(-1)
			b.err = err
			s.m.done(false)
			close(b.done)
		}
	}
	s.out, s.sent, s.running, s.cancel = nil, nil, false, nil
}

// spawn starts a goroutine that the driver's Close waits for. It returns false after Close
// has begun.
func (c *cluster) spawn(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() != nil {
		return false
	}
	c.wg.Go(f)
	return true
}
