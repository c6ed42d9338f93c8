package pglock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// If a statement has no answer after minSilence, other connections are in doubt. A shorter wait
	// does not show that the network has failed.
	minSilence = 50 * time.Millisecond

	// maxDials is how many connections the callers of a Client make at once. A busy server begins
	// few sessions a second. If all Clients made many connections after an outage, nearly all of
	// the connections would time out before the server began their sessions.
	maxDials = 2

	// After the server has refused a connection, the driver asks for no other connection for about
	// refusedPause. If the server has no connection left, that pause is about scarcePause.
	refusedPause = 200 * time.Millisecond
	scarcePause  = time.Second

	// checkPoolEvery is how often a caller without a connection checks whether one was made or
	// given back.
	checkPoolEvery = 5 * time.Millisecond
)

// health records which connections may be dead, and when the next connection may be made.
//
// A firewall may forget all connections of a pool, although they still look sound. So if a
// statement gets no answer, all connections on which no answer has come since that statement was
// sent are in doubt. They are closed before their next use, so that only calls under way time out.
type health struct {
	mu       sync.Mutex // guards the fields below
	answered time.Time  // when the last answer came, on any connection
	doubt    time.Time  // connections whose last answer came before this time are in doubt
	taking   int        // how many callers ask the pool for an idle connection
	dialing  int        // how many callers may be making a connection
	refusal  error      // why the server last refused a connection
	resumes  time.Time  // when the pause after the refusal ends
}

// lastAnswer returns a pointer to the time of a connection's last answer. Only the goroutine that
// has acquired the connection uses the pointer. The first call for a connection sets the time to
// now: in the driver's own pool, when the connection is made, else when it is first acquired.
func lastAnswer(c *pgx.Conn) *time.Time {
	const name = "hasp: last answer"
	data := c.PgConn().CustomData()
	at, ok := data[name].(*time.Time)
	if !ok {
		at = new(time.Now())
		data[name] = at
	}
	return at
}

// doubts reports whether c is in doubt.
func (h *health) doubts(c *pgx.Conn) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return lastAnswer(c).Before(h.doubt)
}

// note records err, the outcome of a statement on c. The argument sent is the time of sending.
func (h *health) note(ctx context.Context, c *pgx.Conn, sent time.Time, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	hasAnswer := err == nil || code(err) != ""
	isSilent := ctx.Err() != nil && now.Sub(sent) >= minSilence
	switch {
	case hasAnswer:
		*lastAnswer(c) = now
		h.answered = now
	case isSilent && sent.After(h.doubt):
		h.doubt = sent // keep the latest time of sending, because statements end in any order
	}
}

// The method last returns the time of the last answer, and the value of the field doubt.
func (h *health) last() (answered, doubt time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.answered, h.doubt
}

// request is how a caller may ask the pool for a connection.
type request int

const (
	notNow    request = iota // the caller must not ask
	waits                    // all connections exist, so the caller waits for one of them
	takesIdle                // a connection is idle
	dials                    // the pool makes a connection
)

// mayAsk returns how a caller may ask the pool for a connection now. If the result is notNow, the
// caller must return err, or try again later if err is nil. Otherwise it must ask the pool, and
// then call h.asked.
//
// The pool makes a connection for each caller that finds none idle. The limits on new connections
// hold only if mayAsk lets no more callers ask for an idle connection than there are.
func (h *health) mayAsk(p *pgxpool.Pool) (r request, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := p.Stat()
	isPause := time.Now().Before(h.resumes)
	switch {
	case s.TotalConns() == s.MaxConns():
		return waits, nil
	case int(s.IdleConns()) > h.taking:
		h.taking++
		return takesIdle, nil
	case isPause && s.TotalConns() == 0:
		return notNow, h.refusal // no connection can become idle
	case isPause, h.dialing >= maxDials, s.ConstructingConns() >= maxDials:
		// If a caller has left, the pool goes on making its connection. Then dialing does not count
		// it any more, but ConstructingConns does.
		return notNow, nil
	}

	h.dialing++
	return dials, nil
}

// The method asked records the pool's answer to a request. If the server has refused a connection,
// a pause begins. A timeout is no refusal. An error after the end of ctx is none either, because
// the pool still tries to make the connection for another caller.
func (h *health) asked(ctx context.Context, r request, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch r {
	case takesIdle:
		h.taking--
	case dials:
		h.dialing--
	}
	if err == nil || ctx.Err() != nil || pgconn.Timeout(err) {
		return
	}

	pause := refusedPause
	if code(err) == tooManyConnections {
		pause = scarcePause
	}
	h.refusal = oneLine(err)
	h.resumes = time.Now().Add(pause/2 + rand.N(pause))
}

// connections is a pool with what is known of its connections.
type connections struct {
	*pgxpool.Pool
	health health
}

// acquire returns a connection that is not in doubt. The caller must then call release. If the
// server refuses a connection because it has none left, acquire waits until ctx ends for one that
// another caller gives back.
func (p *connections) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	for {
		r, err := p.health.mayAsk(p.Pool)
		var c *pgxpool.Conn
		if r != notNow {
			c, err = p.Acquire(ctx)
			p.health.asked(ctx, r, err)
		}
		// If r is notNow, err says that the pool has no connection that could be given back.
		isFull := r != notNow && code(err) == tooManyConnections
		switch {
		case c != nil && !p.health.doubts(c.Conn()):
			return c, nil
		case c != nil:
			hangUp(c.Conn())
			release(c)
			continue
		case ctx.Err() != nil:
			return nil, p.busy(ctx.Err())
		case err != nil && !isFull:
			return nil, oneLine(err)
		}

		// Wait for a connection that is being made or given back.
		select {
		case <-time.After(checkPoolEvery):
		case <-ctx.Done():
			return nil, p.busy(ctx.Err())
		}
	}
}

// busy returns the error of a wait for a connection that a context has ended with err. This is a
// busyError if all connections were in use until the deadline, else err.
func (p *connections) busy(err error) error {
	s := p.Stat()
	if errors.Is(err, context.DeadlineExceeded) && s.AcquiredConns() == s.MaxConns() {
		return &busyError{s.MaxConns()}
	}
	return err
}

// busyError says that all connections of a pool were in use.
type busyError struct{ size int32 }

func (e *busyError) Error() string {
	return fmt.Sprintf("no connection in time: all %d of the pool are in use: raise its size "+
		"(MaxConns, or pool_size in the URL), or lock outside transactions", e.size)
}

// release gives a connection back to the pool, or removes it from the pool if it is closed.
func release(c *pgxpool.Conn) {
	if c.Conn().IsClosed() {
		// Take the connection out of the pool now. Otherwise the connection would take up a place
		// while pgx asks the server to cancel the statement, and that may take long.
		c.Hijack()
	} else {
		c.Release()
	}
}
