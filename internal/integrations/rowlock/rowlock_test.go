//go:build unix

package rowlock_test

import (
	"context"
	"errors"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	_ "github.com/hasplock/hasp/internal/integrations/rowlock"
	"github.com/hasplock/hasp/internal/pgtest"
)

// open opens the driver by its URL, as a program does. A query to a server that does not answer
// ends with its context.
func open(ctx context.Context, addr string) (backend.Driver, error) {
	cfg, err := hasp.ParseURL("rowlock+postgres://postgres@" + addr + "/postgres?sslmode=disable&connect_timeout=3")
	if err != nil {
		return nil, err
	}
	return cfg.Driver(ctx)
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
		Kick: func(ctx context.Context, _ string) error { return server.Kick(ctx) },
	})
}
