package pglock

import (
	"context"
	"errors"
	"net"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

var errNoCancel = errors.New("pglock: no requests to cancel statements")

// withoutCancels makes the connection of cfg send no cancel request while refuse returns true,
// because such a request may crash a PgBouncer before 1.19. pgx sends a cancel request, over a
// connection of its own, if the context of a statement ends. Without cancel requests, lock_timeout
// still bounds how long a statement waits for locks.
func withoutCancels(cfg *pgx.ConnConfig, refuse func() bool) {
	var established atomic.Bool
	dial := cfg.DialFunc
	cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if established.Load() && refuse() {
			return nil, errNoCancel // a dial after the connection exists is for a cancel request
		}
		return dial(ctx, network, addr)
	}

	cfg.Config.AfterConnect = func(context.Context, *pgconn.PgConn) error {
		established.Store(true)
		return nil
	}
}
