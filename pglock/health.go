package pglock

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// If a statement has had no answer for minSilence, other connections are in doubt. A shorter
	// wait says nothing about the network.
	minSilence = 50 * time.Millisecond

	// maxDials is how many connections the callers of a Client may be making at a time. A server
	// that is slow to begin sessions would otherwise begin many whose callers have left meanwhile,
	// and serve none of them.
	maxDials = 2

	// After a failure no connection is made for a pause, which grows as failures follow each other.
	firstPause = 50 * time.Millisecond
	maxPause   = time.Second

	look = 5 * time.Millisecond // between looks for a connection that was made or given back
)

// health records which connections may be dead, and when another one may be made.
//
// A firewall may have forgotten all connections of a pool, which still look sound. So when a
// statement gets no answer, all connections without an answer since that statement was sent are in
// doubt. They are closed before use, so that only calls that are already under way may time out.
type health struct {
	mu       sync.Mutex // guards all below
	answered time.Time  // the last answer on any connection
	doubt    time.Time  // connections without an answer since then are in doubt
	dialing  int        // callers that ask the pool for a connection while none is idle
	failed   time.Time  // when a connection last could not be made, or did not answer
	refusal  error      // why the server refused it; nil if there was no answer
	resumes  time.Time  // no connection is made before
	pause    time.Duration
}

// session is what is known of a connection. Only the goroutine that has acquired the connection
// uses it.
type session struct{ began, answered time.Time }

// sessionOf returns the session of a connection. The first call counts as an answer: in the
// driver's own pool, it comes when the connection is made.
func sessionOf(c *pgx.Conn) *session {
	const name = "hasp: session"
	data := c.PgConn().CustomData()
	s, ok := data[name].(*session)
	if !ok {
		s = &session{time.Now(), time.Now()}
		data[name] = s
	}
	return s
}

// doubts reports whether c is in doubt.
func (h *health) doubts(c *pgx.Conn) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return sessionOf(c).answered.Before(h.doubt)
}

// note records the outcome of a statement that was sent on c at the time sent.
func (h *health) note(ctx context.Context, c *pgx.Conn, sent time.Time, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now, s := time.Now(), sessionOf(c)
	switch {
	case err == nil, errors.Is(err, errNoRow), code(err) != "":
		s.answered, h.answered = now, now
		if s.began.After(h.failed) {
			h.pause = 0 // a connection that was made after the last failure works
		}
	case ctx.Err() != nil && now.Sub(sent) >= minSilence:
		if sent.After(h.doubt) { // statements end in any order
			h.doubt = sent
		}
		h.failLocked(nil)
	}
}

// failLocked begins a pause. A failure during a pause is of something that was begun before it.
func (h *health) failLocked(refusal error) {
	now := time.Now()
	if now.Before(h.resumes) {
		return
	}
	h.pause = min(max(2*h.pause, firstPause), maxPause)
	h.refusal, h.failed, h.resumes = refusal, now, now.Add(h.pause/2+rand.N(h.pause))
}

// mayAsk reports whether a caller may ask the pool for a connection now, and whether the pool may
// have to make one for it. Then the caller must call made. Otherwise the caller must wait, unless
// err is the server's last refusal, because there is no connection to wait for.
func (h *health) mayAsk(s *pgxpool.Stat) (ask, dials bool, err error) {
	if s.IdleConns() > 0 || s.TotalConns() == s.MaxConns() {
		return true, false, nil // the pool makes no connection, unless another caller is faster
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case time.Now().Before(h.resumes):
		if s.TotalConns() == 0 {
			err = h.refusal
		}
	case max(h.dialing, int(s.ConstructingConns())) < maxDials:
		h.dialing++
		return true, true, nil
	}
	return false, false, err
}

// made records the outcome of a call of the pool that was begun at a time. If the caller has left,
// the pool goes on, and another caller receives the connection.
func (h *health) made(ctx context.Context, began time.Time, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.dialing--
	switch {
	case err == nil, ctx.Err() != nil && time.Since(began) < minSilence:
	case ctx.Err() != nil, pgconn.Timeout(err):
		h.failLocked(nil)
	default:
		h.failLocked(oneLine(err))
	}
}

// lastAnswer returns when the server last answered.
func (h *health) lastAnswer() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.answered
}

// lately reports whether a statement has had no answer within the last minute.
func (h *health) lately() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return !h.doubt.IsZero() && time.Since(h.doubt) < time.Minute
}

// acquire returns a connection of the pool that is not in doubt. The caller must call release.
func (d *driver) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	for {
		ask, dials, err := d.health.mayAsk(d.pool.Stat())
		if err != nil {
			return nil, err
		}
		if !ask {
			select {
			case <-time.After(look):
				continue
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}

		began := time.Now()
		c, err := d.pool.Acquire(ctx)
		if dials {
			d.health.made(ctx, began, err)
		}
		switch {
		case err == nil && !d.health.doubts(c.Conn()):
			return c, nil
		case err == nil:
			hangUp(c.Conn())
			release(c)
		case code(err) != tooManyConnections:
			return nil, oneLine(err)
		}
		// After tooManyConnections, wait for one of the pool's connections, which is idle when its
		// statement has ended.
	}
}

// release gives a connection back to the pool, or removes it from the pool if it is closed.
func release(c *pgxpool.Conn) {
	if c.Conn().IsClosed() {
		// Take the connection out of the pool now. Otherwise it would take up a place while the
		// library asks the server to cancel the statement, which may take long.
		c.Hijack()
	} else {
		c.Release()
	}
}
