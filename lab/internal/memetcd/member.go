package memetcd

import (
	"context"
	"errors"
	"net"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"

	"github.com/hasplock/hasp/internal/faultproxy"
)

// latency is the longest time from a request to its answer without a fault.
const latency = 2 * time.Millisecond

// Member is one server of a Cluster.
type Member struct {
	c      *Cluster
	id     uint64
	server *grpc.Server
	proxy  *faultproxy.Proxy // between all clients and the server

	// The mutex of the Cluster guards all fields below.
	up, frozen, isolated bool
	lives                int           // how often the member was killed
	stale                int64         // the last revision that it knows while it is isolated
	bad                  float64       // the probability that a request fails
	lag                  time.Duration // by how much its watches are late
}

func (m *Member) worksLocked() bool { return m.up && !m.frozen && !m.isolated }

// appliedLocked returns the last revision that the member knows.
func (m *Member) appliedLocked() int64 {
	if m.isolated {
		return m.stale
	}
	return m.c.state.rev
}

// set calls f to change the member, and begins an election if an election is needed.
func (m *Member) set(f func()) {
	m.c.do(func() { f(); m.c.electLocked() })
}

// Freeze stops the process until heal is called. Its connections stay, but transfer nothing. A
// request that arrives meanwhile may be carried out even if its sender has given up.
func (m *Member) Freeze() (heal func()) {
	m.set(func() { m.frozen = true })
	m.proxy.Stall()
	return func() {
		m.set(func() { m.frozen = false })
		m.proxy.Flow()
	}
}

// Isolate cuts the member off from the other members, but not from the clients.
func (m *Member) Isolate() (heal func()) {
	m.set(func() {
		if !m.isolated {
			m.isolated = true
			m.stale = m.c.state.rev
		}
	})
	return func() { m.set(func() { m.isolated = false }) }
}

// Kill ends the process and its connections. The function heal starts the process again.
func (m *Member) Kill() (heal func()) {
	m.set(func() { m.up = false; m.lives++ })
	m.proxy.Down()
	return func() {
		m.set(func() { m.up = true })
		m.proxy.Up()
	}
}

// Fail makes each later request fail with the probability bad. A request that fails is lost, its
// answer is lost, or it is carried out late.
func (m *Member) Fail(bad float64) { m.c.do(func() { m.bad = bad }) }

// Lag delays the events of watches.
func (m *Member) Lag(d time.Duration) { m.c.do(func() { m.lag = d }) }

// Dial returns a new connection to the member.
func (m *Member) Dial() (net.Conn, error) {
	return m.proxy.Dialer()(context.Background(), "", "")
}

// fate is what becomes of a request.
type fate int

const (
	fine    fate = iota
	lost         // nothing is done
	unheard      // the request is carried out, and not answered
	tardy        // the request is carried out late
)

// arrive waits until the member handles a request. It returns the request's fate, and an error if
// the request has ended meanwhile. A stubborn request is carried out even if its sender has given
// up.
func (m *Member) arrive(ctx context.Context) (f fate, stubborn bool, err error) {
	m.c.mu.Lock()
	pause := m.c.upToLocked(latency)
	lives := m.lives
	stubborn = m.c.r.IntN(2) == 0
	if m.c.r.Float64() < m.bad {
		f = lost + fate(m.c.r.IntN(3))
	}
	m.c.mu.Unlock()
	m.c.sleep(pause)

	if !m.c.await(func() bool { return !m.frozen }, nil) {
		return f, stubborn, rpctypes.ErrGRPCStopped
	}
	defer m.c.mu.Unlock()
	if m.lives != lives || ctx.Err() != nil && !stubborn {
		return f, stubborn, rpctypes.ErrGRPCTimeout
	}
	return f, stubborn, nil
}

// lose returns the error of a request whose answer is lost. The error leaves the outcome open. In
// half of the cases lose returns only after the sender has given up.
func (m *Member) lose(ctx context.Context) error {
	m.c.mu.Lock()
	n := m.c.r.IntN(4)
	pause := m.c.upToLocked(time.Second)
	m.c.mu.Unlock()
	switch n {
	case 0:
		m.c.sleep(pause)
		return rpctypes.ErrGRPCTimeoutDueToLeaderFail
	case 1:
		return rpctypes.ErrGRPCTimeout
	}

	select {
	case <-ctx.Done():
	case <-m.c.over:
	case <-time.After(patience):
	}

	return rpctypes.ErrGRPCTimeout
}

// quorum waits until the member reaches a leader with a majority. It returns with the mutex
// held, unless there is an error.
func (m *Member) quorum(ctx context.Context, stubborn bool) error {
	if stubborn {
		ctx = context.WithoutCancel(ctx)
	}
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if !m.c.await(func() bool { return m.worksLocked() && m.c.quorumLocked() }, within.Done()) {
		return rpctypes.ErrGRPCTimeout
	}
	return nil
}

// answer carries out a request that needs a majority. All members learn of a change immediately.
func answer[R any, T interface{ GetHeader() *pb.ResponseHeader }](
	ctx context.Context, m *Member, f func(*state, R) (T, error), r R,
) (res T, err error) {
	fate, stubborn, err := m.arrive(ctx)
	if err != nil {
		return res, err
	}
	switch fate {
	case lost:
		return res, m.lose(ctx)
	case tardy:
		m.c.sleep(m.c.upTo(3 * time.Second))
		stubborn = true
	}

	if err := m.quorum(ctx, stubborn); err != nil {
		return res, err
	}
	before := m.c.state.rev
	if res, err = f(m.c.state, r); err == nil {
		m.signLocked(res.GetHeader())
	}
	if m.c.state.rev != before {
		m.c.changeLocked()
	}
	m.c.mu.Unlock()
	if fate == unheard {
		var none T
		return none, m.lose(ctx)
	}

	return res, err
}

// signLocked fills in all fields of a header except the revision.
func (m *Member) signLocked(h *pb.ResponseHeader) {
	h.ClusterId = 1
	h.MemberId = m.id
	h.RaftTerm = m.c.term
}

type kv struct {
	pb.UnimplementedKVServer
	m *Member
}

func (s kv) Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	return answer(ctx, s.m, (*state).get, r)
}

func (s kv) Txn(ctx context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	return answer(ctx, s.m, (*state).txn, r)
}

type leases struct {
	pb.UnimplementedLeaseServer
	m *Member
}

func (s leases) LeaseGrant(
	ctx context.Context, r *pb.LeaseGrantRequest,
) (*pb.LeaseGrantResponse, error) {
	return answer(ctx, s.m, (*state).grant, r)
}

func (s leases) LeaseRevoke(
	ctx context.Context, r *pb.LeaseRevokeRequest,
) (*pb.LeaseRevokeResponse, error) {
	return answer(ctx, s.m, (*state).revoke, r.ID)
}

func (s leases) LeaseTimeToLive(
	ctx context.Context, r *pb.LeaseTimeToLiveRequest,
) (*pb.LeaseTimeToLiveResponse, error) {
	return answer(ctx, s.m, (*state).timeToLive, r)
}

// LeaseKeepAlive answers the requests of a stream one after another.
func (s leases) LeaseKeepAlive(stream pb.Lease_LeaseKeepAliveServer) error {
	for {
		r, err := stream.Recv()
		if err != nil {
			return nil
		}
		res, err := s.renew(stream.Context(), r.ID)
		if err != nil {
			return err
		}
		if err := stream.Send(res); err != nil {
			return err
		}
	}
}

// renew begins the term of a lease anew. If the term has ended, renew waits until the lease is
// revoked.
func (s leases) renew(ctx context.Context, id int64) (*pb.LeaseKeepAliveResponse, error) {
	began := time.Now()
	for ; time.Since(began) < patience && ctx.Err() == nil; s.m.c.sleep(50 * time.Millisecond) {
		if res, err := answer(ctx, s.m, (*state).keepAlive, id); !errors.Is(err, errExpired) {
			return res, err
		}
	}

	return nil, rpctypes.ErrGRPCTimeout
}

// Name returns the member's name, which is also the host in its address.
func (m *Member) Name() string { return "m" + string('0'+rune(m.id)) }
