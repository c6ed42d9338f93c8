package etcdlock

import (
	"context"
	"errors"
	"io"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

// beat is a keep-alive with its answer.
type beat struct {
	// A time before the keep-alive was sent, by the driver's clock. The lease does not end before
	// began + ttl.
	began time.Duration

	ttl  int64   // the lease's term in seconds; 0 or less if the lease has ended
	term uint64  // the raft term that the member knew; each leader has another raft term
	m    *member // the member that answered
	err  error
}

// outcome returns nil if the keep-alive has certainly begun the term of l anew, and then records
// that time in l. Otherwise it returns the keep-alive's error, or errDoubtful. The argument r is
// the answer to a later read or put of the lease's entry, which has shown the entry.
//
// A keep-alive alone proves nothing. A deposed leader may answer it, and so may a leader that is
// revoking the lease. The later read or put proves that the lease was alive after the keep-alive.
// If both answers came over the same connection, and are from the same raft term, the leader has
// begun the lease's term anew.
func (b beat) outcome(l *lease, r txnAnswer) error {
	switch {
	case b.err != nil:
		return b.err
	case b.ttl <= 0, b.m != r.m, b.term != r.Header.RaftTerm:
		return errDoubtful
	}

	raise(&l.began, int64(b.began))
	return nil
}

// sendBeat sends a keep-alive to m, on a stream of its own. etcd answers the keep-alives of a
// stream one after another, and waits with the answer while it ends that lease. So on a common
// stream, a lease that ends would hold up the others. A stream costs etcd about as much as a call.
func sendBeat(ctx context.Context, m *member, lease int64) (beat, error) {
	ctx, end := context.WithCancel(ctx)
	defer end() // ends the stream

	began := m.cluster.clock.now()
	// The option makes the call fail at once if there is no connection. The method intercept does
	// not do that for streams.
	stream, err := m.leases.LeaseKeepAlive(ctx, grpc.WaitForReady(false))
	if err == nil {
		err = stream.Send(&pb.LeaseKeepAliveRequest{ID: lease})
	}

	var r *pb.LeaseKeepAliveResponse
	if err == nil || errors.Is(err, io.EOF) { // after EOF, Recv returns the reason
		r, err = stream.Recv()
	}
	if err != nil {
		return beat{}, &noChange{err} // a keep-alive may be sent again
	}
	return beat{began: began, ttl: r.TTL, term: r.GetHeader().GetRaftTerm(), m: m}, nil
}
