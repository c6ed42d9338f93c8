package memetcd

import (
	"bytes"
	"cmp"
	"maps"
	"slices"
	"sort"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// state is what the members agree on: the keys with all their revisions, and the leases.
// The mutex of the Cluster guards it.
type state struct {
	rev, compacted int64
	kvs            map[string]*mvccpb.KeyValue // as of rev; no KeyValue is ever changed
	log            []*mvccpb.Event             // all changes in order, each with PrevKv
	leases         map[int64]*lease
	unknown        map[int64]bool // leases that were to be revoked when they were not there
	full           bool           // the alarm NOSPACE is on
}

func newState() *state {
	return &state{rev: 1, kvs: map[string]*mvccpb.KeyValue{}, leases: map[int64]*lease{}, unknown: map[int64]bool{}}
}

// span is a range of keys as a request names it.
type span struct{ key, end []byte }

// has reports whether a key is in the span. No end means only the key itself, and an end
// of one zero byte means all keys from the first on.
func (s span) has(key []byte) bool {
	switch {
	case len(s.end) == 0:
		return bytes.Equal(key, s.key)
	case len(s.end) == 1 && s.end[0] == 0:
		return bytes.Compare(key, s.key) >= 0
	}
	return bytes.Compare(key, s.key) >= 0 && bytes.Compare(key, s.end) < 0
}

// in returns the entries of a span, sorted by key.
func (sp span) in(all map[string]*mvccpb.KeyValue) (found []*mvccpb.KeyValue) {
	if len(sp.end) == 0 {
		if kv := all[string(sp.key)]; kv != nil {
			found = append(found, kv)
		}
		return found
	}
	for _, kv := range all {
		if sp.has(kv.Key) {
			found = append(found, kv)
		}
	}
	slices.SortFunc(found, func(a, b *mvccpb.KeyValue) int { return bytes.Compare(a.Key, b.Key) })
	return found
}

// at returns the entries as they were at a revision.
func (s *state) at(rev int64) map[string]*mvccpb.KeyValue {
	all := map[string]*mvccpb.KeyValue{}
	for _, e := range s.log {
		if e.Kv.ModRevision > rev {
			break
		}
		if e.Type == mvccpb.Event_DELETE {
			delete(all, string(e.Kv.Key))
		} else {
			all[string(e.Kv.Key)] = e.Kv
		}
	}
	return all
}

// since returns the changes from a revision on.
func (s *state) since(rev int64) []*mvccpb.Event {
	i := sort.Search(len(s.log), func(i int) bool { return s.log[i].Kv.ModRevision >= rev })
	return s.log[i:]
}

// write is a transaction that has begun. Its changes are in the state at once, and in the
// log when it is committed.
type write struct {
	*state
	changes []*mvccpb.Event
}

// seen returns the revision that the transaction sees.
func (w *write) seen() int64 {
	if len(w.changes) > 0 {
		return w.rev + 1
	}
	return w.rev
}

// commit ends the transaction, and returns the revision after it.
func (w *write) commit() int64 {
	w.rev = w.seen()
	w.log = append(w.log, w.changes...)
	w.changes = nil
	return w.rev
}

// checkRange returns the error of a Range that can never be answered.
func checkRange(r *pb.RangeRequest) error {
	if len(r.Key) == 0 {
		return rpctypes.ErrGRPCEmptyKey
	}
	return nil
}

// checkRevision returns the error of a Range at a revision that is not there.
func (w *write) checkRevision(r *pb.RangeRequest) error {
	switch {
	case r.Revision > w.seen():
		return rpctypes.ErrGRPCFutureRev
	case r.Revision > 0 && r.Revision < w.compacted:
		return rpctypes.ErrGRPCCompacted
	}
	return nil
}

func (w *write) get(r *pb.RangeRequest) (*pb.RangeResponse, error) {
	if err := w.checkRevision(r); err != nil {
		return nil, err
	}
	all := w.kvs
	if r.Revision > 0 && r.Revision < w.seen() {
		all = w.at(r.Revision)
	}
	kvs := span{r.Key, r.RangeEnd}.in(all)
	res := &pb.RangeResponse{Header: header(w.seen()), Count: int64(len(kvs))}
	if r.CountOnly {
		return res, nil
	}

	if r.Limit > 0 && r.SortOrder == pb.RangeRequest_NONE && r.MinModRevision+r.MaxModRevision+r.MinCreateRevision+r.MaxCreateRevision == 0 {
		kvs = kvs[:min(r.Limit+1, int64(len(kvs)))] // etcd sorts only these
	}
	kvs = slices.DeleteFunc(kvs, func(kv *mvccpb.KeyValue) bool {
		return r.MaxModRevision != 0 && kv.ModRevision > r.MaxModRevision || r.MinModRevision != 0 && kv.ModRevision < r.MinModRevision ||
			r.MaxCreateRevision != 0 && kv.CreateRevision > r.MaxCreateRevision || r.MinCreateRevision != 0 && kv.CreateRevision < r.MinCreateRevision
	})
	order(kvs, r.SortTarget, r.SortOrder)
	if r.Limit > 0 && int64(len(kvs)) > r.Limit {
		kvs, res.More = kvs[:r.Limit], true
	}
	for _, kv := range kvs {
		res.Kvs = append(res.Kvs, withoutValue(kv, r.KeysOnly))
	}
	return res, nil
}

func withoutValue(kv *mvccpb.KeyValue, keysOnly bool) *mvccpb.KeyValue {
	if !keysOnly {
		return kv
	}
	return &mvccpb.KeyValue{Key: kv.Key, CreateRevision: kv.CreateRevision, ModRevision: kv.ModRevision, Version: kv.Version, Lease: kv.Lease}
}

// order sorts entries that are sorted by key.
func order(kvs []*mvccpb.KeyValue, target pb.RangeRequest_SortTarget, order pb.RangeRequest_SortOrder) {
	by := map[pb.RangeRequest_SortTarget]func(a, b *mvccpb.KeyValue) int{
		pb.RangeRequest_KEY:     func(a, b *mvccpb.KeyValue) int { return bytes.Compare(a.Key, b.Key) },
		pb.RangeRequest_VERSION: func(a, b *mvccpb.KeyValue) int { return cmp.Compare(a.Version, b.Version) },
		pb.RangeRequest_CREATE:  func(a, b *mvccpb.KeyValue) int { return cmp.Compare(a.CreateRevision, b.CreateRevision) },
		pb.RangeRequest_MOD:     func(a, b *mvccpb.KeyValue) int { return cmp.Compare(a.ModRevision, b.ModRevision) },
		pb.RangeRequest_VALUE:   func(a, b *mvccpb.KeyValue) int { return bytes.Compare(a.Value, b.Value) },
	}[target]
	slices.SortStableFunc(kvs, func(a, b *mvccpb.KeyValue) int {
		if order == pb.RangeRequest_DESCEND {
			return by(b, a)
		}
		return by(a, b)
	})
}

func checkPut(r *pb.PutRequest) error {
	switch {
	case len(r.Key) == 0:
		return rpctypes.ErrGRPCEmptyKey
	case r.IgnoreValue && len(r.Value) > 0:
		return rpctypes.ErrGRPCValueProvided
	case r.IgnoreLease && r.Lease != 0:
		return rpctypes.ErrGRPCLeaseProvided
	}
	return nil
}

// checkKept returns the error of a Put in a transaction whose lease or entry is not there.
func (w *write) checkKept(r *pb.PutRequest) error {
	switch {
	case (r.IgnoreValue || r.IgnoreLease) && w.kvs[string(r.Key)] == nil:
		return rpctypes.ErrGRPCKeyNotFound
	case r.Lease != 0 && w.leases[r.Lease] == nil:
		return rpctypes.ErrGRPCLeaseNotFound
	}
	return nil
}

func (w *write) put(r *pb.PutRequest) (*pb.PutResponse, error) {
	// Outside of a transaction, etcd looks at the lease first.
	if r.Lease != 0 && w.leases[r.Lease] == nil {
		return nil, rpctypes.ErrGRPCLeaseNotFound
	}
	if err := w.checkKept(r); err != nil {
		return nil, err
	}
	next := w.rev + 1
	old := w.kvs[string(r.Key)]
	kv := &mvccpb.KeyValue{Key: r.Key, Value: r.Value, Lease: r.Lease, CreateRevision: next, ModRevision: next, Version: 1}
	if old != nil {
		kv.CreateRevision, kv.Version = old.CreateRevision, old.Version+1
		if r.IgnoreValue {
			kv.Value = old.Value
		}
		if r.IgnoreLease {
			kv.Lease = old.Lease
		}
	}
	w.detach(old)
	if l := w.leases[kv.Lease]; l != nil {
		l.keys[string(kv.Key)] = true
	}
	w.kvs[string(kv.Key)] = kv
	w.change(mvccpb.Event_PUT, kv, old)
	res := &pb.PutResponse{Header: header(next)}
	if r.PrevKv {
		res.PrevKv = old
	}
	return res, nil
}

// change notes a change of an entry. To a watch, the old one is that before the transaction.
func (w *write) change(kind mvccpb.Event_EventType, kv, old *mvccpb.KeyValue) {
	for _, e := range w.changes {
		if bytes.Equal(e.Kv.Key, kv.Key) {
			old = e.PrevKv
			break
		}
	}
	w.changes = append(w.changes, &mvccpb.Event{Type: kind, Kv: kv, PrevKv: old})
}

// detach takes an entry away from its lease.
func (w *write) detach(kv *mvccpb.KeyValue) {
	if kv == nil {
		return
	}
	if l := w.leases[kv.Lease]; l != nil {
		delete(l.keys, string(kv.Key))
	}
}

func checkDelete(r *pb.DeleteRangeRequest) error {
	if len(r.Key) == 0 {
		return rpctypes.ErrGRPCEmptyKey
	}
	return nil
}

func (w *write) remove(r *pb.DeleteRangeRequest) *pb.DeleteRangeResponse {
	gone := span{r.Key, r.RangeEnd}.in(w.kvs)
	for _, kv := range gone {
		w.detach(kv)
		delete(w.kvs, string(kv.Key))
		w.change(mvccpb.Event_DELETE, &mvccpb.KeyValue{Key: kv.Key, ModRevision: w.rev + 1}, kv)
	}
	res := &pb.DeleteRangeResponse{Header: header(w.seen()), Deleted: int64(len(gone))}
	if r.PrevKv {
		res.PrevKvs = gone
	}
	return res
}

// maxOps is etcd's default of --max-txn-ops.
const maxOps = 128

// checkTxn returns the error of a transaction that can never be carried out.
func checkTxn(r *pb.TxnRequest) error {
	if err := checkOps(r, maxOps); err != nil {
		return err
	}
	for _, ops := range [][]*pb.RequestOp{r.Success, r.Failure} {
		if _, _, err := changes(ops); err != nil {
			return err
		}
	}
	return nil
}

// checkOps checks each operation by itself. Those of all levels are most at most.
func checkOps(r *pb.TxnRequest, most int) error {
	n := max(len(r.Compare), len(r.Success), len(r.Failure))
	if n > most {
		return rpctypes.ErrGRPCTooManyOps
	}
	for _, c := range r.Compare {
		if len(c.Key) == 0 {
			return rpctypes.ErrGRPCEmptyKey
		}
	}
	for _, op := range slices.Concat(r.Success, r.Failure) {
		var err error
		switch op := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			err = checkRange(op.RequestRange)
		case *pb.RequestOp_RequestPut:
			err = checkPut(op.RequestPut)
		case *pb.RequestOp_RequestDeleteRange:
			err = checkDelete(op.RequestDeleteRange)
		case *pb.RequestOp_RequestTxn:
			err = checkOps(op.RequestTxn, most-n)
		default:
			err = rpctypes.ErrGRPCKeyNotFound
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// changes returns the keys that operations put and the spans that they delete. No key may
// be changed twice, except by deletes.
func changes(ops []*pb.RequestOp) (puts map[string]bool, dels []span, err error) {
	puts = map[string]bool{}
	for _, op := range ops {
		if r := op.GetRequestDeleteRange(); r != nil {
			dels = append(dels, span{r.Key, r.RangeEnd})
		}
	}
	deleted := func(key string, dels []span) bool {
		return slices.ContainsFunc(dels, func(sp span) bool {
			// For this check, an end of one zero byte is nothing special to etcd.
			return len(sp.end) == 0 && key == string(sp.key) || key >= string(sp.key) && key < string(sp.end)
		})
	}

	for _, op := range ops {
		r := op.GetRequestTxn()
		if r == nil {
			continue
		}
		// Only one of the two branches is carried out, so both may change the same keys.
		thenPuts, thenDels, err := changes(r.Success)
		if err != nil {
			return nil, nil, err
		}
		elsePuts, elseDels, err := changes(r.Failure)
		if err != nil {
			return nil, nil, err
		}
		inner := maps.Clone(thenPuts)
		maps.Copy(inner, elsePuts)
		for key := range inner {
			if puts[key] || deleted(key, dels) {
				return nil, nil, rpctypes.ErrGRPCDuplicateKey
			}
		}
		// etcd lets a later transaction delete what an earlier one puts.
		maps.Copy(puts, inner)
		dels = slices.Concat(dels, thenDels, elseDels)
	}

	for _, op := range ops {
		if r := op.GetRequestPut(); r != nil {
			if puts[string(r.Key)] || deleted(string(r.Key), dels) {
				return nil, nil, rpctypes.ErrGRPCDuplicateKey
			}
			puts[string(r.Key)] = true
		}
	}
	return puts, dels, nil
}

// hasPut reports whether a transaction may put something.
func hasPut(r *pb.TxnRequest) bool {
	return slices.ContainsFunc(slices.Concat(r.Success, r.Failure), func(op *pb.RequestOp) bool {
		return op.GetRequestPut() != nil || op.GetRequestTxn() != nil && hasPut(op.GetRequestTxn())
	})
}

// passes reports whether all comparisons of a transaction are true. A range without entries
// is compared as one entry without a value, whose revisions are 0.
func (w *write) passes(all []*pb.Compare) bool {
	for _, c := range all {
		kvs := span{c.Key, c.RangeEnd}.in(w.kvs)
		if len(kvs) == 0 {
			if c.Target == pb.Compare_VALUE {
				return false // not even an empty value
			}
			kvs = []*mvccpb.KeyValue{{}}
		}
		for _, kv := range kvs {
			if !passes(c, kv) {
				return false
			}
		}
	}
	return true
}

func passes(c *pb.Compare, kv *mvccpb.KeyValue) bool {
	var result int
	switch c.Target {
	case pb.Compare_VALUE:
		result = bytes.Compare(kv.Value, c.GetValue())
	case pb.Compare_CREATE:
		result = cmp.Compare(kv.CreateRevision, c.GetCreateRevision())
	case pb.Compare_MOD:
		result = cmp.Compare(kv.ModRevision, c.GetModRevision())
	case pb.Compare_VERSION:
		result = cmp.Compare(kv.Version, c.GetVersion())
	case pb.Compare_LEASE:
		result = cmp.Compare(kv.Lease, c.GetLease())
	}
	switch c.Result {
	case pb.Compare_EQUAL:
		return result == 0
	case pb.Compare_NOT_EQUAL:
		return result != 0
	case pb.Compare_GREATER:
		return result > 0
	case pb.Compare_LESS:
		return result < 0
	}
	return true
}

// path is the branches that a transaction takes, in its own order and in that of the
// transactions in it. All comparisons see the state before the outermost one.
type path struct {
	succeeded bool
	inner     []*path // of the transactions among the operations
}

func (w *write) path(r *pb.TxnRequest) *path {
	p := &path{succeeded: w.passes(r.Compare)}
	for _, op := range p.ops(r) {
		if t := op.GetRequestTxn(); t != nil {
			p.inner = append(p.inner, w.path(t))
		}
	}
	return p
}

func (p *path) ops(r *pb.TxnRequest) []*pb.RequestOp {
	if p.succeeded {
		return r.Success
	}
	return r.Failure
}

// check returns the first error that f returns for an operation on the path. Then none is
// carried out.
func (w *write) check(r *pb.TxnRequest, p *path, f func(*pb.RequestOp) error) error {
	n := 0
	for _, op := range p.ops(r) {
		err := f(op)
		if t := op.GetRequestTxn(); t != nil {
			err = w.check(t, p.inner[n], f)
			n++
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// txn carries out a transaction.
func (w *write) txn(r *pb.TxnRequest) (*pb.TxnResponse, error) {
	p := w.path(r)
	err := w.check(r, p, func(op *pb.RequestOp) error {
		if put := op.GetRequestPut(); put != nil {
			return w.checkKept(put)
		}
		return nil
	})
	if err == nil {
		err = w.check(r, p, func(op *pb.RequestOp) error {
			if get := op.GetRequestRange(); get != nil {
				return w.checkRevision(get)
			}
			return nil
		})
	}
	if err != nil {
		return nil, err
	}
	return w.walk(r, p)
}

func (w *write) walk(r *pb.TxnRequest, p *path) (*pb.TxnResponse, error) {
	res := &pb.TxnResponse{Header: &pb.ResponseHeader{}, Succeeded: p.succeeded}
	n := 0
	for _, op := range p.ops(r) {
		o := &pb.ResponseOp{}
		switch op := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			got, err := w.get(op.RequestRange)
			if err != nil {
				return nil, err
			}
			o.Response = &pb.ResponseOp_ResponseRange{ResponseRange: got}
		case *pb.RequestOp_RequestPut:
			got, err := w.put(op.RequestPut)
			if err != nil {
				return nil, err
			}
			o.Response = &pb.ResponseOp_ResponsePut{ResponsePut: got}
		case *pb.RequestOp_RequestDeleteRange:
			o.Response = &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: w.remove(op.RequestDeleteRange)}
		case *pb.RequestOp_RequestTxn:
			got, err := w.walk(op.RequestTxn, p.inner[n])
			n++
			if err != nil {
				return nil, err
			}
			o.Response = &pb.ResponseOp_ResponseTxn{ResponseTxn: got}
		}
		res.Responses = append(res.Responses, o)
	}
	return res, nil
}

func (s *state) compact(rev int64) error {
	switch {
	case rev <= s.compacted:
		return rpctypes.ErrGRPCCompacted
	case rev > s.rev:
		return rpctypes.ErrGRPCFutureRev
	}
	s.compacted = rev
	return nil
}

func header(rev int64) *pb.ResponseHeader { return &pb.ResponseHeader{Revision: rev} }
