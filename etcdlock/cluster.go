package etcdlock

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc"
)

const (
	// liveness is how long a member may be silent before the driver asks whether it lives,
	// and how often the member is asked while callers wait.
	liveness = time.Second

	// headStart is how much earlier a silent member is asked than the others, and how much
	// later it may answer. A store that is only slow would otherwise lose its calls.
	headStart = 500 * time.Millisecond

	stuckTime  = 2 * time.Second        // for a stream without answers, if the member gives others
	searchTime = 3 * time.Second        // for one search for a member
	searchRest = 100 * time.Millisecond // after a search that found none
	lookEvery  = 200 * time.Millisecond
	drainTime  = 30 * time.Second // for calls of a connection that was replaced
)

// cluster is the etcd: a list of endpoints, and the member that is in use.
type cluster struct {
	dial      func(endpoint string) (*grpc.ClientConn, error)
	endpoints []string
	clock     *clock
	auth      *auth           // nil without a user, or if a client was handed in
	ctx       context.Context // ends with the driver
	wg        *sync.WaitGroup // of the driver's goroutines

	mu       sync.Mutex // guards all below
	current  *member    // nil before the first search, and after a connection has failed
	search   *search    // that is under way, or nil
	waiters  int        // callers that wait for an event
	watching bool       // the goroutine of watchOver runs
	down     time.Time  // since when there is no member, or zero
	failed   time.Time  // when the last search failed
	err      error      // of the last search
}

// search is an attempt to find a member that answers.
type search struct {
	done chan struct{} // closed when err is set
	err  error
}

// call makes one call to the etcd. On a silent member it waits until the member answers. If another
// member replaces that one, the call fails, and its outcome is unknown. The call is repeated only
// if etcd has certainly not carried it out: it found no connection, or its token was refused.
func call[T any](ctx context.Context, c *cluster, f func(m *member) (T, error)) (v T, err error) {
	for try := 0; ; try++ {
		m, err := c.member(ctx)
		if err != nil {
			return v, err
		}

		token := c.auth.current()
		v, err = asking(m, f)
		if c.auth != nil && isStale(err) {
			if err = c.auth.renew(ctx, m, token); err == nil {
				v, err = asking(m, f)
			}
		}
		if err == nil {
			return v, nil
		}
		if isUnavailable(err) {
			c.leave(m)
			if try == 0 && isUnsent(err) {
				continue
			}
		}
		return v, explain(ctx, m.endpoint, err)
	}
}

func asking[T any](m *member, f func(m *member) (T, error)) (T, error) {
	m.asked()
	v, err := f(m)
	m.done(isAnswer(err))
	return v, err
}

// member returns the member in use.
func (c *cluster) member(ctx context.Context) (*member, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		c.mu.Lock()
		if c.ctx.Err() != nil {
			c.mu.Unlock()
			return nil, errClosed
		}
		if c.current != nil && c.search == nil {
			defer c.mu.Unlock()
			return c.current, nil
		}
		if c.search == nil && time.Since(c.failed) < searchRest {
			defer c.mu.Unlock()
			return nil, c.err
		}
		s := c.searchLocked(nil)
		c.mu.Unlock()

		select {
		case <-s.done:
			if s.err != nil {
				return nil, s.err
			}
		case <-ctx.Done():
		case <-c.ctx.Done():
		}
	}
}

// renewToken replaces a token with which a stream was refused.
func (c *cluster) renewToken(ctx context.Context, m *member, old string) error {
	if c.auth == nil {
		return errNoUser
	}
	ctx, cancel := context.WithTimeout(ctx, searchTime)
	defer cancel()
	return c.auth.renew(ctx, m, old)
}

// leave gives up a member whose connection has failed, or that has no leader.
func (c *cluster) leave(m *member) {
	c.mu.Lock()
	left := c.leaveLocked(m)
	c.mu.Unlock()
	if left {
		m.close()
	}
}

// leaveLocked returns whether the caller must close m.
func (c *cluster) leaveLocked(m *member) bool {
	if c.current != m {
		return false
	}
	m.left = true
	c.current, c.down = nil, time.Now()
	return true
}

// silence returns since when the etcd does not answer, or zero.
func (c *cluster) silence() time.Time {
	c.mu.Lock()
	m, down := c.current, c.down
	c.mu.Unlock()
	if m == nil {
		return down
	}
	silent, _, _ := m.state()
	return silent
}

// lastErr returns the reason of the last search that failed.
func (c *cluster) lastErr() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// wait counts a caller that waits for an event. While there are any, the member is asked
// each second whether it lives: the watches of a member that hangs report nothing.
func (c *cluster) wait() (stop func()) {
	c.mu.Lock()
	c.waiters++
	c.mu.Unlock()
	c.watchOver()
	return func() {
		c.mu.Lock()
		c.waiters--
		c.mu.Unlock()
	}
}

// watchOver starts a goroutine that looks after the member, unless one runs. It ends when
// no caller waits and no call is under way.
func (c *cluster) watchOver() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.watching || c.ctx.Err() != nil {
		return
	}
	c.watching = true
	c.wg.Go(func() {
		t := time.NewTicker(lookEvery)
		defer t.Stop()
		for {
			select {
			case <-t.C:
			case <-c.ctx.Done():
			}
			c.unstick()
			if !c.look() {
				return
			}
		}
	})
}

// unstick ends the streams of the member in use that are stuck. The caller does not hold mu.
func (c *cluster) unstick() {
	c.mu.Lock()
	m := c.current
	c.mu.Unlock()
	if m == nil {
		return
	}
	for i := range m.beats {
		m.beats[i].unstick()
	}
	m.watches.unstick()
}

// look begins a search if the member is silent. It reports whether there is something left
// to look after.
func (c *cluster) look() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.current
	var silent, heard time.Time
	busy := false
	if m != nil {
		silent, heard, busy = m.state()
	}

	switch {
	// A member that fails each call at once is never busy here. If no call has had an answer,
	// there is one search after the last of them.
	case c.ctx.Err() != nil, c.waiters == 0 && c.search == nil && !busy && !m.unanswered(c.failed):
		c.watching = false
		return false
	case m == nil:
		if c.waiters > 0 && time.Since(c.failed) >= searchRest {
			c.searchLocked(nil)
		}
	case !silent.IsZero() && time.Since(silent) >= liveness:
		c.searchLocked(m)
	case silent.IsZero() && c.waiters > 0 && time.Since(heard) >= liveness:
		c.wg.Go(func() {
			ctx, cancel := context.WithTimeout(m.ctx, searchTime)
			defer cancel()
			_ = m.probe(ctx)
		})
	}
	return true
}

// searchLocked begins a search, unless one is under way. Old is a silent member that may
// still answer, or nil.
func (c *cluster) searchLocked(old *member) *search {
	if c.search != nil {
		return c.search
	}
	s := &search{done: make(chan struct{})}
	c.search = s
	c.wg.Go(func() {
		m, err := c.find(old)
		c.mu.Lock()
		if m != nil && m.left {
			// The connection of old has failed since it answered, and is closed.
			c.mu.Unlock()
			m, err = c.find(nil)
			c.mu.Lock()
		}
		c.search = nil
		given := c.current // nil, or old, or nil because old failed meanwhile
		switch {
		case m != nil && c.ctx.Err() != nil:
			defer m.close() // Close has begun, and will not find it
		case m != nil:
			c.current, c.down, c.err = m, time.Time{}, nil
		default:
			s.err, c.err, c.failed = err, err, time.Now()
			if given == nil && c.down.IsZero() {
				c.down = time.Now()
			}
		}
		c.mu.Unlock()
		close(s.done)
		switch {
		case given == nil || m == nil || given == m:
		case given.endpoint == m.endpoint:
			given.drain() // the member works, so the old connection may be just slow
		default:
			given.close()
		}
	})
	return s
}

// answer is the outcome of a probe.
type answer struct {
	m   *member
	err error
}

// find returns a member that answers: old, if it does, or the first of the others. If no
// member answers, old stays in use.
func (c *cluster) find(old *member) (*member, error) {
	ctx, cancel := context.WithTimeout(c.ctx, searchTime)
	defer cancel()
	answers := make(chan answer, len(c.endpoints)+1)
	open := 0
	ask := func(m *member) {
		open++
		c.wg.Go(func() { answers <- answer{m, m.probe(ctx)} })
	}

	if old != nil {
		ask(old)
		t := time.NewTimer(headStart)
		defer t.Stop()
		select {
		case a := <-answers:
			open--
			if a.err == nil {
				return old, nil
			}
			old = nil // it gives no answer any more
		case <-t.C:
		}
	}

	// Every endpoint gets a new connection, also that of old: a connection may be dead
	// although its member lives.
	var first error
	for _, i := range rand.Perm(len(c.endpoints)) {
		m, err := c.connect(c.endpoints[i])
		if err != nil {
			first = err
			continue
		}
		ask(m)
	}

	var best *member
	var late <-chan time.Time
	for open > 0 {
		select {
		case a := <-answers:
			open--
			switch {
			case a.m == old && a.err == nil:
				c.drop(open, answers, best)
				return old, nil
			case a.err == nil && best == nil:
				best = a.m
				if old == nil {
					c.drop(open, answers, nil)
					return best, nil
				}
				late = time.After(headStart)
			case a.m == old:
				// Its connection has failed. There is nothing to wait for.
				if old = nil; best != nil {
					c.drop(open, answers, nil)
					return best, nil
				}
			default:
				if first == nil || isContextEnd(first) {
					first = explain(c.ctx, a.m.endpoint, a.err)
				}
				a.m.close()
			}
		case <-late:
			c.drop(open, answers, nil)
			return best, nil
		}
	}
	if best != nil {
		return best, nil
	}
	return nil, first
}

// drop closes m, if it is not nil, and each member whose answer is still to come, except the member
// in use.
func (c *cluster) drop(open int, answers <-chan answer, m *member) {
	if m != nil {
		m.close()
	}
	c.mu.Lock()
	current := c.current
	c.mu.Unlock()
	c.wg.Go(func() {
		for range open {
			if a := <-answers; a.m != current {
				a.m.close()
			}
		}
	})
}

// close ends the connection. The cluster's context has ended.
func (c *cluster) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current != nil {
		c.current.close()
	}
}
