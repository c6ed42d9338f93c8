package memetcd_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/etcdtest"
	"github.com/hasplock/hasp/lab/internal/memetcd"
)

// side is one of the two etcds, with a stream of each kind.
type side struct {
	t     *testing.T
	name  string
	conn  *grpc.ClientConn
	alive pb.Lease_LeaseKeepAliveClient
	watch pb.Watch_WatchClient

	control chan *pb.WatchResponse // answers to requests of watches

	mu     sync.Mutex // guards all below
	events map[int64][]string
}

func newSide(t *testing.T, name, target string, opts ...grpc.DialOption) *side {
	t.Helper()
	conn, err := grpc.NewClient(target, append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	await.Must(t, err)
	t.Cleanup(func() { conn.Close() })
	s := &side{t: t, name: name, conn: conn, control: make(chan *pb.WatchResponse, 100), events: map[int64][]string{}}
	s.alive, err = pb.NewLeaseClient(conn).LeaseKeepAlive(t.Context())
	await.Must(t, err)
	s.watch, err = pb.NewWatchClient(conn).Watch(t.Context())
	await.Must(t, err)
	go s.receive()
	return s
}

// receive collects the events of each watch, and passes on the answers to requests.
func (s *side) receive() {
	for {
		r, err := s.watch.Recv()
		if err != nil {
			return
		}
		s.mu.Lock()
		for _, e := range r.Events {
			s.events[r.WatchId] = append(s.events[r.WatchId], show(e))
		}
		s.mu.Unlock()
		if r.Created || r.Canceled {
			s.control <- r // only now that its events are read, because askWatch changes r
		}
	}
}

func (s *side) seen(id int64) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.events[id])
}

// show returns a message as text, which is the same for equal messages.
func show(m proto.Message) string {
	b, err := prototext.MarshalOptions{}.Marshal(m)
	if err != nil {
		return err.Error()
	}
	return strings.ReplaceAll(string(b), "  ", " ") // prototext doubles spaces at random
}

// ask makes a call. It returns the answer without the fields that may differ.
func (s *side) ask(req proto.Message) string {
	ctx, cancel := context.WithTimeout(s.t.Context(), await.Patience)
	defer cancel()
	kv := pb.NewKVClient(s.conn)
	leases := pb.NewLeaseClient(s.conn)
	var res interface {
		proto.Message
		GetHeader() *pb.ResponseHeader
	}
	var err error
	switch r := req.(type) {
	case *pb.RangeRequest:
		res, err = kv.Range(ctx, r)
	case *pb.TxnRequest:
		res, err = kv.Txn(ctx, r)
	case *pb.LeaseGrantRequest:
		res, err = leases.LeaseGrant(ctx, r)
	case *pb.LeaseRevokeRequest:
		res, err = leases.LeaseRevoke(ctx, r)
	case *pb.LeaseTimeToLiveRequest:
		res, err = leases.LeaseTimeToLive(ctx, r)
	case *pb.LeaseKeepAliveRequest:
		await.Must(s.t, s.alive.Send(r))
		res, err = s.alive.Recv()
	case *pb.WatchRequest:
		return s.askWatch(r)
	}

	if err != nil {
		return fmt.Sprint(status.Code(err), ": ", status.Convert(err).Message())
	}
	if ttl, ok := res.(*pb.LeaseTimeToLiveResponse); ok {
		ttl.TTL = min(ttl.TTL, 1) // the time left may differ
	}
	h := res.GetHeader()
	h.ClusterId, h.MemberId, h.RaftTerm = 0, 0, 0
	return show(res)
}

// askWatch sends a request to the watches, and returns the answer.
func (s *side) askWatch(r *pb.WatchRequest) string {
	await.Must(s.t, s.watch.Send(r))
	select {
	case res := <-s.control:
		res.Header, res.Events = &pb.ResponseHeader{Revision: res.Header.Revision}, nil
		if res.Canceled {
			res.Header = nil // its revision differs between versions
		}
		return show(res)
	case <-time.After(await.Patience):
		s.t.Fatalf("%s: no answer to %v", s.name, r)
		return ""
	}
}

// sequence draws requests of the kinds that etcdlock makes.
type sequence struct {
	r   *rand.Rand
	rev int64 // roughly the revision of the etcds
}

func (q *sequence) key() []byte {
	return []byte([]string{"a/1", "a/2", "a/3", "a", "b/1", "b/2", "c"}[q.r.IntN(7)])
}

// end draws the end of a range that begins with a key.
func (q *sequence) end(key []byte) []byte {
	switch q.r.IntN(4) {
	case 0:
		return []byte("b")
	case 1:
		return append(slices.Clone(key), 0xff)
	}
	return nil
}

func (q *sequence) some() bool    { return q.r.IntN(3) == 0 }
func (q *sequence) lease() int64  { return 1 + int64(q.r.IntN(5)) } // some do not exist
func (q *sequence) around() int64 { return max(0, q.rev-int64(q.r.IntN(8))+1) }
func (q *sequence) maybe(n int64) int64 {
	if q.r.IntN(4) == 0 {
		return n
	}
	return 0
}

func (q *sequence) get() *pb.RangeRequest {
	r := &pb.RangeRequest{Key: q.key(), Limit: q.maybe(int64(1 + q.r.IntN(3))), MaxCreateRevision: q.maybe(q.around())}
	if r.RangeEnd = q.end(r.Key); q.some() {
		r.SortTarget, r.SortOrder = pb.RangeRequest_CREATE, pb.RangeRequest_ASCEND
		if q.some() {
			r.SortOrder = pb.RangeRequest_DESCEND
		}
	}
	return r
}

func (q *sequence) compare() *pb.Compare {
	c := &pb.Compare{Key: q.key(), Target: pb.Compare_MOD, TargetUnion: &pb.Compare_ModRevision{ModRevision: q.around() * int64(q.r.IntN(2))}}
	if q.some() {
		c.Target, c.TargetUnion = pb.Compare_CREATE, &pb.Compare_CreateRevision{CreateRevision: q.around() * int64(q.r.IntN(2))}
	}
	c.RangeEnd = q.end(c.Key)
	return c
}

// change draws a change of a key, or none.
func (q *sequence) change(key []byte) []*pb.RequestOp {
	switch q.r.IntN(4) {
	case 0:
		return nil
	case 1:
		remove := &pb.DeleteRangeRequest{Key: key}
		return []*pb.RequestOp{{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: remove}}}
	}
	value := []byte([]string{"", "x", "y"}[q.r.IntN(3)])
	return putting(&pb.PutRequest{Key: key, Value: value, Lease: q.maybe(q.lease())}).Success
}

// txn draws a transaction that changes one of two keys.
func (q *sequence) txn(key, other []byte) *pb.TxnRequest {
	r := &pb.TxnRequest{Success: q.change(key), Failure: q.change(other)}
	for range q.r.IntN(3) {
		r.Compare = append(r.Compare, q.compare())
	}
	for _, ops := range []*[]*pb.RequestOp{&r.Success, &r.Failure} {
		for range q.r.IntN(3) {
			*ops = append(*ops, &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: q.get()}})
		}
	}
	return r
}

// parts is a transaction of several. Each changes a key of its own, which no range by age contains,
// because etcd may return entries of one age in any order.
func (q *sequence) parts() *pb.TxnRequest {
	r := &pb.TxnRequest{}
	for i := range 1 + q.r.IntN(4) {
		own := fmt.Append(nil, "p", i)
		r.Success = append(r.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: q.txn(own, own)}})
	}
	return r
}

// putting is a transaction that only puts an entry.
func putting(r *pb.PutRequest) *pb.TxnRequest {
	return &pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: r}}}}
}

func (q *sequence) request() proto.Message {
	switch q.r.IntN(16) {
	case 0:
		return q.get()
	case 1:
		return &pb.LeaseGrantRequest{ID: q.lease(), TTL: int64(600 + q.r.IntN(100))}
	case 2:
		return &pb.LeaseRevokeRequest{ID: q.lease()}
	case 3:
		return &pb.LeaseTimeToLiveRequest{ID: q.lease()}
	case 4:
		return &pb.LeaseKeepAliveRequest{ID: q.lease()}
	case 5, 6, 7:
		return q.parts()
	}
	return q.txn(q.key(), q.key())
}

// sides starts both etcds.
func sides(t *testing.T) []*side {
	etcd := etcdtest.Start(t, 1)[0]
	mem := memetcd.New(1, rand.New(rand.NewPCG(1, 1)))
	t.Cleanup(mem.Close)
	return []*side{
		newSide(t, "etcd", "passthrough:///"+etcd.Client),
		newSide(t, "memetcd", "passthrough:///mem", grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			return mem.Members[0].Dial()
		})),
	}
}

// both asks both sides, and ends the test if their answers differ.
func both(t *testing.T, all []*side, r proto.Message) {
	t.Helper()
	want, got := all[0].ask(r), all[1].ask(r)
	if got != want {
		t.Fatalf("%v:\netcd answers    %s\nmemetcd answers %s", r, want, got)
	}
}

// The imitation answers as a real etcd does, and its watches report the same.
func TestLikeEtcd(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64N(1_000_000)
	t.Logf("seed %d", seed)
	q := &sequence{r: rand.New(rand.NewPCG(seed, 0)), rev: 1}
	all := sides(t)
	var ids []int64 // the open watches
	same := func() {
		for _, id := range ids {
			await.Success(t, "the same reports", func() error {
				want, got := all[0].seen(id), all[1].seen(id)
				if slices.Equal(want, got) {
					return nil
				}
				return fmt.Errorf("watch %d:\netcd reports    %q\nmemetcd reports %q", id, want, got)
			})
		}
	}

	for n := range 3000 {
		switch {
		case n%60 == 10:
			c := &pb.WatchCreateRequest{Key: q.key(), StartRevision: q.maybe(q.around()), WatchId: int64(n), Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NOPUT}}
			ids = append(ids, c.WatchId)
			both(t, all, &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: c}})
		case n%60 == 40 && len(ids) > 0:
			same()
			i := q.r.IntN(len(ids))
			both(t, all, &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: ids[i]}}})
			ids = slices.Delete(ids, i, i+1)
		default:
			both(t, all, q.request())
		}
		if n%5 == 0 {
			whole := &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z")}
			both(t, all, whole)
			q.rev = await.Value(pb.NewKVClient(all[0].conn).Range(t.Context(), whole)).Header.Revision
		}
	}
	same()
}

// When a term has ended, the lease and its entries are gone, as in a real etcd.
func TestTermsEndLikeEtcds(t *testing.T) {
	t.Parallel()
	all := sides(t)
	for _, r := range []proto.Message{
		&pb.LeaseGrantRequest{ID: 7, TTL: 1},
		putting(&pb.PutRequest{Key: []byte("b"), Lease: 7}),
		putting(&pb.PutRequest{Key: []byte("a"), Lease: 7}),
		putting(&pb.PutRequest{Key: []byte("c")}),
	} {
		both(t, all, r)
	}
	for _, s := range all {
		await.Until(t, s.name+": the end of the lease", func() bool {
			return strings.Contains(s.ask(&pb.LeaseTimeToLiveRequest{ID: 7}), "TTL:-1")
		})
	}
	for _, r := range []proto.Message{
		&pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z")},
		putting(&pb.PutRequest{Key: []byte("b"), Lease: 7}),
		&pb.LeaseKeepAliveRequest{ID: 7},
		&pb.LeaseRevokeRequest{ID: 7},
	} {
		both(t, all, r)
	}
}
