package memetcd

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// state is what the members agree on: the entries with their last revisions, and the leases.
// The mutex of the Cluster guards it.
type state struct {
	rev     int64
	kvs     map[string]*mvccpb.KeyValue // no KeyValue is ever changed
	gone    []*mvccpb.Event             // all deletions in order
	leases  map[int64]*lease
	unknown map[int64]bool // leases that a client tried to revoke before they existed
	full    bool           // the alarm NOSPACE is on
}

func newState() *state {
	return &state{rev: 1, kvs: map[string]*mvccpb.KeyValue{}, leases: map[int64]*lease{},
		unknown: map[int64]bool{}}
}

// checkFields panics if r has a field besides those that memetcd imitates.
func checkFields(r proto.Message, known ...protoreflect.Name) {
	r.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
		if !slices.Contains(known, f.Name()) {
			panic(fmt.Sprintf("memetcd does not imitate %v", r))
		}
		return true
	})
}

// span is a range of keys as a request names it.
type span struct{ key, end []byte }

// contains reports whether a key is in the span. A span without an end contains only its own key.
func (s span) contains(key []byte) bool {
	if len(s.end) == 0 {
		return bytes.Equal(key, s.key)
	}
	return bytes.Compare(key, s.key) >= 0 && bytes.Compare(key, s.end) < 0
}

// entries returns the entries of a span in the order of their keys.
func (s span) entries(all map[string]*mvccpb.KeyValue) (found []*mvccpb.KeyValue) {
	for _, kv := range all {
		if s.contains(kv.Key) {
			found = append(found, kv)
		}
	}
	slices.SortFunc(found, func(a, b *mvccpb.KeyValue) int { return bytes.Compare(a.Key, b.Key) })
	return found
}

func (s *state) get(r *pb.RangeRequest) (*pb.RangeResponse, error) {
	checkFields(r, "key", "range_end", "limit", "max_create_revision", "sort_target", "sort_order")
	sorted := r.SortTarget == pb.RangeRequest_CREATE
	if !sorted && r.SortTarget != pb.RangeRequest_KEY {
		panic(fmt.Sprintf("memetcd does not imitate %v", r))
	}

	kvs := span{r.Key, r.RangeEnd}.entries(s.kvs)
	res := &pb.RangeResponse{Header: header(s.rev), Count: int64(len(kvs))}
	kvs = slices.DeleteFunc(kvs, func(kv *mvccpb.KeyValue) bool {
		return r.MaxCreateRevision != 0 && kv.CreateRevision > r.MaxCreateRevision
	})
	if sorted {
		byAge(kvs)
	}
	if r.SortOrder == pb.RangeRequest_DESCEND {
		slices.Reverse(kvs)
	}
	if r.Limit > 0 && int64(len(kvs)) > r.Limit {
		kvs = kvs[:r.Limit]
		res.More = true
	}

	res.Kvs = kvs
	return res, nil
}

// byAge sorts entries from the oldest to the newest. Its caller has sorted the entries by key.
func byAge(kvs []*mvccpb.KeyValue) {
	slices.SortStableFunc(kvs,
		func(a, b *mvccpb.KeyValue) int { return cmp.Compare(a.CreateRevision, b.CreateRevision) })
}

// put stores an entry under a lease that exists.
func (s *state) put(r *pb.PutRequest) *pb.PutResponse {
	checkFields(r, "key", "value", "lease")
	s.rev++
	kv := &mvccpb.KeyValue{Key: r.Key, Value: r.Value, Lease: r.Lease, CreateRevision: s.rev,
		ModRevision: s.rev, Version: 1}
	if old := s.kvs[string(r.Key)]; old != nil {
		kv.CreateRevision = old.CreateRevision
		kv.Version = old.Version + 1
		s.detach(old)
	}

	if l := s.leases[r.Lease]; l != nil {
		l.keys[string(kv.Key)] = true
	}
	s.kvs[string(kv.Key)] = kv
	return &pb.PutResponse{Header: header(s.rev)}
}

// detach removes an entry from its lease.
func (s *state) detach(kv *mvccpb.KeyValue) {
	if l := s.leases[kv.Lease]; l != nil {
		delete(l.keys, string(kv.Key))
	}
}

// drop removes entries in one revision.
func (s *state) drop(gone []*mvccpb.KeyValue) {
	if len(gone) > 0 {
		s.rev++
	}
	for _, kv := range gone {
		s.detach(kv)
		delete(s.kvs, string(kv.Key))
		s.gone = append(s.gone, &mvccpb.Event{Type: mvccpb.Event_DELETE,
			Kv: &mvccpb.KeyValue{Key: kv.Key, ModRevision: s.rev}})
	}
}

func (s *state) remove(r *pb.DeleteRangeRequest) *pb.DeleteRangeResponse {
	checkFields(r, "key")
	gone := span{key: r.Key}.entries(s.kvs)
	s.drop(gone)
	return &pb.DeleteRangeResponse{Header: header(s.rev), Deleted: int64(len(gone))}
}

// passes reports whether a comparison of a transaction is true. A range without entries is
// compared as one entry whose revisions are 0.
func (s *state) passes(c *pb.Compare) bool {
	checkFields(c, "key", "range_end", "target", "mod_revision", "create_revision")
	if c.Target != pb.Compare_CREATE && c.Target != pb.Compare_MOD {
		panic(fmt.Sprintf("memetcd does not imitate %v", c))
	}
	kvs := span{c.Key, c.RangeEnd}.entries(s.kvs)
	if len(kvs) == 0 {
		kvs = []*mvccpb.KeyValue{{}}
	}
	return !slices.ContainsFunc(kvs, func(kv *mvccpb.KeyValue) bool {
		if c.Target == pb.Compare_MOD {
			return kv.ModRevision != c.GetModRevision()
		}
		return kv.CreateRevision != c.GetCreateRevision()
	})
}

// maxOps is etcd's default of --max-txn-ops.
const maxOps = 128

// txn carries out a transaction, or several that are the parts of one. As in etcd, the parts change
// their entries in one revision, and nothing is changed if one of the leases does not exist.
func (s *state) txn(r *pb.TxnRequest) (*pb.TxnResponse, error) {
	parts := partsOf(r)
	single := parts == nil
	if single {
		parts = []*pb.TxnRequest{r}
	}
	var branches []branch
	for _, part := range parts {
		if max(len(part.Compare), len(part.Success), len(part.Failure))+len(parts)-1 > maxOps {
			return nil, rpctypes.ErrGRPCTooManyOps
		}
		if s.full && slices.ContainsFunc(slices.Concat(part.Success, part.Failure), isPut) {
			return nil, rpctypes.ErrGRPCNoSpace
		}
		branches = append(branches, s.choose(part))
	}

	for _, b := range branches {
		if slices.ContainsFunc(b.ops, s.lacksLease) {
			return nil, rpctypes.ErrGRPCLeaseNotFound
		}
	}

	began := s.rev
	var answers []*pb.TxnResponse
	for _, b := range branches {
		answers = append(answers, s.carryOut(b, began))
	}
	if single {
		answers[0].Header = header(s.rev)
		return answers[0], nil
	}

	res := &pb.TxnResponse{Header: header(s.rev), Succeeded: true}
	for _, a := range answers {
		a.Header = &pb.ResponseHeader{}
		res.Responses = append(res.Responses,
			&pb.ResponseOp{Response: &pb.ResponseOp_ResponseTxn{ResponseTxn: a}})
	}

	return res, nil
}

// partsOf returns the transactions that r consists of, or nil if it is a single one.
func partsOf(r *pb.TxnRequest) (parts []*pb.TxnRequest) {
	for _, op := range r.Success {
		if part := op.GetRequestTxn(); part != nil {
			parts = append(parts, part)
		}
	}

	if parts != nil {
		checkFields(r, "success")
	}
	return parts
}

func isPut(op *pb.RequestOp) bool { return op.GetRequestPut() != nil }

// lacksLease reports whether op puts an entry under a lease that does not exist.
func (s *state) lacksLease(op *pb.RequestOp) bool {
	id := op.GetRequestPut().GetLease()
	return id != 0 && s.leases[id] == nil
}

// branch is the branch of a transaction that its conditions have chosen.
type branch struct {
	succeeded bool
	ops       []*pb.RequestOp
}

func (s *state) choose(r *pb.TxnRequest) branch {
	for _, c := range r.Compare {
		if !s.passes(c) {
			return branch{ops: r.Failure}
		}
	}
	return branch{succeeded: true, ops: r.Success}
}

// carryOut carries out a branch of a transaction that began at a revision. Only the first operation
// of a branch may change an entry.
func (s *state) carryOut(b branch, began int64) *pb.TxnResponse {
	res := &pb.TxnResponse{Succeeded: b.succeeded}
	for i, op := range b.ops {
		o := &pb.ResponseOp{}
		res.Responses = append(res.Responses, o)
		if get := op.GetRequestRange(); get != nil {
			found, _ := s.get(get)
			o.Response = &pb.ResponseOp_ResponseRange{ResponseRange: found}
			continue
		}

		now := s.rev
		s.rev = began
		put := op.GetRequestPut()
		remove := op.GetRequestDeleteRange()
		switch {
		case i > 0:
			panic(fmt.Sprintf("memetcd does not imitate %v", op))
		case remove != nil:
			done := s.remove(remove)
			done.Header = header(max(s.rev, now))
			o.Response = &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: done}
		case put != nil:
			o.Response = &pb.ResponseOp_ResponsePut{ResponsePut: s.put(put)}
		default:
			panic(fmt.Sprintf("memetcd does not imitate %v", op))
		}
		s.rev = max(s.rev, now)
	}

	return res
}

func header(rev int64) *pb.ResponseHeader { return &pb.ResponseHeader{Revision: rev} }
