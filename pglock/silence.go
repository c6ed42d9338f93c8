package pglock

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// minSilence is how long a statement must have had no answer to put other connections in
// doubt. A caller with little time says nothing about the network.
const minSilence = 50 * time.Millisecond

// silence notes when the server has answered. If a firewall has forgotten the connections of a
// pool, all of them look sound. So when a statement gets no answer, all connections without an
// answer since it was sent are in doubt. They are closed instead of used: the calls that are
// under way may lose their time, and no later one does.
//
// All times are since began, by the monotonic clock.
type silence struct {
	began time.Time
	last  atomic.Int64 // the last answer on any connection
	doubt atomic.Int64 // connections without an answer since then are in doubt
}

func (s *silence) now() int64 { return int64(time.Since(s.began)) }

// lastAnswer is where a connection keeps the time of its last answer. Only the goroutine that
// has acquired the connection uses it. A connection is taken for answered when it is first
// seen: at once if it is the driver's own.
func (s *silence) lastAnswer(c *pgx.Conn) *int64 {
	const name = "hasp: last answer"
	data := c.PgConn().CustomData()
	at, ok := data[name].(*int64)
	if !ok {
		at = new(s.now())
		data[name] = at
	}
	return at
}

// doubts reports whether c is in doubt.
func (s *silence) doubts(c *pgx.Conn) bool { return *s.lastAnswer(c) < s.doubt.Load() }

// note notes the outcome of a statement that was sent on c at a time.
func (s *silence) note(ctx context.Context, c *pgx.Conn, sent int64, err error) {
	now := s.now()
	switch {
	case err == nil, errors.Is(err, errNoRow), code(err) != "":
		*s.lastAnswer(c) = now
		s.last.Store(now)
	case ctx.Err() != nil && now-sent >= int64(minSilence):
		// Statements end in any order. The latest one counts.
		for old := s.doubt.Load(); old < sent && !s.doubt.CompareAndSwap(old, sent); old = s.doubt.Load() {
		}
	}
}

// lately reports whether a statement has had no answer within the last minute.
func (s *silence) lately() bool {
	doubt := s.doubt.Load()
	return doubt > 0 && s.now()-doubt < int64(time.Minute)
}
