//go:build unix

package pglock_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/pgtest"
	"github.com/hasplock/hasp/pglock"
)

// urlOf returns the URL of a database at host:port/database. Params begin with &.
func urlOf(where string, params ...string) string {
	return "pglock+postgres://postgres@" + where + "?sslmode=disable" + strings.Join(params, "")
}

// open opens a driver with eight connections. On a busy machine a first connection may take longer
// than Open has, so it tries again.
func open(ctx context.Context, addr string) (d backend.Driver, err error) {
	c, err := hasp.ParseURL(urlOf(addr+"/postgres", "&pool_size=8"))
	if err != nil {
		return nil, err
	}
	for range 5 {
		if d, err = c.Driver(ctx); err == nil {
			break
		}
	}
	return d, err
}

// harness runs the suite on a server of its own, with these settings.
func harness(settings ...string) (h conformance.Harness, server func() *pgtest.Server) {
	var s *pgtest.Server
	return conformance.Harness{
		Store: func(ctx context.Context) (string, func(), error) {
			var err error
			if s, err = pgtest.New(settings...); err != nil {
				return "", nil, err
			}
			return s.Addr, s.Remove, s.Exec(ctx, "SELECT 1") // the first connection takes long
		},
		Open: open,
		Link: func(_ context.Context, store string) (*conformance.Link, error) { return conformance.TCP(store) },
		// A crash may lose the last releases, whose holds then end with their terms. TestKilled has that.
		Stop: func(context.Context, string) error { return s.Stop() },
		Start: func(_ context.Context, _ string, data bool) error {
			if !data {
				if err := s.Empty(); err != nil {
					return err
				}
			}
			return s.Start()
		},
		Kick:     func(ctx context.Context, _ string) error { return s.Kick(ctx) },
		Commands: func(_ context.Context, store string) (int64, error) { return pglock.Statements(store).Load(), nil },
		Cost:     conformance.Cost{Renew: 0.1, Waiting: 4},
		Entries: func(ctx context.Context, _ string) ([]string, error) {
			return s.Rows(ctx, `SELECT encode(key, 'escape') || ' ' || concat_ws(' ', token, readers, expires) FROM hasp_locks
				WHERE length(key) > 0 AND expires IS NOT NULL OR EXISTS (SELECT FROM unnest(ends) u WHERE u > clock_timestamp())`)
		},
		Sweep: func(ctx context.Context, store string) error {
			d, err := open(ctx, store)
			if err != nil {
				return err
			}
			defer d.Close()
			return d.(*pglock.Driver).Sweep(ctx, 0)
		},
	}, func() *pgtest.Server { return s }
}

func TestConformance(t *testing.T) {
	t.Parallel()
	if !conformance.Child() {
		pgtest.Need(t)
	}
	h, _ := harness()
	conformance.Run(t, h)
}

// The suite passes through a PgBouncer in transaction mode, which keeps no session of ours. It also
// passes whatever the server's format for the text of values is.
func TestConformanceBouncer(t *testing.T) {
	t.Parallel()
	if !conformance.Child() {
		pgtest.Need(t, "pgbouncer")
	}
	h, server := harness("bytea_output=escape", "datestyle=German", "intervalstyle=sql_standard", "timezone=Asia/Kolkata")
	startServer := h.Store
	h.Store = func(ctx context.Context) (string, func(), error) {
		_, stopServer, err := startServer(ctx)
		if err != nil {
			return "", nil, err
		}
		b, err := server().NewBouncer()
		if err != nil {
			stopServer()
			return "", nil, err
		}
		return b.Addr, func() { b.Remove(); stopServer() }, nil
	}
	// PgBouncer has its own errors and times during a restart, and it would end the server's
	// connections on its own time after a Kick. TestBouncer has a restart behind it.
	h.Stop, h.Start, h.Kick = nil, nil, nil
	h.Cost.Waiting = 40 // callers poll
	const deaf = "LISTEN does not work through a PgBouncer"
	h.Cannot = map[string]string{"wake-change": deaf, "wake-shared": deaf, "wake-missed": deaf}
	conformance.Run(t, h)
}

// A driver behind a PgBouncer listens to nothing and leaves nothing in the server's sessions.
func TestBouncer(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t)
	b := s.Bouncer(t)
	ctx := t.Context()
	d := newDriver(t, b.Where())
	c := overDriver(t, d, patient)
	direct := client(t, s.Where())

	held := await.Value(direct.Lock(ctx, "key"))
	got := locks(ctx, c, "key")
	time.Sleep(300 * time.Millisecond)
	if !d.Polls() || d.Listens() {
		t.Errorf("behind a PgBouncer: polls %v, listens %v", d.Polls(), d.Listens())
	}
	must(t, held.Unlock(ctx))
	must(t, <-got)

	// The sessions of the server are as PgBouncer made them.
	left := await.Value(s.Rows(ctx, `SELECT l.mode FROM pg_locks l WHERE l.locktype = 'advisory'`))
	prepared := await.Value(b.Rows(ctx, `SELECT name FROM pg_prepared_statements UNION ALL SELECT * FROM pg_listening_channels()
		UNION ALL SELECT name FROM pg_settings WHERE source = 'session' AND name IN ('default_transaction_isolation', 'lock_timeout', 'synchronous_commit')`))
	if len(left)+len(prepared) > 0 {
		t.Errorf("left in the sessions of the server: %q %q", left, prepared)
	}

	// It works again after the server behind it was restarted.
	must(t, s.Stop())
	must(t, s.Start())
	until(t, "Lock after a restart behind PgBouncer", func() bool {
		lease, err := c.Lock(ctx, "key")
		return err == nil && lease.Unlock(ctx) == nil
	})
}
