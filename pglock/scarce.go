package pglock

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Bounds of the pause between two requests for a connection that the server may not grant.
const (
	firstProbe = 100 * time.Millisecond
	lastProbe  = 2 * time.Second
)

// scarce bounds how often a driver asks for connections that the server does not grant. It has a
// slot for each connection that the pool may have. A statement takes a slot, and with it finds an
// idle connection or makes one. If the server refuses the connection, the slot is withheld. So
// statements wait for each other, and not for the server. After a pause a slot is given back, and
// one statement finds out whether the server grants connections again.
type scarce struct {
	d     *Driver
	slots chan struct{}

	mu       sync.Mutex    // guards all below
	withheld int           // slots
	refusal  error         // the last refusal
	all      chan struct{} // closed while all slots are withheld
	pause    time.Duration // until a slot is given back
	had      int32         // connections of the pool before the pause
}

// enter takes a slot. If all are withheld, it returns the last refusal at once.
func (s *scarce) enter(ctx context.Context) error {
	s.mu.Lock()
	all := s.all
	s.mu.Unlock()
	select {
	case s.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-all:
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.refusal
	}
}

// withhold keeps the slot of a caller whose connection the server has refused, and the slots that
// are free, but for as many as there are connections.
func (s *scarce) withhold(refusal error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refusal = refusal
	if s.withheld++; s.withheld == 1 {
		s.pause, s.had = firstProbe, s.d.connections()
		time.AfterFunc(s.pause, s.giveBack)
	}
	most := cap(s.slots) - int(s.d.connections())
	for free := true; free && s.withheld < most; {
		select {
		case s.slots <- struct{}{}:
			s.withheld++
		default:
			free = false
		}
	}
	if s.withheld == cap(s.slots) {
		close(s.all)
	}
}

// giveBack gives a slot back, and all if the server has granted a connection since the last time.
func (s *scarce) giveBack() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.withheld == cap(s.slots) {
		s.all = make(chan struct{})
	}
	back, had := 1, s.had
	if s.had = s.d.connections(); s.had > had {
		back = s.withheld
	}
	for range back {
		<-s.slots
		s.withheld--
	}
	if s.withheld > 0 && s.d.closing.Err() == nil {
		s.pause = min(2*s.pause, lastProbe)
		time.AfterFunc(s.pause, s.giveBack)
	}
}

// connections returns how many connections the pool has.
func (d *Driver) connections() int32 {
	s := d.pool.Stat()
	return s.TotalConns() - s.ConstructingConns()
}

// acquire returns a connection of the pool. It closes those that are in doubt. The caller calls
// release.
func (d *Driver) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	for {
		if err := d.scarce.enter(ctx); err != nil {
			return nil, err
		}
		c, err := d.pool.Acquire(ctx)
		switch {
		case err == nil && !d.silence.doubts(c.Conn()):
			return c, nil
		case err == nil:
			hangUp(c.Conn())
			d.release(c)
		case code(err) != tooManyConnections:
			<-d.scarce.slots
			return nil, oneLine(err)
		default:
			// If there are other connections, one of them will be idle when a statement has ended.
			d.scarce.withhold(oneLine(err))
		}
	}
}

// release gives a connection back to the pool, which forgets it if it is closed.
func (d *Driver) release(c *pgxpool.Conn) {
	if c.Conn().IsClosed() {
		// The call has failed. The library still asks the server to cancel the statement, which
		// may take long. Without Hijack that would keep a place in the pool.
		c.Hijack()
	} else {
		c.Release()
	}
	<-d.scarce.slots
}
