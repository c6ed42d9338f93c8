package etcdlock

import (
	"context"
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
	beats    [maxStreams]beats

	ctx context.Context // ends when the member is given up; streams live in it
	end context.CancelFunc

	left bool // the member was given up, and must not be used again; c.mu guards it

	mu      sync.Mutex // guards all below
	pending int        // calls that have no answer yet
	silent  time.Time  // since when calls have had no answer; zero if none waits and none has failed since the last answer
	heard   time.Time  // when the last answer came
	sent    time.Time  // when the last call was sent
}

func (c *cluster) connect(endpoint string) (*member, error) {
	conn, err := c.dial(endpoint)
	if err != nil {
		return nil, err
	}
	calls := unlimited{conn}
	m := &member{c: c, endpoint: endpoint, conn: conn, kv: pb.NewKVClient(calls), leases: pb.NewLeaseClient(calls), watching: pb.NewWatchClient(calls)}
	for i := range m.beats {
		m.beats[i].m, m.beats[i].wake = m, make(chan struct{}, 1)
	}
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

// drain ends the streams of the member, and closes its connection when its calls have ended.
func (m *member) drain() {
	m.end()
	m.c.wg.Go(func() {
		t := time.NewTicker(lookEvery)
		defer t.Stop()
		for began := time.Now(); time.Since(began) < drainTime; {
			select {
			case <-t.C:
			case <-m.c.ctx.Done():
			}
			if _, _, busy := m.state(); !busy || m.c.ctx.Err() != nil {
				break
			}
		}
		m.conn.Close()
	})
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
	m.heard = time.Now()
	m.silent = time.Time{}
	if m.pending > 0 {
		m.silent = m.heard
	}
}

// state returns since when the member has been silent (zero if it is not silent), the time of its
// last answer, and whether calls are under way.
func (m *member) state() (silent, heard time.Time, busy bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.silent, m.heard, m.pending > 0
}

// unanswered reports whether a call was sent after t, and no answer has come since. It returns
// false if m is nil.
func (m *member) unanswered(t time.Time) bool {
	if m == nil {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.silent.IsZero() && m.sent.After(t)
}

// isStuck reports whether a stream that owes an answer since then is stuck: the member has answered
// others meanwhile, or it is very late.
func (m *member) isStuck(since time.Time) bool {
	_, heard, _ := m.state()
	late := time.Since(since)
	return late >= drainTime || late >= stuckTime && heard.Sub(since) >= stuckTime/2
}

// probe makes a linearizable read, which needs a leader and a majority. A member that is cut off
// from the others may still answer other requests, but not this one.
func (m *member) probe(ctx context.Context) error {
	m.asked()
	_, err := m.kv.Range(ctx, &pb.RangeRequest{Key: []byte(root), KeysOnly: true})
	answered := isAnswer(err)
	m.done(answered)
	if answered {
		return nil
	}
	return err
}
