package etcdlock

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// This file has the parts of requests to etcd.

func prefixEnd(prefix string) []byte { return []byte(clientv3.GetPrefixRangeEnd(prefix)) }

// put stores an entry under a lease.
func put(name string, value []byte, lease int64) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(name), Value: value, Lease: lease}}}
}

func remove(name string) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: []byte(name)}}}
}

func read(r *pb.RangeRequest) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: r}}
}

// first reads the first entry of a queue.
func first(queue string) *pb.RequestOp {
	return read(&pb.RangeRequest{Key: []byte(queue), RangeEnd: prefixEnd(queue), Limit: 1,
		SortTarget: pb.RangeRequest_CREATE, SortOrder: pb.RangeRequest_ASCEND})
}

// since reads the entries of a queue that were created after a revision.
func since(queue string, revision int64) *pb.RequestOp {
	return read(&pb.RangeRequest{Key: []byte(queue), RangeEnd: prefixEnd(queue), MinCreateRevision: revision + 1})
}

// name reads an entry. It does not ask for keys only: etcd 3.7 then leaves out the lease.
func name(entry string) *pb.RequestOp { return read(&pb.RangeRequest{Key: []byte(entry)}) }

// createdAt compares the create revision of an entry, which is 0 if there is no entry. With
// an end it compares each entry of a range. A range without entries passes.
func createdAt(name string, end []byte, revision int64) *pb.Compare {
	return &pb.Compare{Result: pb.Compare_EQUAL, Target: pb.Compare_CREATE, Key: []byte(name), RangeEnd: end,
		TargetUnion: &pb.Compare_CreateRevision{CreateRevision: revision}}
}

// changedAt compares the revision of the last change of an entry.
func changedAt(name string, revision int64) *pb.Compare {
	return &pb.Compare{Result: pb.Compare_EQUAL, Target: pb.Compare_MOD, Key: []byte(name),
		TargetUnion: &pb.Compare_ModRevision{ModRevision: revision}}
}

func txn(ifs []*pb.Compare, then []*pb.RequestOp, otherwise ...*pb.RequestOp) *pb.TxnRequest {
	return &pb.TxnRequest{Compare: ifs, Success: then, Failure: otherwise}
}
