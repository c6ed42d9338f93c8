package etcdlock

import (
	"context"
	"io"
	"math"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

// member is one connection to one member of the etcd. The driver uses one member at a time. It
// gives up a member if the connection fails, if the member has no leader, or if the member is
// silent while another one answers.
type member struct {
	c        *cluster
	endpoint string
	conn     *grpc.ClientConn
	kv       pb.KVClient
	leases   pb.LeaseClient
	watching pb.WatchClient
	watches  watches

	ctx context.Context // ends when the member is given up; streams live in it
	end context.CancelFunc

	left bool // the member was given up, and must not be used again; c.mu guards it

	mu      sync.Mutex // guards all below
	idle    []*stream  // that no call uses
	pending int        // calls that have no answer yet
	silent  time.Time  // since when calls have had no answer; zero if none waits and none has failed since the last answer
	sent    time.Time  // when the last call was sent
}

func (c *cluster) connect(endpoint string) (*member, error) {
	conn, err := c.dial(endpoint)
	if err != nil {
		return nil, err
	}
	calls := unlimited{conn}
	m := &member{c: c, endpoint: endpoint, conn: conn, kv: pb.NewKVClient(calls), leases: pb.NewLeaseClient(calls), watching: pb.NewWatchClient(calls)}
	m.ctx, m.end = context.WithCancel(c.ctx)
	return m, nil
}

// unlimited is a connection that takes answers of any size. gRPC takes 4 MiB, and a queue of
// waiters with long names and owners may have more.
type unlimited struct{ *grpc.ClientConn }

func (u unlimited) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	return u.ClientConn.Invoke(ctx, method, args, reply, append(opts, grpc.MaxCallRecvMsgSize(math.MaxInt32))...)
}

func (u unlimited) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return u.ClientConn.NewStream(ctx, desc, method, append(opts, grpc.MaxCallRecvMsgSize(math.MaxInt32))...)
}

// close gives the member up. Its calls fail, with unknown outcomes.
func (m *member) close() {
	m.end()
	m.conn.Close()
}

// asked notes that a call is sent.
func (m *member) asked() {
	m.mu.Lock()
	m.pending++
	m.sent = time.Now()
	if m.silent.IsZero() {
		m.silent = m.sent
	}
	m.mu.Unlock()
	m.c.watchOver()
}

// done notes the end of a call. If the member has not answered, it counts as silent until
// an answer to another call comes.
func (m *member) done(answered bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pending--
	if !answered {
		return
	}
	m.silent = time.Time{}
	if m.pending > 0 {
		m.silent = time.Now()
	}
}

// state returns since when the member has been silent, or zero, and whether calls are under way,
// or one that was sent after t has had no answer.
func (m *member) state(t time.Time) (silent time.Time, busy bool) {
	if m == nil {
		return time.Time{}, false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.silent, m.pending > 0 || !m.silent.IsZero() && m.sent.After(t)
}

// read makes a linearizable read, which needs a leader and a majority. A member that is cut off
// from the others may still answer other requests, but not this one.
func (m *member) read(ctx context.Context, name string) (*pb.RangeResponse, error) {
	return asking(m, func(m *member) (*pb.RangeResponse, error) {
		return m.kv.Range(ctx, &pb.RangeRequest{Key: []byte(name), KeysOnly: true})
	})
}

// maxBeats is how many keep-alives of a Client are under way at once. A member that is not the
// leader passes each on to the leader, and answers those of one stream one after another. So
// each has a stream of its own meanwhile. A server may allow 100 streams for each connection.
const maxBeats = 64

// stream is for keep-alives, one at a time.
type stream struct {
	pb.Lease_LeaseKeepAliveClient
	cancel context.CancelFunc
}

// beat is a keep-alive, and its answer once done is closed.
type beat struct {
	began time.Duration // by the clock, before it was sent, so the lease's term ends later than began + ttl
	ttl   int64         // the lease's term in seconds; 0 or less if the lease has ended
	term  uint64        // of the leader, as the member knew it
	err   error
	done  chan struct{}
}

// beat begins the term of a lease anew. The caller waits for done, which is closed when ctx ends
// at the latest.
func (c *cluster) beat(ctx context.Context, lease int64) *beat {
	b := &beat{done: make(chan struct{})}
	if !c.spawn(func() {
		defer close(b.done)
		select {
		case c.beats <- struct{}{}:
			defer func() { <-c.beats }()
			_, b.err = call(ctx, c, func(m *member) (any, error) { return nil, m.beat(ctx, lease, b) })
		case <-ctx.Done():
			b.err = ctx.Err()
		}
	}) {
		b.err = errClosed
		close(b.done)
	}
	return b
}

func (m *member) beat(ctx context.Context, lease int64, b *beat) error {
	for {
		s, used, err := m.stream()
		if err != nil {
			return err
		}
		if err = m.beatOn(ctx, s, lease, b); err == nil || !used || ctx.Err() != nil {
			return err
		}
		// The member may have been restarted since the stream was used. A new one tells.
	}
}

func (m *member) beatOn(ctx context.Context, s *stream, lease int64, b *beat) (err error) {
	stop := context.AfterFunc(ctx, s.cancel)
	b.began = m.c.clock.now()
	var r *pb.LeaseKeepAliveResponse
	if err = s.Send(&pb.LeaseKeepAliveRequest{ID: lease}); err == nil || err == io.EOF { // Recv has the reason
		r, err = s.Recv()
	}
	b.ttl, b.term = r.GetTTL(), r.GetHeader().GetRaftTerm()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.idle = append(m.idle, s)
	if !stop() || err != nil {
		for _, s := range m.idle { // what one fails by may concern all, such as a token that has expired
			s.cancel()
		}
		m.idle = nil
	}
	return err
}

// stream returns a stream that no call uses, and whether one has used it.
func (m *member) stream() (s *stream, used bool, err error) {
	m.mu.Lock()
	if n := len(m.idle); n > 0 {
		defer m.mu.Unlock()
		s := m.idle[n-1]
		m.idle = m.idle[:n-1]
		return s, true, nil
	}
	m.mu.Unlock()
	ctx, cancel := context.WithCancel(m.ctx)
	of, err := m.leases.LeaseKeepAlive(ctx)
	if err != nil {
		cancel()
		return nil, false, err
	}
	return &stream{of, cancel}, false, nil
}
