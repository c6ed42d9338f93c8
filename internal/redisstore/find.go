package redisstore

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// finder finds the server that has a key. After a failure it makes the client, or the search of the
// sentinels, look for the servers again.
type finder struct {
	*settings
	tasks  *tasks // the goroutines that Close waits for
	rdb    redis.UniversalClient
	opened *dialer // nil if the caller of hasp passed the client

	sentinels *sentinels // nil unless a URL names sentinels

	one     *server     // nil if the Store is a cluster
	located atomic.Bool // find has found a server of the cluster
	byNode  sync.Map    // of a cluster: *redis.Client → *server
}

// newServer returns the server that the client node is for.
func (f *finder) newServer(node redis.UniversalClient, addr string) *server {
	newGather := func(confirm bool) *gather {
		return &gather{
			settings: f.settings, tasks: f.tasks, suspect: f.suspect,
			rdb: f.rdb, node: node, confirm: confirm,
		}
	}

	return &server{
		settings: f.settings, node: node, addr: addr, master: f.master,
		calls: newGather(false), holds: newGather(true), checking: make(chan struct{}, 1),
	}
}

// find returns the server that has the slot of a key. Of a cluster, it may have to ask servers for
// the slots first.
func (f *finder) find(ctx context.Context, key string) (*server, error) {
	if f.one != nil {
		return f.one, nil
	}
	cluster := f.rdb.(*redis.ClusterClient)
	if f.located.Load() {
		return f.locate(ctx, cluster, key)
	}

	// The first call of MasterForKey asks servers for the slots, and may last longer than ctx. So
	// let another goroutine call it. The answer serves later callers even if this one leaves.
	type found struct {
		at  *server
		err error
	}

	result := make(chan found, 1)
	if !f.tasks.spawn(func() {
		within, cancel := context.WithTimeout(context.WithoutCancel(ctx), dialTimeout)
		defer cancel()
		at, err := f.locate(within, cluster, key)
		if err == nil {
			f.located.Store(true)
		}
		result <- found{at, err}
	}) {
		return nil, redis.ErrClosed
	}

	select {
	case r := <-result:
		return r.at, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// locate returns the server of the cluster that has the slot of a key.
func (f *finder) locate(ctx context.Context, cluster *redis.ClusterClient,
	key string) (*server, error) {
	began := time.Now()
	node, err := cluster.MasterForKey(ctx, key)
	if err != nil {
		return nil, f.explain(ctx, began, err)
	}
	return f.at(node), nil
}

// at returns the server of a node of the cluster.
func (f *finder) at(node *redis.Client) *server {
	if at, ok := f.byNode.Load(node); ok {
		return at.(*server)
	}
	at, _ := f.byNode.LoadOrStore(node, f.newServer(node, whole(node.Options().Addr)))
	return at.(*server)
}

// all returns the servers that have keys: the only server, or each master of the cluster.
func (f *finder) all(ctx context.Context) ([]*server, error) {
	// Call find first, which ends with ctx, to get the map of slots. Without the map, ForEachMaster
	// could last longer than ctx.
	if _, err := f.find(ctx, ""); err != nil {
		return nil, err
	}
	if f.one != nil {
		return []*server{f.one}, nil
	}

	var mu sync.Mutex // guards all
	var all []*server
	began := time.Now()
	cluster := f.rdb.(*redis.ClusterClient)
	err := cluster.ForEachMaster(ctx, func(_ context.Context, node *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, f.at(node))
		return nil
	})

	switch {
	case err != nil:
		return nil, f.explain(ctx, began, err)
	case len(all) == 0:
		return nil, errors.New("no server has a slot")
	}

	return all, nil
}

// follow returns the server to which a command must be sent again, and whether ASKING must precede
// the command. The argument at is the server that refused the command with err, which is MOVED or
// ASK. If hasp has no client of the other server, the result is nil. The Store must be a cluster
// that was opened by a URL.
func (f *finder) follow(at *server, err error) (to *server, asking bool) {
	addr, asking := redis.IsAskError(err)
	if !asking {
		addr, _ = redis.IsMovedError(err)
		f.reload() // after MOVED, the map of slots is out of date; after ASK, it is still valid
	}

	node, ok := f.opened.nodes.known.Load(marked(redirected(addr, at.addr)))
	if !ok {
		return nil, false
	}
	return f.at(node.(*redis.Client)), asking
}

// reload starts a search for the servers of a cluster, and does not wait. Without a cluster, it
// does nothing.
func (f *finder) reload() {
	if cluster, ok := f.rdb.(*redis.ClusterClient); ok {
		cluster.ReloadState(context.Background())
	}
}

// noteFailure starts a search for the servers if err says that another server may have replaced
// one. go-redis starts one only when a server of a cluster redirects, and once a minute.
func (f *finder) noteFailure(err error) {
	switch {
	case !mayHaveMoved(err):
	case f.isCluster:
		f.reload()
	case f.sentinels != nil:
		f.sentinels.start(pause)
	}
}

// suspect starts a search for the master if a reply is late. If the search began only when the
// first call has failed, many calls that wait could fail before the new master is known.
func (f *finder) suspect() {
	if f.sentinels != nil {
		f.sentinels.start(suspectAfter)
	}
}

// master returns the address of the master that the sentinels of a URL have named, or "".
func (f *finder) master() string {
	if f.sentinels == nil {
		return ""
	}
	return f.sentinels.known()
}

// pause is the shortest time between two searches that failures start.
const pause = 100 * time.Millisecond

// mayHaveMoved reports whether another server may have replaced the one that was asked. This is so
// if the reply says it, or if there was no reply and the call was not cancelled.
func mayHaveMoved(err error) bool {
	switch {
	case errors.Is(err, context.Canceled):
		return false
	case resp.IsReadOnly(err):
		return true
	case resp.IsReply(err):
		saysSo := func(word string) bool { return redis.HasErrorPrefix(err, word) }
		return slices.ContainsFunc([]string{"MASTERDOWN", "CLUSTERDOWN", "MOVED"}, saysSo)
	}

	return true // there was no reply
}
