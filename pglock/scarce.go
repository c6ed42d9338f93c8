package pglock

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Bounds of the pause between two requests for a connection that the server may not grant.
const (
	firstProbe = 100 * time.Millisecond
	lastProbe  = 2 * time.Second
	nextLook   = 5 * time.Millisecond // for a connection that another statement has given back
)

// scarce bounds how often a driver asks for connections that the server does not grant. After a
// refusal, statements use the connections that there are. After each pause, one asks for another. If
// the caller passed the pool, each statement asks again after the shortest pause.
type scarce struct {
	mu      sync.Mutex    // guards all below
	refusal error         // the last one
	pause   time.Duration // after it; 0 if the server grants connections
	again   time.Time     // nobody asks before then
}

// early is the error of a connection that the server was not asked for, because of a refusal.
type early struct{ error }

func (e *early) Unwrap() error { return e.error }

// ask returns an error during a pause. After it, the caller asks, and the next one after a longer
// pause.
func (s *scarce) ask() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if now.Before(s.again) {
		return &early{s.refusal}
	}
	if s.pause > 0 {
		s.pause = min(2*s.pause, lastProbe)
		s.again = now.Add(s.pause)
	}
	return nil
}

// note takes in the answer of the server: a refusal, or nil. Several statements may have asked
// before the first refusal.
func (s *scarce) note(refusal error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refusal = refusal
	if refusal == nil {
		s.pause, s.again = 0, time.Time{}
	} else if s.pause == 0 {
		s.pause, s.again = firstProbe, time.Now().Add(firstProbe)
	}
}

// acquire returns a connection of the pool. It closes those that are in doubt. The caller calls
// release.
func (d *Driver) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	for {
		c, err := d.pool.Acquire(ctx)
		switch {
		case err == nil && !d.silence.doubts(c.Conn()):
			return c, nil
		case err == nil:
			hangUp(c.Conn())
			release(c)
			continue
		case code(err) != tooManyConnections:
			return nil, oneLine(err)
		}

		if !errors.As(err, new(*early)) {
			d.scarce.note(oneLine(err))
		}
		if s := d.pool.Stat(); s.TotalConns() == s.ConstructingConns() {
			return nil, oneLine(err)
		}
		// There are other connections. One of them will be idle when a statement has ended.
		wait := nextLook
		if !d.own {
			wait = firstProbe
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// release gives a connection back to the pool, which forgets it if it is closed.
func release(c *pgxpool.Conn) {
	if c.Conn().IsClosed() {
		// The call has failed. The library still asks the server to cancel the statement, which
		// may take long. Without Hijack that would keep a place in the pool.
		c.Hijack()
	} else {
		c.Release()
	}
}
