package memetcd

import (
	"context"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// syncTime is how often etcd looks after watches that begin in the past.
const syncTime = 100 * time.Millisecond

// watches is the service Watch.
type watches struct {
	pb.UnimplementedWatchServer
	m *Member
}

// watchStream is one stream with its watches.
type watchStream struct {
	pb.Watch_WatchServer
	m *Member

	// The mutex of the Cluster guards all below.
	watchers map[int64]*watcher
	next     int64               // the number of the next watch that does not name its own
	out      []*pb.WatchResponse // not sent yet
}

// watcher is one watch.
type watcher struct {
	id      int64
	span    span
	from    int64     // the first revision that was not reported
	since   time.Time // when it begins to report
	checked bool      // its first revision is not compacted
	create  *pb.WatchCreateRequest
}

// Watch answers requests on one goroutine, and reports events on another.
func (s watches) Watch(stream pb.Watch_WatchServer) error {
	ws := &watchStream{Watch_WatchServer: stream, m: s.m, watchers: map[int64]*watcher{}}
	ctx, cancel := context.WithCancelCause(stream.Context())
	var reporter sync.WaitGroup
	defer reporter.Wait()
	reporter.Go(func() { cancel(ws.report(ctx)) })
	requests := make(chan *pb.WatchRequest)
	go func() {
		defer close(requests)
		for {
			r, err := stream.Recv()
			if err != nil {
				return
			}
			select {
			case requests <- r:
			case <-ctx.Done():
				return
			}
		}
	}()
	for {
		select {
		case r, ok := <-requests:
			if !ok {
				cancel(nil)
				return nil
			}
			ws.request(r)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// request takes in a request.
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
			ws.out = append(ws.out, &pb.WatchResponse{Header: header(at), WatchId: id, Canceled: true})
		}
	case *pb.WatchRequest_ProgressRequest:
		ws.out = append(ws.out, &pb.WatchResponse{Header: header(at), WatchId: -1})
	}
}

func (ws *watchStream) createLocked(r *pb.WatchCreateRequest, at int64) {
	w := &watcher{id: r.WatchId, span: span{r.Key, r.RangeEnd}, from: r.StartRevision, since: time.Now(), create: r}
	if len(w.span.key) == 0 {
		w.span.key = []byte{0}
	}
	if w.from == 0 {
		w.from = at + 1
	}
	if w.from <= at {
		w.since = time.Now().Add(ws.m.c.upToLocked(syncTime))
	}
	res := &pb.WatchResponse{Header: header(at), WatchId: w.id, Created: true}
	ws.out = append(ws.out, res)
	end := w.span.end
	switch {
	case len(end) > 0 && !(len(end) == 1 && end[0] == 0) && slices.Compare(w.span.key, end) >= 0:
		res.WatchId, res.Canceled, res.CancelReason = -1, true, "mvcc: watcher range is empty"
		return
	case w.id == 0:
		for ws.watchers[ws.next] != nil {
			ws.next++
		}
		w.id = ws.next
		ws.next++
		res.WatchId = w.id
	case ws.watchers[w.id] != nil:
		res.WatchId, res.Canceled, res.CancelReason = -1, true, "mvcc: duplicate watch ID provided on the WatchStream"
		return
	}
	ws.watchers[w.id] = w
}

// report sends what the stream has to say until it ends.
func (ws *watchStream) report(ctx context.Context) error {
	c := ws.m.c
	needs := needsLeader(ctx)
	for {
		var all []*pb.WatchResponse
		none := false
		pause := time.Duration(0)
		ok := c.await(func() bool {
			if none = needs && ws.m.leaderlessLocked(); none {
				return true
			}
			if ws.m.frozen {
				return false
			}
			all, pause = ws.collectLocked()
			for _, r := range all {
				ws.m.signLocked(r.Header)
			}
			return len(all) > 0 || pause > 0
		}, ctx.Done())
		if !ok {
			return ctx.Err()
		}
		lag := ws.m.lag
		c.mu.Unlock()
		if none {
			return rpctypes.ErrGRPCNoLeader
		}

		if len(all) == 0 {
			c.sleep(pause)
			continue
		}
		c.sleep(lag)
		for _, r := range all {
			if err := ws.Send(r); err != nil {
				return err
			}
		}
	}
}

// collectLocked returns what is to be sent. If a watch must wait, it returns for how long.
func (ws *watchStream) collectLocked() (all []*pb.WatchResponse, pause time.Duration) {
	all, ws.out = ws.out, nil
	if len(all) > 0 {
		return all, 0 // a watch is confirmed before it reports
	}
	at := ws.m.appliedLocked()
	for _, w := range ws.watchers {
		if wait := time.Until(w.since); wait > 0 {
			if pause == 0 || wait < pause {
				pause = wait
			}
			continue
		}
		if !w.checked && w.from < ws.m.c.state.compacted {
			delete(ws.watchers, w.id)
			all = append(all, &pb.WatchResponse{Header: header(at), WatchId: w.id, CompactRevision: ws.m.c.state.compacted, Canceled: true})
			continue
		}
		w.checked = true
		all = append(all, w.news(ws.m.c.state, at)...)
		w.from = max(w.from, at+1)
	}
	return all, pause
}

// news returns the events until a revision, with one message for each revision.
func (w *watcher) news(s *state, at int64) (all []*pb.WatchResponse) {
	for _, e := range s.since(w.from) {
		rev := e.Kv.ModRevision
		if rev > at {
			break
		}
		if !w.span.has(e.Kv.Key) || slices.Contains(w.create.Filters, filterOf(e)) {
			continue
		}
		if !w.create.PrevKv || rev-1 < s.compacted {
			e = &mvccpb.Event{Type: e.Type, Kv: e.Kv}
		}
		if n := len(all); n == 0 || all[n-1].Header.Revision != rev {
			all = append(all, &pb.WatchResponse{Header: header(rev), WatchId: w.id})
		}
		last := all[len(all)-1]
		last.Events = append(last.Events, e)
	}
	return all
}

// filterOf returns the filter that hides an event.
func filterOf(e *mvccpb.Event) pb.WatchCreateRequest_FilterType {
	if e.Type == mvccpb.Event_DELETE {
		return pb.WatchCreateRequest_NODELETE
	}
	return pb.WatchCreateRequest_NOPUT
}
