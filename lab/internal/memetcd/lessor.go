package memetcd

import (
	"cmp"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

const (
	// tick is how often etcd looks for leases whose term has ended. So a term ends up to a
	// tick late.
	tick = 500 * time.Millisecond

	minTTL = 2 // seconds; the election timeout and a half
	maxTTL = 9_000_000_000
)

// lease is a lease that was granted and not revoked.
type lease struct {
	id, ttl int64
	end     time.Time // of its term
	keys    map[string]bool
	tardy   bool // somebody tried to revoke it before it was granted
}

func (l *lease) expired() bool { return !time.Now().Before(l.end) }

// renew begins the term anew.
func (l *lease) renew() { l.end = time.Now().Add(time.Duration(l.ttl) * time.Second) }

func (s *state) grant(r *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error) {
	if r.TTL > maxTTL {
		return nil, rpctypes.ErrGRPCLeaseTTLTooLarge
	}
	id := r.ID
	for id == 0 || r.ID == 0 && s.leases[id] != nil {
		id = rand.Int64()
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
	w := &write{state: s}
	for _, key := range slices.Sorted(maps.Keys(l.keys)) {
		w.remove(&pb.DeleteRangeRequest{Key: []byte(key)})
	}
	delete(s.leases, id)
	return &pb.LeaseRevokeResponse{Header: header(w.commit())}, nil
}

// expire revokes the leases whose terms ended at a time or before. It reports whether there
// were any.
func (s *state) expire(now time.Time) (any bool) {
	for _, l := range s.byEnd() {
		if l.end.After(now) {
			break
		}
		_, _ = s.revoke(l.id)
		any = true
	}
	return any
}

// byEnd returns the leases in the order in which their terms end.
func (s *state) byEnd() []*lease {
	return slices.SortedFunc(maps.Values(s.leases), func(a, b *lease) int {
		return cmp.Or(a.end.Compare(b.end), cmp.Compare(a.id, b.id))
	})
}

// promote begins all terms anew, as a new leader does.
func (s *state) promote() {
	for _, l := range s.leases {
		l.renew()
	}
}

func (s *state) timeToLive(r *pb.LeaseTimeToLiveRequest) *pb.LeaseTimeToLiveResponse {
	l := s.leases[r.ID]
	if l == nil {
		return &pb.LeaseTimeToLiveResponse{Header: header(s.rev), ID: r.ID, TTL: -1}
	}
	res := &pb.LeaseTimeToLiveResponse{Header: header(s.rev), ID: r.ID, TTL: int64(time.Until(l.end).Seconds()), GrantedTTL: l.ttl}
	if r.Keys {
		for _, key := range slices.Sorted(maps.Keys(l.keys)) {
			res.Keys = append(res.Keys, []byte(key))
		}
	}
	return res
}
