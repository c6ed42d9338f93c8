package pglock

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// dialer makes the connections of a driver, and can close all of them. The library closes a
// connection whose server does not answer only after 15 s.
type dialer struct {
	dial pgconn.DialFunc

	mu     sync.Mutex // guards all below
	conns  map[net.Conn]bool
	closed bool
}

// newDialer returns a dialer that makes the connections of cfg.
func newDialer(cfg *pgx.ConnConfig) *dialer {
	dl := &dialer{dial: cfg.DialFunc, conns: map[net.Conn]bool{}}
	cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dl.dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		t := &tracked{Conn: c, dl: dl}
		dl.mu.Lock()
		defer dl.mu.Unlock()
		if dl.closed {
			c.Close()
			return nil, net.ErrClosed
		}
		dl.conns[t] = true
		return t, nil
	}
	return dl
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

// close closes all connections. No others are made from now on.
func (dl *dialer) close() {
	dl.mu.Lock()
	dl.closed = true
	conns := make([]net.Conn, 0, len(dl.conns))
	for c := range dl.conns {
		conns = append(conns, c)
	}
	dl.mu.Unlock()
	for _, c := range conns {
		c.Close()
	}
}

// tracked is a connection of a dialer.
type tracked struct {
	net.Conn
	dl *dialer
}

func (t *tracked) Close() error {
	t.dl.mu.Lock()
	delete(t.dl.conns, t)
	t.dl.mu.Unlock()
	return t.Conn.Close()
}

// isQuiet reports whether an idle connection can be used. A server that ends a connection
// says why, so there is something to read. The check takes no round trip.
func isQuiet(c net.Conn) bool {
	for {
		switch w := c.(type) {
		case *tracked:
			c = w.Conn
		case interface{ NetConn() net.Conn }: // TLS
			c = w.NetConn()
		default:
			return nothingToRead(c)
		}
	}
}
