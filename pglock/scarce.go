package pglock

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Pauses of a driver whose server grants no further connection.
const (
	nextProbe = time.Second          // between two requests for a connection
	ownLook   = 5 * time.Millisecond // between looks for a connection that was given back
	otherLook = nextProbe / 10       // the same in a caller's pool, which asks the server each time
)

// scarce holds the server's last refusal of a connection. For a second after a refusal, statements
// use the connections of the pool, and none asks for another.
type scarce struct{ last atomic.Pointer[early] }

// early is the error of a statement that did not ask for a connection, because of a recent refusal.
type early struct {
	error
	until time.Time
}

func (e *early) Unwrap() error { return e.error }

// ask returns nil if a connection may be asked for, and otherwise the last refusal.
func (s *scarce) ask() error {
	if e := s.last.Load(); e != nil && time.Now().Before(e.until) {
		return e
	}
	return nil
}

// note records a refusal, unless it came from ask.
func (s *scarce) note(refusal error) {
	if !errors.As(refusal, new(*early)) {
		s.last.Store(&early{oneLine(refusal), time.Now().Add(nextProbe)})
	}
}

// acquire returns a connection of the pool that is not in doubt: see silence. The caller must call
// release.
func (d *driver) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	look := otherLook
	if d.own {
		look = ownLook
	}
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

		d.scarce.note(err)
		if s := d.pool.Stat(); s.TotalConns() == s.ConstructingConns() {
			return nil, oneLine(err)
		}
		// Wait for one of the pool's connections, which is idle when its statement has ended.
		select {
		case <-time.After(look):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
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
