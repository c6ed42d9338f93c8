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
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// liveness is how long etcd may be silent before the driver looks for a member that answers,
	// and how often the member is asked whether it lives while callers wait.
	liveness = time.Second

	// headStart is how much earlier a silent member is asked than the others. A store that is
	// only slow would otherwise lose its calls.
	headStart = time.Second

	searchTime = 3 * time.Second        // for one search for a member
	signInTime = 10 * time.Second       // … with a user, because etcd makes passwords slow to check
	minRest    = 100 * time.Millisecond // after a search that found no member
	maxRest    = time.Second            // … when that happens again and again
	lookEvery  = 200 * time.Millisecond
)

// cluster is the etcd: its endpoints, and the member in use. Each member has a client of its own,
// because one client of several members sends calls to a member that hangs as well.
type cluster struct {
	conf  clientv3.Config // of one member, but for the endpoint
	all   []string        // endpoints
	check func(context.Context)
	clock *clock
	beats chan struct{}   // has room for the keep-alives that may be under way
	ctx   context.Context // ends with the driver
	wg    *sync.WaitGroup // of the driver's goroutines

	mu      sync.Mutex    // guards all below
	current *member       // nil before the first search, and after a connection has failed
	search  chan struct{} // is closed when the search ends that is under way; nil if there is none
	waiters int           // callers that wait for an event
	pending int           // calls that have no answer yet
	looking bool          // the goroutine of look runs
	silent  time.Time     // since when there was no answer; zero if no call waits for one, and none has failed since the last answer
	checked time.Time     // when check was last called
	failed  time.Time     // when the last search failed
	rest    time.Duration // from failed on, before the next one
	err     error         // of the last search
}

// call makes one call to the etcd. On a silent member it waits until the member answers. If another
// member replaces that one, the call fails, and its outcome is unknown. The call is repeated only
// if etcd has certainly not carried it out: it found no connection, or its token was refused.
func call[T any](ctx context.Context, c *cluster, f func(m *member) (T, error)) (v T, err error) {
	for try := 0; ; try++ {
		m, err := c.member(ctx)
		if err != nil {
			return v, &unsent{err}
		}
		c.asked()
		v, err = f(m)
		c.answered(m, isAnswer(err))
		if err == nil {
			return v, nil
		}

		again := isStale(err) // and the client has got another token
		// A member that says that a request timed out has answered. It may mean this call's own
		// deadline. To leave would close the connection under the calls of all others.
		if isUnavailable(err) && !timedOut(err) || isRefused(err) {
			c.leave(m)
			again = isUnsent(err)
		}
		switch {
		case again && try == 0:
		case isUnsent(err):
			return v, &unsent{explain(ctx, m.endpoint, err)}
		default:
			return v, explain(ctx, m.endpoint, err)
		}
	}
}

// unsent is the error of a call that was not sent, so it has changed nothing.
type unsent struct{ error }

func (u *unsent) Unwrap() error { return u.error }

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
		case <-done: // c.failed tells whether it has failed
		case <-ctx.Done():
		case <-c.ctx.Done():
		}
	}
}

// asked notes that a call is sent.
func (c *cluster) asked() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending++
	c.silentLocked()
	c.lookLocked()
}

func (c *cluster) silentLocked() {
	if c.silent.IsZero() {
		c.silent = time.Now()
	}
}

// answered notes the end of a call to m. Without an answer, etcd counts as silent until there is
// an answer to another call.
func (c *cluster) answered(m *member, yes bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending--
	if yes && m == c.current {
		c.spokeLocked()
	}
}

func (c *cluster) spokeLocked() {
	if c.silent = (time.Time{}); c.pending > 0 {
		c.silent = time.Now()
	}
}

// leave gives up a member whose connection has failed, that has no leader, or that refuses the
// password.
func (c *cluster) leave(m *member) {
	c.mu.Lock()
	if c.current == m {
		c.current = nil
		c.silentLocked()
	}
	c.mu.Unlock()
	m.client.Close()
}

// silence returns since when the etcd does not answer, or zero, and the reason of the last search
// that failed.
func (c *cluster) silence() (time.Time, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.silent, c.err
}

// wait counts a caller that waits for an event. While there are any, check is called each second:
// the watches of a member that hangs report nothing.
func (c *cluster) wait() (stop func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiters++
	c.lookLocked()
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.waiters--
	}
}

// lookLocked starts a goroutine that looks after etcd, unless one runs. It ends when no caller
// waits, and etcd is not silent.
func (c *cluster) lookLocked() {
	if c.looking || c.ctx.Err() != nil {
		return
	}
	c.looking = true
	c.wg.Go(func() {
		t := time.NewTicker(lookEvery)
		defer t.Stop()
		for c.look() {
			select {
			case <-t.C:
			case <-c.ctx.Done():
			}
		}
	})
}

// look begins a search if etcd is silent. It reports whether there is something left to look after.
func (c *cluster) look() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.ctx.Err() != nil, c.waiters == 0 && (c.silent.IsZero() || c.current == nil):
		c.looking = false
		return false
	case !c.silent.IsZero():
		if (c.current == nil || time.Since(c.silent) >= liveness) && time.Since(c.failed) >= c.rest {
			c.searchLocked()
		}
	case time.Since(c.checked) >= liveness:
		c.checked = time.Now()
		c.wg.Go(func() {
			ctx, cancel := context.WithTimeout(c.ctx, searchTime)
			defer cancel()
			c.check(ctx)
		})
	}
	return true
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
				given, c.current = m, nil // Close has begun, and will not find it
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

// find returns a member that answers: old, if it is not nil and does, or the first of the others.
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
			// A linearizable read needs a leader and a majority. A member that is cut off from the
			// others may still answer other requests, but not this one.
			_, err = m.client.Get(ctx, root, clientv3.WithKeysOnly())
		}
		if m != nil && isAnswer(err) && !isRefused(err) {
			select {
			case answers <- answer{m, nil}:
				return
			case <-ctx.Done(): // another one was faster
			}
		}
		if m != nil && m != old {
			m.client.Close()
		}
		select {
		case answers <- answer{nil, explain(c.ctx, endpoint, err)}:
		case <-ctx.Done():
		}
	}

	// Every endpoint gets a new connection, also that of old: a connection may be dead although its
	// member lives.
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

// close ends the connection. The cluster's context has ended.
func (c *cluster) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current != nil {
		c.current.client.Close()
	}
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
	leases   pb.LeaseClient // the client's own cannot choose the numbers of leases

	mu      sync.Mutex // guards all below
	watcher clientv3.Watcher
	idle    []*stream // that no call uses
}

// connect returns a member that may not have been connected yet, unless there is a user: then the
// client has got a token.
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
	began time.Duration // by the clock, before it was sent, so the lease's term ends later than began + ttl
	ttl   int64         // the lease's term in seconds; 0 or less if the lease has ended
	term  uint64        // of the leader, as the member knew it
	err   error
}

// beat begins the term of a lease anew.
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

// stream is for keep-alives, one at a time: a member that is not the leader passes each on to the
// leader, and answers those of one stream one after another. Streams are used again: with a new one
// for each keep-alive, members of etcd 3.4 answered nothing for long after their leader had hung.
type stream struct {
	pb.Lease_LeaseKeepAliveClient // nil until it is opened
	ctx                           context.Context
	cancel                        context.CancelFunc
}

// beat uses a stream that no call uses, or opens one.
func (m *member) beat(ctx context.Context, clock *clock, lease int64, b *beat) (err error) {
	s := &stream{}
	m.mu.Lock()
	if n := len(m.idle); n > 0 {
		s, m.idle = m.idle[n-1], m.idle[:n-1]
	} else {
		s.ctx, s.cancel = context.WithCancel(m.client.Ctx())
	}
	m.mu.Unlock()

	stop := context.AfterFunc(ctx, s.cancel)
	var r *pb.LeaseKeepAliveResponse
	used := s.Lease_LeaseKeepAliveClient != nil
	if !used {
		s.Lease_LeaseKeepAliveClient, err = m.leases.LeaseKeepAlive(s.ctx)
	}
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
