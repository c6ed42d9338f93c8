package etcdlock

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
)

const (
	// If calls have no answer for this long, the driver searches for a member that answers. While
	// callers wait, the driver sends a read to the member in use at this interval.
	liveness = time.Second

	// A search asks the member in use this much earlier than the other members. Otherwise another
	// member would replace a member that is only slow, and the calls in flight would fail.
	headStart = time.Second

	// The first search of a driver compares the clusters of the members that answer within this time
	// after the first one.
	comparison = 200 * time.Millisecond

	searchTime = 3 * time.Second        // bounds one search for a member
	signInTime = 10 * time.Second       // bounds one search if there is a user, because etcd checks passwords slowly
	minRest    = 100 * time.Millisecond // the pause after a search that found no member
	maxRest    = time.Second            // the longest pause, after several such searches

	maxBeats = 64 // how many keep-alives are under way at once
)

// cluster contains the endpoints of the etcd and the member in use. Each member has a client of its
// own, because one client for several members would also send calls to a member that hangs.
type cluster struct {
	conf  clientv3.Config // the settings of each client, without the endpoint
	certs certificates    // nil if conf has the certificates
	all   []string        // the endpoints of all members
	clock *clock
	beats slots           // has room for the keep-alives that may be under way
	ctx   context.Context // ends with the driver
	wg    sync.WaitGroup  // counts the driver's goroutines

	mu      sync.Mutex    // guards the fields below
	current *member       // the member in use; nil before the first search, and after a connection has failed
	search  chan struct{} // closed when the search that is under way ends; nil if no search is under way
	silent  time.Time     // the time of the first call after the last answer; zero if there is no such call
	failed  time.Time     // when the last search failed
	rest    time.Duration // the next search may begin at failed + rest
	err     error         // the error of the last search

	ids map[string]uint64 // the cluster that each endpoint has named in its last answer
}

// The function call sends one call to the etcd. If the member is silent, the function waits for the
// answer. If another member replaces the silent one meanwhile, the call fails, and its outcome is
// unknown. The function repeats a call only if etcd has certainly not carried the call out, because
// there was no connection, or etcd refused the auth token.
func call[T any](ctx context.Context, c *cluster, f func(m *member) (T, error)) (v T, err error) {
	for try := 0; ; try++ {
		m, err := c.member(ctx)
		if err != nil {
			return v, &noChange{err}
		}
		token := m.user.token.Load()
		searchTimer := c.asked()
		v, err = f(m)
		searchTimer.Stop()
		if err == nil && m.begun.Load() > 1 {
			err = errReconnected // the answer may come from another etcd
		}
		c.answered(m, err)
		if err == nil {
			return v, nil
		}

		notSent := isUnsent(err) || errors.As(err, new(*noChange))
		if try == 0 && m.user.refuses(err) {
			err = m.user.signIn(ctx, m, token)
			if err == nil {
				continue // try again with the new token
			}
			c.answered(m, err) // gives up m if etcd refuses the password now
			notSent = true     // etcd has refused the token, so it has not carried the call out
		}

		// Try once more, because another member may be in use by then.
		if try == 0 && notSent && ctx.Err() == nil {
			continue
		}
		err = explain(ctx, m.endpoint, err)
		if notSent {
			err = &noChange{err}
		}
		return v, err
	}
}

// beat sends a keep-alive, which begins the term of a lease anew. It waits for its turn first. An
// error is in the field err of the result.
func (c *cluster) beat(ctx context.Context, lease int64) (b beat) {
	if err := c.beats.take(ctx); err != nil {
		return beat{err: err}
	}
	defer c.beats.give()

	b, err := call(ctx, c, func(m *member) (beat, error) { return sendBeat(ctx, m, lease) })
	b.err = err
	return b
}

// The method member returns the member in use. It waits for a search that is under way. If no
// member is in use, it begins a search, but in the pause after a failed search, it returns that
// search's error.
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
		case c.search != nil: // wait for it, because the member in use may hang
		case c.current != nil:
			defer c.mu.Unlock()
			return c.current, nil
		case time.Since(c.failed) < c.rest: // the pause
			defer c.mu.Unlock()
			return nil, c.err
		}

		done := c.searchLocked()
		c.mu.Unlock()
		select {
		case <-done: // the next round finds the new member, or the pause after a failed search
		case <-ctx.Done():
		case <-c.ctx.Done():
		}
	}
}

// inUse returns the member in use, or nil.
func (c *cluster) inUse() *member {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.current
}

// The method asked records that a call is sent. If etcd has been silent for the duration liveness,
// a search begins now. Otherwise one begins after that duration, unless the caller stops the
// returned timer. A search does not replace a member that is only slow: see find.
func (c *cluster) asked() *time.Timer {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.noteSilenceLocked()
	if time.Since(c.silent) >= liveness {
		c.suspectLocked()
	}
	return time.AfterFunc(liveness, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.suspectLocked()
	})
}

// suspectLocked begins a search, unless the driver is closed or pauses after a failed search.
func (c *cluster) suspectLocked() {
	if c.ctx.Err() == nil && time.Since(c.failed) >= c.rest {
		c.searchLocked()
	}
}

// noteSilenceLocked records that etcd has not answered since now, unless it was silent already.
func (c *cluster) noteSilenceLocked() {
	if c.silent.IsZero() {
		c.silent = time.Now()
	}
}

// The method answered records the end of a call to m. If the call had an answer, etcd is no longer
// silent. The driver gives up m if m's connection has failed, if m has no leader, or if m refuses
// the password.
func (c *cluster) answered(m *member, err error) {
	// ErrTimeout also counts as unavailable, but it is the member's own answer. If that member were
	// given up, the calls of all other callers would fail.
	hasFailed := isUnavailable(err) && !is(err, rpctypes.ErrTimeout)
	if hasFailed || isRefused(err) {
		c.lose(m)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if m == c.current && isAnswer(err) {
		c.silent = time.Time{}
	}
}

// lose gives up m and closes it, if m is the member in use. After the end of c.ctx, the method
// close does that.
func (c *cluster) lose(m *member) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m == c.current && c.ctx.Err() == nil {
		c.current = nil
		c.noteSilenceLocked()
		c.wg.Go(m.close)
	}
}

// silence returns the time at which etcd stopped answering, and the error of the last search. The
// time is zero if etcd answers, and the error is nil if the search found a member.
func (c *cluster) silence() (time.Time, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.silent, c.err
}

// searchLocked begins a search, unless one is under way. The returned channel is closed when the
// search has ended, and its result is in the fields of c.
func (c *cluster) searchLocked() <-chan struct{} {
	if c.search != nil {
		return c.search
	}
	old := c.current
	done := make(chan struct{})
	c.search = done
	c.noteSilenceLocked()
	c.wg.Go(func() {
		m, err := c.find(old)
		c.mu.Lock()
		defer c.mu.Unlock()
		defer close(done)
		c.search = nil
		c.err = err
		if err != nil {
			c.failed = time.Now()
			c.rest = min(max(2*c.rest, minRest), maxRest)
			return // the member old, if any, stays in use
		}

		c.rest = 0
		c.silent = time.Time{}
		if m == old {
			return // c.current is old, or nil if lose has given up old during the search
		}

		// The connection of m may have ended already. Then lose did nothing, because m was not in
		// use yet, so close m here.
		if m.over.Load() {
			c.wg.Go(m.close)
			return
		}
		if c.current != nil {
			c.wg.Go(c.current.close) // the calls that this member has not answered fail
		}
		c.current = m
	})

	return done
}

// find returns the member old if it answers, or else the first new member that answers. If none
// answers in time, it returns the error that says most.
func (c *cluster) find(old *member) (*member, error) {
	ctx, cancel := context.WithTimeout(c.ctx, c.conf.DialTimeout)
	defer cancel()
	c.mu.Lock()
	isFirst := len(c.ids) == 0 // no member has answered yet
	c.mu.Unlock()

	if old != nil {
		within, cancel := context.WithTimeout(ctx, headStart)
		defer cancel()
		if old.probe(within) == nil {
			return old, nil
		}
	}

	// Connect to every endpoint, including that of the member old, because a connection may be dead
	// although its member lives.
	found := make(chan *member) // has no room, so that a member is either returned or closed
	failed := make(chan error, len(c.all))
	for _, endpoint := range c.all {
		c.wg.Go(func() {
			m, err := c.connect(endpoint)
			if err == nil {
				err = m.probe(ctx)
			}
			if err == nil {
				select {
				case found <- m:
					return
				case <-ctx.Done():
					err = ctx.Err() // another member was faster, or the time has passed
				}
			}

			if m != nil {
				m.close()
			}
			// Pass c.ctx, because the end of ctx is reported as a member that did not answer.
			failed <- explain(c.ctx, endpoint, err)
		})
	}

	var first *member
	var cause error // the first error, but rather one that is not a timeout, because it says more
	for range c.all {
		select {
		case m := <-found:
			switch {
			case first != nil:
				m.close() // the method intercept has compared its cluster
				continue
			case isFirst:
				time.AfterFunc(comparison, cancel) // wait for the clusters of the other members
			default:
				cancel()
			}
			first = m
		case err := <-failed:
			if cause == nil || errors.Is(cause, os.ErrDeadlineExceeded) {
				cause = err
			}
		case <-ctx.Done():
			cause = cmp.Or(cause, explain(c.ctx, c.all[0], ctx.Err()))
		}
	}

	if first != nil {
		cause = nil
	}
	return first, cause
}

// The method close waits for the goroutines, and ends the connection. The caller has ended c.ctx.
func (c *cluster) close() {
	c.mu.Lock()
	c.mu.Unlock() //lint:ignore SA2001 whoever locks mu later sees that c.ctx has ended
	c.wg.Wait()
	if m := c.inUse(); m != nil {
		m.close()
	}
}

// spawn starts a goroutine that the driver's Close waits for, unless Close has begun.
func (c *cluster) spawn(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() == nil {
		c.wg.Go(f)
	}
}

// member is one connection to one member of the etcd. The driver uses one member at a time. It
// gives up a member if the connection ends, if the member has no leader, or if the member is
// silent while another one answers.
//
// The client would connect again by itself. But the address may lead to another etcd by then, as
// after a restore from a backup. So with the connection, its watches end as well, and each waiter
// reads its place again.
type member struct {
	endpoint string
	client   *clientv3.Client
	leases   pb.LeaseClient // can choose the numbers of leases, unlike the methods of the field client
	cluster  *cluster
	user     user
	watcher  watcher
	begun    atomic.Int32 // how many connections the client has made
	over     atomic.Bool  // the connection has ended, or another one has begun
}

// connect returns a new member. If c.conf has a user, connect waits until etcd has accepted the
// password. Otherwise it does not wait for a connection, so the member may not exist.
func (c *cluster) connect(endpoint string) (*member, error) {
	conf := c.conf // a copy, which is changed below
	if c.certs != nil {
		config, err := c.certs()
		if err != nil {
			return nil, err
		}
		conf.TLS = config
	}

	conf.Endpoints = []string{endpoint}
	m := &member{endpoint: endpoint, cluster: c}
	m.watcher.m = m
	// Clip makes append copy the slice, which is shared with concurrent calls of connect.
	conf.DialOptions = append(slices.Clip(conf.DialOptions), grpc.WithStatsHandler(m),
		grpc.WithChainUnaryInterceptor(m.intercept))
	if conf.Username != "" {
		// Give the password to m.user and not to the etcd client, which would sign in by itself.
		m.user.name = conf.Username
		m.user.password = conf.Password
		conf.Username = ""
		conf.Password = ""
		conf.DialOptions = append(conf.DialOptions, grpc.WithPerRPCCredentials(&m.user))
	}

	client, err := clientv3.New(conf)
	if err != nil {
		return nil, err
	}
	m.client = client
	m.leases = pb.NewLeaseClient(client.ActiveConnection())
	if m.user.name != "" {
		if err := m.user.signIn(c.ctx, m, nil); err != nil {
			m.close()
			return nil, err
		}
	}

	return m, nil
}

// intercept makes each call that is no stream. The call fails at once if there is no connection. By
// default, the etcd client lets a call wait for a connection. If the call times out in that wait,
// its error does not say that the call was not sent.
//
// The call also fails if the last answer of another endpoint came from another cluster. No grant
// and no renewal counts without such a call. After a restore under a new ID, the driver goes on when
// all endpoints that have ever answered have named the new ID.
func (m *member) intercept(
	ctx context.Context, method string, req, reply any,
	conn *grpc.ClientConn, call grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	err := call(ctx, method, req, reply, conn, append(opts, grpc.WaitForReady(false))...)
	r, ok := reply.(interface{ GetHeader() *pb.ResponseHeader })
	if err != nil || !ok || r.GetHeader().GetClusterId() == 0 {
		return err
	}

	c := m.cluster
	id := r.GetHeader().ClusterId
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ids[m.endpoint] = id
	for other, otherID := range c.ids {
		if otherID != id {
			return status.Errorf(codes.Unavailable, "%s and %s belong to different etcd clusters: "+
				"name the members of one", shown(m.endpoint), shown(other))
		}
	}
	return nil
}

// HandleConn gives up the member when its connection ends. gRPC may connect again before it reports
// that end, so the begin of a second connection counts as an end, too. A call on the second
// connection fails: see the function call.
func (m *member) HandleConn(_ context.Context, event stats.ConnStats) {
	// The only event to ignore is the begin of the first connection.
	if _, ok := event.(*stats.ConnBegin); ok && m.begun.Add(1) == 1 {
		return
	}
	m.over.Store(true)
	m.cluster.lose(m)
}

// TagConn, TagRPC and HandleRPC do nothing. They make m a [stats.Handler].
func (m *member) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// TagRPC does nothing.
func (m *member) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC does nothing.
func (m *member) HandleRPC(context.Context, stats.RPCStats) {}

func (m *member) close() { m.client.Close() }

// probe sends a linearizable read, which needs a leader and a majority. A member that is cut off
// from the others may still answer other requests.
func (m *member) probe(ctx context.Context) error {
	_, err := m.client.Get(ctx, root)
	if isAnswer(err) && !isRefused(err) {
		return nil
	}
	return err
}
