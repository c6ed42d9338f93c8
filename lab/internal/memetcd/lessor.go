package memetcd

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

const (
	// tick is the interval at which etcd looks for leases whose terms have ended. So etcd revokes a
	// lease up to a tick late.
	tick = 500 * time.Millisecond

	minTTL = 2 // seconds: 1.5 election timeouts, rounded up
	maxTTL = 9_000_000_000
)

// lease is a lease that was granted and not revoked.
type lease struct {
	id, ttl int64
	end     time.Time // when its term ends
	keys    map[string]bool
	tardy   bool // a client tried to revoke it before it was granted
}

func (l *lease) expired() bool { return !time.Now().Before(l.end) }

// renew begins the term anew.
func (l *lease) renew() { l.end = time.Now().Add(time.Duration(l.ttl) * time.Second) }

func (s *state) grant(r *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error) {
	if s.full {
		return nil, rpctypes.ErrGRPCNoSpace
	}
	if r.TTL > maxTTL {
		return nil, rpctypes.ErrGRPCLeaseTTLTooLarge
	}
	id := r.ID
	if id == 0 {
		panic("memetcd does not choose the numbers of leases")
	}
	if s.leases[id] != nil {
		return nil, rpctypes.ErrGRPCLeaseExist
	}
	l := &lease{id: id, ttl: max(r.TTL, minTTL), keys: map[string]bool{}, tardy: s.unknown[id]}
	l.renew()
	s.leases[id] = l
	return &pb.LeaseGrantResponse{Header: header(s.rev), ID: id, TTL: l.ttl}, nil
}

// revoke ends a lease, and removes its entries in one revision.
func (s *state) revoke(id int64) (*pb.LeaseRevokeResponse, error) {
	l := s.leases[id]
	if l == nil {
		s.unknown[id] = true
		return nil, rpctypes.ErrGRPCLeaseNotFound
	}

	var gone []*mvccpb.KeyValue
	for _, key := range slices.Sorted(maps.Keys(l.keys)) {
		gone = append(gone, s.kvs[key])
	}
	s.drop(gone)
	delete(s.leases, id)
	return &pb.LeaseRevokeResponse{Header: header(s.rev)}, nil
}

// expire revokes the leases whose terms end at the time now or earlier, in the order of their ends.
// It reports whether it revoked a lease.
func (s *state) expire(now time.Time) (any bool) {
	byEnd := slices.SortedFunc(maps.Values(s.leases), func(a, b *lease) int {
		return cmp.Or(a.end.Compare(b.end), cmp.Compare(a.id, b.id))
	})
	for _, l := range byEnd {
		if l.end.After(now) {
			break
		}
		_, _ = s.revoke(l.id)
		any = true
	}

	return any
}

// promote begins all terms anew, as a new leader does.
func (s *state) promote() {
	for _, l := range s.leases {
		l.renew()
	}
}

var errExpired = errors.New("the term has ended, and the lease is not revoked yet")

// keepAlive begins the term of a lease anew. If there is no such lease, it answers with the TTL 0.
func (s *state) keepAlive(id int64) (*pb.LeaseKeepAliveResponse, error) {
	res := &pb.LeaseKeepAliveResponse{Header: header(s.rev), ID: id}
	if l := s.leases[id]; l != nil {
		if l.expired() {
			return nil, errExpired
		}
		l.renew()
		res.TTL = l.ttl
	}
	return res, nil
}

func (s *state) timeToLive(r *pb.LeaseTimeToLiveRequest) (*pb.LeaseTimeToLiveResponse, error) {
	checkFields(r, "ID")
	res := &pb.LeaseTimeToLiveResponse{Header: header(s.rev), ID: r.ID, TTL: -1}
	if l := s.leases[r.ID]; l != nil {
		res.TTL = int64(time.Until(l.end).Seconds())
		res.GrantedTTL = l.ttl
	}
	return res, nil
}
