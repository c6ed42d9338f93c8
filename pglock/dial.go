package pglock

import (
	"context"
	"errors"
	"net"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// conn is a connection that is closed when a context ends.
type conn struct {
	net.Conn
	stop func() bool // ends the wait for the context
}

func (c *conn) Close() error {
	c.stop()
	return c.Conn.Close()
}

// NetConn returns the connection below, as a TLS connection does.
func (c *conn) NetConn() net.Conn { return c.Conn }

// closeWith makes connections of cfg that are closed when ctx ends. The library closes a connection
// whose server does not answer only after 15 s.
func closeWith(ctx context.Context, cfg *pgx.ConnConfig) {
	dial := cfg.DialFunc
	cfg.DialFunc = func(within context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(within, network, addr)
		if err != nil {
			return nil, err
		}
		return &conn{c, context.AfterFunc(ctx, func() { c.Close() })}, nil
	}
}

var errNoCancel = errors.New("pglock: no requests to cancel statements")

// withoutCancels makes connections of cfg that send no cancel request while refuse returns
// true. pgx sends one if the context of a statement ends, and a PgBouncer before 1.19 may
// crash from it. lock_timeout still bounds how long the statement waits for locks.
func withoutCancels(cfg *pgx.ConnConfig, refuse func() bool) {
	var established atomic.Bool
	dial := cfg.DialFunc
	cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if established.Load() && refuse() {
			return nil, errNoCancel
		}
		return dial(ctx, network, addr)
	}
	cfg.Config.AfterConnect = func(context.Context, *pgconn.PgConn) error {
		established.Store(true)
		return nil
	}
}

// isQuiet reports whether an idle connection can be used. A server that ends a connection
// says why, so there is something to read. The check takes no round trip.
func isQuiet(c net.Conn) bool {
	if w, ok := c.(interface{ NetConn() net.Conn }); ok {
		return isQuiet(w.NetConn())
	}
	return nothingToRead(c)
}
