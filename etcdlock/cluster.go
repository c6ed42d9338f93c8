package etcdlock

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// After a silence of liveness, the driver searches for a member that answers. While callers
	// wait, it asks the member in use this often whether it lives.
	liveness  = time.Second
	lookEvery = 200 * time.Millisecond

	// A search asks a silent member this much earlier than the others. Otherwise another member
	// would replace one that is only slow, and the calls in flight would fail.
	headStart = time.Second

	searchTime = 3 * time.Second        // for one search for a member
	signInTime = 10 * time.Second       // … with a user, because etcd makes passwords slow to check
	minRest    = 100 * time.Millisecond // after a search that found no member
	maxRest    = time.Second            // … when that happens again and again
)

// cluster is the etcd: its endpoints, and the member in use. Each member has a client of its own,
// because one client of several members would also send calls to a member that hangs.
type cluster struct {
	conf  clientv3.Config // for one member, without the endpoint
	all   []string        // all endpoints
	clock *clock
	beats chan struct{}   // has room for the keep-alives that may be under way
	ctx   context.Context // ends with the driver
	wg    sync.WaitGroup  // of the driver's goroutines

	mu      sync.Mutex    // guards all below
	current *member       // nil before the first search, and after a connection has failed
	search  chan struct{} // closed when the search that is under way ends; nil if there is none
	pending int           // calls that have no answer yet
	silent  time.Time     // when the silence began; zero if etcd answers or is not asked
	checked time.Time     // when look last asked for a check
	failed  time.Time     // when the last search failed
	rest    time.Duration // the next search may begin at failed + rest
	err     error         // of the last search
}

// call makes one call to the etcd. If the member is silent, call waits for the answer. If another
// member replaces the silent one meanwhile, the call fails, and its outcome is unknown. call
// repeats only calls that etcd has certainly not carried out: there was no connection, or the token
// was refused.
func call[T any](ctx context.Context, c *cluster, f func(m *member) (T, error)) (v T, err error) {
	for try := 0; ; try++ {
		m, err := c.member(ctx)
		if err != nil {
			return v, &unsent{err}
		}
		c.asked()
		v, err = f(m)
		c.answered(m, err)
		if err == nil {
			return v, nil
		}

		// After a refused token, the client has another one by now.
		notSent := isUnsent(err)
		if try == 0 && (notSent || is(err, rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthOldRevision, rpctypes.ErrUserEmpty)) {
			continue
		}
		if err = explain(ctx, m.endpoint, err); notSent {
			err = &unsent{err}
		}
		return v, err
	}
}

// member returns the member in use.
func (c *cluster) member(ctx context.Context) (*member, error) {
	for {
		c.mu.Lock()
		switch {
		case ctx.Err() != nil:
			c.mu.Unlock()
			return nil, ctx.Err()
		case c.ctx.Err() != nil:
			c.mu.Unlock()
			return nil, errClosed
		case c.search != nil:
		case c.current != nil:
			defer c.mu.Unlock()
			return c.current, nil
		case time.Since(c.failed) < c.rest:
			defer c.mu.Unlock()
			return nil, c.err
		}
		done := c.searchLocked()
		c.mu.Unlock()
		select {
		case <-done: // if the search has failed, c.failed says so
		case <-ctx.Done():
		case <-c.ctx.Done():
		}
	}
}

// asked records that a call is sent.
func (c *cluster) asked() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending++
	c.silentLocked()
}

func (c *cluster) silentLocked() {
	if c.silent.IsZero() {
		c.silent = time.Now()
	}
}

// answered records the end of a call to m. If m has not answered, etcd counts as silent until
// another call has an answer. The member is given up if its connection has failed, if it has no
// leader, or if it refuses the password.
func (c *cluster) answered(m *member, err error) {
	// Keep a member that says that a request timed out: it has answered, and if it were given up,
	// the calls of all other callers would fail.
	leave := isUnavailable(err) && !is(err, rpctypes.ErrTimeout) || isRefused(err)

	c.mu.Lock()
	c.pending--
	switch {
	case m != c.current:
	case leave:
		c.current = nil
		c.silentLocked()
	case isAnswer(err):
		c.spokeLocked()
	}
	c.mu.Unlock()
	if leave {
		m.client.Close()
	}
}

func (c *cluster) spokeLocked() {
	if c.silent = (time.Time{}); c.pending > 0 {
		c.silent = time.Now()
	}
}

// silence returns when etcd stopped answering, or zero if it answers, and the error of the last
// search, or nil.
func (c *cluster) silence() (time.Time, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.silent, c.err
}

// look begins a search if etcd is silent. If callers wait for events, it also reports whether to
// send a call that shows if the member lives, because a member that hangs reports no events.
func (c *cluster) look(waits bool) (due bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.current == nil && !waits && c.pending == 0: // no caller needs a member
	case !c.silent.IsZero():
		if (c.current == nil || time.Since(c.silent) >= liveness) && time.Since(c.failed) >= c.rest {
			c.searchLocked()
		}
	case waits && time.Since(c.checked) >= liveness:
		c.checked = time.Now()
		return true
	}
	return false
}

// searchLocked begins a search, unless one is under way. The channel is closed when it ends.
func (c *cluster) searchLocked() <-chan struct{} {
	if c.search != nil {
		return c.search
	}
	old, done := c.current, make(chan struct{})
	c.search = done
	c.silentLocked()
	c.wg.Go(func() {
		m, err := c.find(old)
		c.mu.Lock()
		defer c.mu.Unlock()
		defer close(done)
		c.search, c.err = nil, err
		if err != nil {
			c.failed, c.rest = time.Now(), min(max(2*c.rest, minRest), maxRest)
			return // old stays in use
		}

		c.rest = 0
		if m != old {
			given := c.current // old, or nil because old was given up meanwhile
			if c.current = m; c.ctx.Err() != nil {
				given, c.current = m, nil // Close has begun, and will not close it
			}
			if given != nil {
				c.wg.Go(func() { given.client.Close() }) // its calls fail, with unknown outcomes
			}
		}
		if c.current != nil {
			c.spokeLocked()
		}
	})
	return done
}

// find returns a member that answers: old, which may be nil, or the first of the others.
func (c *cluster) find(old *member) (*member, error) {
	ctx, cancel := context.WithTimeout(c.ctx, c.conf.DialTimeout)
	defer cancel()
	type answer struct {
		m   *member
		err error
	}
	answers := make(chan answer)
	ask := func(m *member, endpoint string) {
		var err error
		if m == nil {
			m, err = c.connect(endpoint)
		}
		if err == nil {
			// Send a linearizable read, which needs a leader and a majority. A member that is cut
			// off from the others may still answer other requests.
			_, err = m.client.Get(ctx, root, clientv3.WithKeysOnly())
		}
		a := answer{m, nil}
		if !isAnswer(err) || isRefused(err) || m == nil {
			a.err = explain(c.ctx, endpoint, err)
		}
		select {
		case answers <- a:
		case <-ctx.Done(): // another one was faster
			a.err = ctx.Err()
		}
		if a.err != nil && m != nil && m != old {
			m.client.Close()
		}
	}

	// Connect to every endpoint, including old's: a connection may be dead although its member
	// lives.
	open, start := len(c.all), time.Duration(0)
	if old != nil {
		open, start = open+1, headStart
		c.wg.Go(func() { ask(old, old.endpoint) })
	}
	for _, i := range rand.Perm(len(c.all)) {
		c.wg.Go(func() {
			if pause(ctx, start); ctx.Err() == nil {
				ask(nil, c.all[i])
			}
		})
	}
	var first error
	for range open {
		select {
		case a := <-answers:
			if a.err == nil {
				return a.m, nil
			}
			if first == nil || errors.Is(first, os.ErrDeadlineExceeded) {
				first = a.err
			}
		case <-ctx.Done():
			return nil, cmp.Or(first, explain(c.ctx, c.all[0], ctx.Err()))
		}
	}
	return nil, first
}

// close ends the connection, and waits for the goroutines. The cluster's context has ended.
func (c *cluster) close() {
	c.mu.Lock()
	if c.current != nil {
		c.current.client.Close()
	}
	c.mu.Unlock()
	c.wg.Wait()
}

// spawn starts a goroutine that the driver's Close waits for. It returns false after Close
// has begun.
func (c *cluster) spawn(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() != nil {
		return false
	}
	c.wg.Go(f)
	return true
}

// member is one connection to one member of the etcd. The driver uses one member at a time. It
// gives up a member if the connection fails, if the member has no leader, or if the member is
// silent while another one answers.
type member struct {
	endpoint string
	client   *clientv3.Client
	leases   pb.LeaseClient // unlike client's own methods, it can choose the numbers of leases

	mu      sync.Mutex // guards all below
	watcher clientv3.Watcher
	idle    []*stream // the streams that no call uses
}

// connect returns a member. With a user its connection is established, because the client has
// fetched a token. Without one it may not be.
func (c *cluster) connect(endpoint string) (*member, error) {
	conf := c.conf
	conf.Endpoints = []string{endpoint}
	client, err := clientv3.New(conf)
	if err != nil {
		return nil, err
	}
	return &member{endpoint: endpoint, client: client, leases: pb.NewLeaseClient(client.ActiveConnection()), watcher: client.Watcher}, nil
}

// maxBeats is how many keep-alives of a Client are under way at once. A server may allow 100 streams
// for each connection.
const maxBeats = 64

// beat is a keep-alive with its answer.
type beat struct {
	began time.Duration // by the clock, before it was sent; the lease does not end before began + ttl
	ttl   int64         // the lease's term in seconds; 0 or less if the lease has ended
	term  uint64        // the raft term, as the member knew it: a new leader has a new one
	err   error
}

// beat sends a keep-alive, which begins the term of a lease anew.
func (c *cluster) beat(ctx context.Context, lease int64) (b beat) {
	select {
	case c.beats <- struct{}{}:
		defer func() { <-c.beats }()
		_, b.err = call(ctx, c, func(m *member) (any, error) { return nil, m.beat(ctx, c.clock, lease, &b) })
	case <-ctx.Done():
		b.err = ctx.Err()
	}
	return b
}

// stream is for one keep-alive at a time, because a member that is not the leader answers those of
// one stream one after another. Streams are reused, because etcd checks the password for each new
// one.
type stream struct {
	pb.Lease_LeaseKeepAliveClient
	cancel context.CancelFunc
}

// beat sends a keep-alive on an idle stream, or on a new one, and fills in b.
func (m *member) beat(ctx context.Context, clock *clock, lease int64, b *beat) (err error) {
	m.mu.Lock()
	var s *stream
	if n := len(m.idle); n > 0 {
		s, m.idle = m.idle[n-1], m.idle[:n-1]
	}
	m.mu.Unlock()
	used, within := s != nil, context.Context(nil)
	if !used {
		s = &stream{}
		within, s.cancel = context.WithCancel(m.client.Ctx())
	}

	stop := context.AfterFunc(ctx, s.cancel)
	if !used {
		s.Lease_LeaseKeepAliveClient, err = m.leases.LeaseKeepAlive(within)
	}
	var r *pb.LeaseKeepAliveResponse
	if err == nil {
		b.began = clock.now()
		_ = s.Send(&pb.LeaseKeepAliveRequest{ID: lease}) // if that fails, Recv has the reason
		r, err = s.Recv()
	}
	b.ttl, b.term = r.GetTTL(), r.GetHeader().GetRaftTerm()
	if !stop() || err != nil {
		if s.cancel(); used && ctx.Err() == nil {
			return m.beat(ctx, clock, lease, b) // the member may have been restarted since the stream was used
		}
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.idle = append(m.idle, s)
	return nil
}
