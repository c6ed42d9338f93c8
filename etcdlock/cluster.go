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

	// headStart is how much earlier a silent member is asked than the others. A store that is
	// only slow would otherwise lose its calls.
	headStart = time.Second

	searchTime = 3 * time.Second        // for one search for a member
	minRest    = 100 * time.Millisecond // after a search that found none, or a refused password
	maxRest    = time.Second            // … when that happens again and again
	lookEvery  = 200 * time.Millisecond
)

// longer returns the rest after another failure.
func longer(rest time.Duration) time.Duration { return min(max(2*rest, minRest), maxRest) }

// cluster is the etcd: a list of endpoints, and the member that is in use.
type cluster struct {
	dial      func(endpoint string) (*grpc.ClientConn, error)
	endpoints []string
	check     func(context.Context, *member) // asks a member whether it lives
	clock     *clock
	auth      *auth           // nil without a user, or if a client was handed in
	beats     chan struct{}   // has room for the keep-alives that may be under way
	ctx       context.Context // ends with the driver
	wg        *sync.WaitGroup // of the driver's goroutines

	mu       sync.Mutex    // guards all below
	current  *member       // nil before the first search, and after a connection has failed
	search   *search       // that is under way, or nil
	waiters  int           // callers that wait for an event
	watching bool          // the goroutine of watchOver runs
	checked  time.Time     // when the member was last asked whether it lives
	down     time.Time     // since when there is no member, or zero
	failed   time.Time     // when the last search failed
	rest     time.Duration // from failed on, before the next one
	err      error         // of the last search
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
			return v, &unsent{err}
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
		// A member that says that a request timed out has answered. It may mean this call's own
		// deadline. To leave would close the connection under the calls of all others.
		if isUnavailable(err) && !timedOut(err) {
			c.leave(m)
			if try == 0 && isUnsent(err) {
				continue
			}
		}
		if isUnsent(err) {
			return v, &unsent{explain(ctx, m.endpoint, err)}
		}
		return v, explain(ctx, m.endpoint, err)
	}
}

// unsent is the error of a call that was not sent, so it has changed nothing.
type unsent struct{ err error }

func (u *unsent) Error() string { return u.err.Error() }
func (u *unsent) Unwrap() error { return u.err }

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
		if c.search == nil && time.Since(c.failed) < c.rest {
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

// leave gives up a member whose connection has failed, or that has no leader.
func (c *cluster) leave(m *member) {
	c.mu.Lock()
	used := c.current == m
	if used {
		m.left = true
		c.current, c.down = nil, time.Now()
	}
	c.mu.Unlock()
	if used {
		m.close()
	}
}

// silence returns since when the etcd does not answer, or zero, and the reason of the last search
// that failed.
func (c *cluster) silence() (time.Time, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current == nil {
		return c.down, c.err
	}
	silent, _ := c.current.state(c.failed)
	return silent, c.err
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
		for c.look() {
			select {
			case <-t.C:
			case <-c.ctx.Done():
			}
		}
	})
}

// look begins a search if the member is silent. It reports whether there is something left
// to look after.
func (c *cluster) look() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.current
	silent, busy := m.state(c.failed)
	switch {
	// A member that fails each call at once is never busy here. If no call has had an answer,
	// there is one search after the last of them.
	case c.ctx.Err() != nil, c.waiters == 0 && c.search == nil && !busy:
		c.watching = false
		return false
	case m == nil:
		if c.waiters > 0 && time.Since(c.failed) >= c.rest {
			c.searchLocked(nil)
		}
	case !silent.IsZero():
		if time.Since(silent) >= liveness && time.Since(c.failed) >= c.rest {
			c.searchLocked(m)
		}
	case c.waiters > 0 && time.Since(c.checked) >= liveness:
		c.checked = time.Now()
		c.wg.Go(func() {
			ctx, cancel := context.WithTimeout(m.ctx, searchTime)
			defer cancel()
			c.check(ctx, m)
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
		case m == nil:
			s.err, c.err = err, err
			c.failed, c.rest = time.Now(), longer(c.rest)
			if given == nil && c.down.IsZero() {
				c.down = time.Now()
			}
			given = nil // if no member answers, old stays in use
		case c.ctx.Err() != nil:
			given = m // Close has begun, and will not find it
		default:
			c.current, c.down, c.rest, c.err = m, time.Time{}, 0, nil
			if given == m {
				given = nil
			}
		}
		c.mu.Unlock()
		close(s.done)
		if given != nil {
			given.close()
		}
	})
	return s
}

// answer is the outcome of a question whether a member lives.
type answer struct {
	m   *member
	err error
}

// find returns a member that answers: old, if it does, or the first of the others.
func (c *cluster) find(old *member) (*member, error) {
	ctx, cancel := context.WithTimeout(c.ctx, searchTime)
	defer cancel()
	answers := make(chan answer, len(c.endpoints)+1)
	open := 0
	ask := func(m *member) {
		open++
		c.wg.Go(func() {
			if _, err := m.read(ctx, root); isAnswer(err) {
				answers <- answer{m, nil}
			} else {
				answers <- answer{m, err}
			}
		})
	}
	var first error
	take := func(a answer) bool {
		open--
		if a.err != nil && (first == nil || isContextEnd(first)) {
			first = explain(c.ctx, a.m.endpoint, a.err)
		}
		if a.err != nil && a.m != old {
			a.m.close()
		}
		return a.err == nil
	}

	if old != nil {
		ask(old)
		t := time.NewTimer(headStart)
		defer t.Stop()
		select {
		case a := <-answers:
			if take(a) {
				return old, nil
			}
		case <-t.C:
		}
	}

	// Every endpoint gets a new connection, also that of old: a connection may be dead
	// although its member lives.
	for _, i := range rand.Perm(len(c.endpoints)) {
		m, err := c.connect(c.endpoints[i])
		if err != nil {
			first = err
			continue
		}
		ask(m)
	}
	for open > 0 {
		a := <-answers
		if !take(a) {
			continue
		}
		late := open
		c.wg.Go(func() {
			for range late {
				if other := <-answers; other.m != old {
					other.m.close()
				}
			}
		})
		return a.m, nil
	}
	return nil, first
}

// close ends the connection. The cluster's context has ended.
func (c *cluster) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current != nil {
		c.current.close()
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
