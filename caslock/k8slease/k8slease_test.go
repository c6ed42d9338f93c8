package k8slease_test

import (
	"context"
	"net/http"
	"testing"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/fakekube"
	"github.com/hasplock/hasp/caslock/k8slease"
	"github.com/hasplock/hasp/conformance"
)

// owned is a store whose idle connections are closed with the driver.
type owned struct {
	*k8slease.Store
	transport *http.Transport
}

func (o owned) Close() error { o.transport.CloseIdleConnections(); return nil }

func open(ctx context.Context, addr string) (backend.Driver, error) {
	transport := &http.Transport{MaxIdleConnsPerHost: 32}
	s := k8slease.New(&http.Client{Transport: transport}, "http://"+addr, "default")
	return caslock.NewDriver(ctx, owned{s, transport}, nil)
}

// The API server is a fake. Package election has the test with client-go.
func TestConformance(t *testing.T) {
	t.Parallel()
	s := &fakekube.Server{}
	conformance.Run(t, conformance.Harness{
		Store: func(context.Context) (string, func(), error) {
			err := s.Start(true)
			return s.Addr, func() { s.Stop() }, err
		},
		Open:  open,
		Link:  func(_ context.Context, addr string) (*conformance.Link, error) { return conformance.TCP(addr) },
		Stop:  func(context.Context, string) error { return s.Stop() },
		Start: func(_ context.Context, _ string, data bool) error { return s.Start(data) },
		Kick: func(context.Context, string) error {
			if err := s.Stop(); err != nil {
				return err
			}
			return s.Start(true)
		},
	})
}

func ExampleNew() {
	var api *http.Client // rest.HTTPClientFor of client-go makes one
	store := k8slease.New(api, "https://10.0.0.1", "default")
	locks, err := caslock.New(context.Background(), store, nil)
	if err != nil {
		panic(err)
	}
	defer locks.Close()
}
