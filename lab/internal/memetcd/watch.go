package memetcd

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

type watches struct {
	pb.UnimplementedWatchServer
	m *Member
}

// watchStream is one stream with its watches.
type watchStream struct {
	pb.Watch_WatchServer
	m *Member

	// The mutex of the Cluster guards all fields below.
	watchers map[int64]*watcher
	out      []*pb.WatchResponse // responses not sent yet
}

// watcher is one watch of the deletions of an entry.
type watcher struct {
	id   int64
	key  string
	from int64 // the first revision to report
	seen int   // the number of deletions that it has passed
}

// Watch answers requests on one goroutine, and reports events on another.
func (s watches) Watch(stream pb.Watch_WatchServer) error {
	ws := &watchStream{Watch_WatchServer: stream, m: s.m, watchers: map[int64]*watcher{}}
	ctx, cancel := context.WithCancel(stream.Context())
	var reporter sync.WaitGroup
	defer reporter.Wait()
	defer cancel()
	reporter.Go(func() { ws.report(ctx) })
	for {
		r, err := stream.Recv()
		if err != nil {
			return nil
		}
		ws.request(r)
	}
}

// request carries out a request, and queues its response.
func (ws *watchStream) request(r *pb.WatchRequest) {
	c := ws.m.c
	c.sleep(c.upTo(latency))
	if !c.await(func() bool { return !ws.m.frozen }, ws.Context().Done()) {
		return
	}
	defer c.mu.Unlock()
	defer c.changeLocked()
	at := ws.m.appliedLocked()
	switch r := r.RequestUnion.(type) {
	case *pb.WatchRequest_CreateRequest:
		ws.createLocked(r.CreateRequest, at)
	case *pb.WatchRequest_CancelRequest:
		if id := r.CancelRequest.WatchId; ws.watchers[id] != nil {
			delete(ws.watchers, id)
			ws.out = append(ws.out, &pb.WatchResponse{Header: header(at), WatchId: id,
				Canceled: true})
		}
	default:
		panic(fmt.Sprintf("memetcd does not imitate %v", r))
	}
}

// createLocked adds a watch of deletions from the requested revision on, or else of new deletions.
func (ws *watchStream) createLocked(r *pb.WatchCreateRequest, at int64) {
	checkFields(r, "key", "start_revision", "watch_id", "filters")
	id := r.WatchId
	if id == 0 || !slices.Contains(r.Filters, pb.WatchCreateRequest_NOPUT) {
		panic(fmt.Sprintf("memetcd does not imitate %v", r))
	}
	from := cmp.Or(r.StartRevision, at+1)
	ws.watchers[id] = &watcher{id: id, key: string(r.Key), from: from}
	ws.out = append(ws.out, &pb.WatchResponse{Header: header(at), WatchId: id, Created: true})
}

// report sends responses until the stream ends.
func (ws *watchStream) report(ctx context.Context) {
	c := ws.m.c
	for {
		var all []*pb.WatchResponse
		ok := c.await(func() bool {
			if !ws.m.frozen {
				all = ws.collectLocked()
			}
			return len(all) > 0
		}, ctx.Done())
		if !ok {
			return
		}
		lag := ws.m.lag
		c.mu.Unlock()

		c.sleep(lag)
		for _, r := range all {
			if ws.Send(r) != nil {
				return // Recv fails as well
			}
		}
	}
}

// collectLocked returns the responses to send now.
func (ws *watchStream) collectLocked() (all []*pb.WatchResponse) {
	all = ws.out
	ws.out = nil
	if len(all) == 0 { // confirm a watch before reporting its events
		at := ws.m.appliedLocked()
		for _, w := range ws.watchers {
			all = append(all, w.news(ws.m.c.state, at)...)
		}
	}

	for _, r := range all {
		ws.m.signLocked(r.Header)
	}
	return all
}

// news returns the deletions up to the revision at, in a separate response for each revision.
func (w *watcher) news(s *state, at int64) (all []*pb.WatchResponse) {
	for _, e := range s.gone[w.seen:] {
		rev := e.Kv.ModRevision
		if rev > at {
			break
		}
		w.seen++
		if rev < w.from || string(e.Kv.Key) != w.key {
			continue
		}
		if n := len(all); n == 0 || all[n-1].Header.Revision != rev {
			all = append(all, &pb.WatchResponse{Header: header(rev), WatchId: w.id})
		}
		last := all[len(all)-1]
		last.Events = append(last.Events, e)
	}

	return all
}
