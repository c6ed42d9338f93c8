//go:build unix

package rowlock_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/integrations/rowlock"
	"github.com/hasplock/hasp/internal/pgtest"
)

// dsn returns how to connect to a server. A query to a server that does not answer ends
// with its context.
func dsn(addr string) string {
	return "postgres://postgres@" + addr + "/postgres?sslmode=disable&connect_timeout=3"
}

func open(ctx context.Context, addr string) (backend.Driver, error) {
	return rowlock.Open(ctx, dsn(addr))
}

func TestConformance(t *testing.T) {
	var server *pgtest.Server
	conformance.Run(t, conformance.Harness{
		Store: func(ctx context.Context) (string, func(), error) {
			server = pgtest.Start(t)
			return server.Addr, func() {}, nil
		},
		Open: open,
		Link: func(_ context.Context, addr string) (*conformance.Link, error) {
			return conformance.TCP(addr)
		},
		Stop: func(context.Context, string) error { return server.Stop() },
		Start: func(_ context.Context, _ string, data bool) error {
			if !data {
				return errors.ErrUnsupported
			}
			return server.Start()
		},
		Kick: func(ctx context.Context, addr string) error {
			return run(ctx, addr, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
				WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'`)
		},
	})
}

// run runs a statement on a connection of its own.
func run(ctx context.Context, addr, statement string) error {
	db, err := sql.Open("pgx", dsn(addr))
	if err != nil {
		return err
	}
	defer db.Close()
	_, err = db.ExecContext(ctx, statement)
	return err
}

// A program opens the driver by its URL.
func TestURL(t *testing.T) {
	url := "rowlock+" + dsn(pgtest.Start(t).Addr)
	c, err := hasp.Open(t.Context(), url+"&ttl=10s", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	l, err := c.Lock(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Unlock(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := hasp.Open(t.Context(), url+"&turns=3", nil); !errors.Is(err, hasp.ErrInvalid) {
		t.Errorf("an unknown parameter: %v", err)
	}
}
