package memetcd

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// latency is the longest time from a request to its answer without a fault.
const latency = 2 * time.Millisecond

// Member is one server of a Cluster.
type Member struct {
	c       *Cluster
	id      uint64
	server  *grpc.Server
	accepts chan *conn

	// The mutex of the Cluster guards all below.
	up, frozen, isolated bool
	lives                int           // how often it was killed
	stale                int64         // the last revision that it knows, while it is isolated
	bad                  float64       // how often a request fails
	lag                  time.Duration // of its watches
	conns                map[*conn]bool
}

func (m *Member) worksLocked() bool { return m.up && !m.frozen && !m.isolated }

// appliedLocked returns the last revision that the member knows.
func (m *Member) appliedLocked() int64 {
	if m.isolated {
		return m.stale
	}
	return m.c.state.rev
}

// set changes the member, and begins an election if it takes one.
func (m *Member) set(f func()) {
	m.c.do(func() {
		f()
		m.c.electLocked()
	})
}

// Freeze stops the process. Its connections stay.
func (m *Member) Freeze() { m.set(func() { m.frozen = true }) }

// Thaw ends a Freeze. Requests that came meanwhile may be carried out, although their
// senders have given up.
func (m *Member) Thaw() { m.set(func() { m.frozen = false }) }

// Isolate cuts the member off from the other members, but not from the clients.
func (m *Member) Isolate() {
	m.set(func() {
		if !m.isolated {
			m.isolated, m.stale = true, m.c.state.rev
		}
	})
}

// Join ends an Isolate.
func (m *Member) Join() { m.set(func() { m.isolated = false }) }

// Kill ends the process and its connections.
func (m *Member) Kill() {
	var conns []*conn
	m.set(func() {
		m.up = false
		m.lives++
		for c := range m.conns {
			conns = append(conns, c)
		}
	})
	for _, c := range conns {
		c.Close()
	}
}

// Start ends a Kill.
func (m *Member) Start() { m.set(func() { m.up = true }) }

// Fail makes each request fail with a probability: it is lost, its answer is lost, or it is
// carried out late.
func (m *Member) Fail(bad float64) { m.c.do(func() { m.bad = bad }) }

// Lag delays the events of watches.
func (m *Member) Lag(d time.Duration) { m.c.do(func() { m.lag = d }) }

// Dial returns a new connection.
func (m *Member) Dial() (net.Conn, error) {
	near, far := net.Pipe()
	c := &conn{Conn: far, m: m, over: make(chan struct{})}
	m.c.mu.Lock()
	up := m.up
	if up {
		m.conns[c] = true
	}
	m.c.mu.Unlock()
	if !up {
		return nil, errors.New("connection refused")
	}
	select {
	case m.accepts <- c:
		return near, nil
	case <-m.c.over:
		return nil, net.ErrClosed
	}
}

// listener is the server's end of Dial.
type listener struct{ m *Member }

func (l listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.m.accepts:
		return c, nil
	case <-l.m.c.over:
		return nil, net.ErrClosed
	}
}

func (l listener) Close() error   { return nil }
func (l listener) Addr() net.Addr { return &net.TCPAddr{} }

// conn is a connection that stands still while its member is frozen.
type conn struct {
	net.Conn
	m    *Member
	once sync.Once
	over chan struct{}
}

func (c *conn) thawed() {
	if c.m.c.await(func() bool { return !c.m.frozen }, c.over) {
		c.m.c.mu.Unlock()
	}
}

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.thawed()
	return n, err
}

func (c *conn) Write(b []byte) (int, error) {
	c.thawed()
	return c.Conn.Write(b)
}

func (c *conn) Close() error {
	c.once.Do(func() {
		close(c.over)
		c.m.c.mu.Lock()
		delete(c.m.conns, c)
		c.m.c.mu.Unlock()
	})
	return c.Conn.Close()
}

// fate is what becomes of a request.
type fate int

const (
	fine    fate = iota
	lost         // nothing is done
	unheard      // it is carried out, and not answered
	tardy        // it is carried out late
)

// arrive delays a request until the member takes it up. It returns its fate, and an error
// if nothing is left to do. A request may outlive its sender: stubborn requests do.
func (m *Member) arrive(ctx context.Context) (f fate, stubborn bool, err error) {
	m.c.mu.Lock()
	pause, lives := m.c.upToLocked(latency), m.lives
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

// lose ends a request that is not answered: it hangs, or there is an error that leaves the
// outcome open.
func (m *Member) lose(ctx context.Context) error {
	m.c.mu.Lock()
	n, pause := m.c.r.IntN(4), m.c.upToLocked(time.Second)
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

// needsLeader reports whether the client wants an error at once if there is no leader.
func needsLeader(ctx context.Context) bool {
	md, _ := metadata.FromIncomingContext(ctx)
	v := md.Get(rpctypes.MetadataRequireLeaderKey)
	return len(v) > 0 && v[0] == rpctypes.MetadataHasLeader
}

// leaderlessLocked reports whether the member knows no leader.
func (m *Member) leaderlessLocked() bool { return m.isolated || m.c.leader == nil }

// quorum waits until the member reaches a leader with a majority. It returns with the mutex
// held, unless there is an error.
func (m *Member) quorum(ctx context.Context, stubborn bool) error {
	if stubborn {
		ctx = context.WithoutCancel(ctx)
	}
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	none := false
	ok := m.c.await(func() bool {
		none = needsLeader(ctx) && m.leaderlessLocked()
		return none || m.worksLocked() && m.c.quorumLocked()
	}, within.Done())
	if none {
		m.c.mu.Unlock()
		return rpctypes.ErrGRPCNoLeader
	}
	if ok {
		return nil
	}
	return rpctypes.ErrGRPCTimeout
}

// answer carries out a request that takes a majority. A change is known to all members at
// once.
func answer[T interface{ GetHeader() *pb.ResponseHeader }](ctx context.Context, m *Member, f func(*state) (T, error)) (res T, err error) {
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
	if res, err = f(m.c.state); err == nil {
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

// signLocked fills in a header that has a revision.
func (m *Member) signLocked(h *pb.ResponseHeader) {
	h.ClusterId, h.MemberId, h.RaftTerm = 1, m.id, m.c.term
}

// kv is the service KV.
type kv struct {
	pb.UnimplementedKVServer
	m *Member
}

func (s kv) Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	if err := checkRange(r); err != nil {
		return nil, err
	}
	if r.Serializable {
		return s.local(ctx, r)
	}
	return answer(ctx, s.m, func(st *state) (*pb.RangeResponse, error) { return (&write{state: st}).get(r) })
}

// local answers from what the member knows, which may be old.
func (s kv) local(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	if _, _, err := s.m.arrive(ctx); err != nil {
		return nil, err
	}
	s.m.c.mu.Lock()
	defer s.m.c.mu.Unlock()
	old := *s.m.c.state
	if at := s.m.appliedLocked(); at < old.rev {
		old.kvs, old.rev = old.at(at), at
	}
	res, err := (&write{state: &old}).get(r)
	if err == nil {
		s.m.signLocked(res.Header)
	}
	return res, err
}

func (s kv) Put(ctx context.Context, r *pb.PutRequest) (*pb.PutResponse, error) {
	if err := checkPut(r); err != nil {
		return nil, err
	}
	return answer(ctx, s.m, func(st *state) (*pb.PutResponse, error) {
		if st.full {
			return nil, rpctypes.ErrGRPCNoSpace
		}
		w := &write{state: st}
		res, err := w.put(r)
		w.commit()
		return res, err
	})
}

func (s kv) DeleteRange(ctx context.Context, r *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	if err := checkDelete(r); err != nil {
		return nil, err
	}
	return answer(ctx, s.m, func(st *state) (*pb.DeleteRangeResponse, error) {
		w := &write{state: st}
		res := w.remove(r)
		w.commit()
		return res, nil
	})
}

func (s kv) Txn(ctx context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	if err := checkTxn(r); err != nil {
		return nil, err
	}
	return answer(ctx, s.m, func(st *state) (*pb.TxnResponse, error) {
		if st.full && hasPut(r) {
			return nil, rpctypes.ErrGRPCNoSpace
		}
		w := &write{state: st}
		res, err := w.txn(r)
		if err == nil {
			res.Header.Revision = w.commit()
		}
		return res, err
	})
}

func (s kv) Compact(ctx context.Context, r *pb.CompactionRequest) (*pb.CompactionResponse, error) {
	return answer(ctx, s.m, func(st *state) (*pb.CompactionResponse, error) {
		return &pb.CompactionResponse{Header: header(st.rev)}, st.compact(r.Revision)
	})
}

// leases is the service Lease.
type leases struct {
	pb.UnimplementedLeaseServer
	m *Member
}

func (s leases) LeaseGrant(ctx context.Context, r *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error) {
	return answer(ctx, s.m, func(st *state) (*pb.LeaseGrantResponse, error) {
		if st.full {
			return nil, rpctypes.ErrGRPCNoSpace
		}
		return st.grant(r)
	})
}

func (s leases) LeaseRevoke(ctx context.Context, r *pb.LeaseRevokeRequest) (*pb.LeaseRevokeResponse, error) {
	return answer(ctx, s.m, func(st *state) (*pb.LeaseRevokeResponse, error) { return st.revoke(r.ID) })
}

func (s leases) LeaseTimeToLive(ctx context.Context, r *pb.LeaseTimeToLiveRequest) (*pb.LeaseTimeToLiveResponse, error) {
	return answer(ctx, s.m, func(st *state) (*pb.LeaseTimeToLiveResponse, error) { return st.timeToLive(r), nil })
}

func (s leases) LeaseLeases(ctx context.Context, _ *pb.LeaseLeasesRequest) (*pb.LeaseLeasesResponse, error) {
	return answer(ctx, s.m, func(st *state) (*pb.LeaseLeasesResponse, error) {
		res := &pb.LeaseLeasesResponse{Header: header(st.rev)}
		for _, l := range st.byEnd() {
			res.Leases = append(res.Leases, &pb.LeaseStatus{ID: l.id})
		}
		return res, nil
	})
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

// renew begins the term of a lease anew. A lease whose term has ended is lost, but only when
// it is revoked.
func (s leases) renew(ctx context.Context, id int64) (*pb.LeaseKeepAliveResponse, error) {
	renewed := func(st *state) (*pb.LeaseKeepAliveResponse, error) {
		res := &pb.LeaseKeepAliveResponse{Header: header(st.rev), ID: id}
		switch l := st.leases[id]; {
		case l == nil:
		case l.expired():
			return nil, errExpired
		default:
			l.renew()
			res.TTL = l.ttl
		}
		return res, nil
	}
	for began := time.Now(); time.Since(began) < patience && ctx.Err() == nil; s.m.c.sleep(50 * time.Millisecond) {
		if res, err := answer(ctx, s.m, renewed); !errors.Is(err, errExpired) {
			return res, err
		}
	}
	return nil, rpctypes.ErrGRPCTimeout
}

var errExpired = errors.New("the term has ended, and the lease is not revoked yet")

// maintenance is the service Maintenance.
type maintenance struct {
	pb.UnimplementedMaintenanceServer
	m *Member
}

func (s maintenance) Status(ctx context.Context, _ *pb.StatusRequest) (*pb.StatusResponse, error) {
	if _, _, err := s.m.arrive(ctx); err != nil {
		return nil, err
	}
	s.m.c.mu.Lock()
	defer s.m.c.mu.Unlock()
	res := &pb.StatusResponse{Header: header(s.m.appliedLocked()), Version: "3.5.21", RaftTerm: s.m.c.term, DbSize: 20480, DbSizeInUse: 20480}
	if !s.m.leaderlessLocked() {
		res.Leader = s.m.c.leader.id
	} else {
		res.Errors = append(res.Errors, rpctypes.ErrGRPCNoLeader.Error())
	}
	if s.m.c.state.full {
		res.Errors = append(res.Errors, "memberID:1 alarm:NOSPACE ")
	}
	s.m.signLocked(res.Header)
	return res, nil
}

// members is the service Cluster.
type members struct {
	pb.UnimplementedClusterServer
	m *Member
}

func (s members) MemberList(ctx context.Context, _ *pb.MemberListRequest) (*pb.MemberListResponse, error) {
	return answer(ctx, s.m, func(st *state) (*pb.MemberListResponse, error) {
		res := &pb.MemberListResponse{Header: header(st.rev)}
		for _, m := range s.m.c.Members {
			res.Members = append(res.Members, &pb.Member{ID: m.id, Name: m.Name(), ClientURLs: []string{"http://" + m.Name() + ":2379"}})
		}
		return res, nil
	})
}

// Name returns the name of the member, which is also the host of its address.
func (m *Member) Name() string { return "m" + string('0'+rune(m.id)) }
