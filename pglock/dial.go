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

// withoutCancels makes cfg's connections send no cancel request while refuse returns true, because
// such a request may crash a PgBouncer before 1.19. pgx sends a cancel request if the context of a
// statement ends. In either case, lock_timeout bounds how long the statement waits for locks.
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
