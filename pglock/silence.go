package pglock

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// If a statement has had no answer for minSilence, other connections are in doubt. A shorter wait
// says nothing about the network.
const minSilence = 50 * time.Millisecond

// silence records when the server has answered. A firewall may have forgotten all connections of a
// pool, which still look sound. So when a statement gets no answer, all connections without an
// answer since that statement was sent are in doubt. They are closed before use, so that only calls
// that are already under way may time out.
//
// All times are since began, by the monotonic clock.
type silence struct {
	began time.Time
	last  atomic.Int64 // the last answer on any connection
	doubt atomic.Int64 // connections without an answer since then are in doubt
}

func (s *silence) now() int64 { return int64(time.Since(s.began)) }

// lastAnswer returns where a connection keeps the time of its last answer. Only the goroutine that
// has acquired the connection uses it. The first call counts as an answer: in the driver's own
// pool, it comes when the connection is made.
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

// note records the outcome of a statement that was sent on c at the time sent.
func (s *silence) note(ctx context.Context, c *pgx.Conn, sent int64, err error) {
	now := s.now()
	switch {
	case err == nil, errors.Is(err, errNoRow), code(err) != "":
		*s.lastAnswer(c) = now
		s.last.Store(now)
	case ctx.Err() != nil && now-sent >= int64(minSilence):
		// Statements end in any order, so keep the latest time of sending.
		for old := s.doubt.Load(); old < sent && !s.doubt.CompareAndSwap(old, sent); old = s.doubt.Load() {
		}
	}
}

// lately reports whether a statement has had no answer within the last minute.
func (s *silence) lately() bool {
	doubt := s.doubt.Load()
	return doubt > 0 && s.now()-doubt < int64(time.Minute)
}
