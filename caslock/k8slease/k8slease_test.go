package k8slease_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/fakekube"
	"github.com/hasplock/hasp/caslock/k8slease"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
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
	return caslock.NewDriver(ctx, owned{s, transport})
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

// A holder that was suspended until client-go had taken the Lease leaves the leader its Lease.
func TestALateRenewalLeavesTheLeaderItsLease(t *testing.T) {
	s, ctx := &fakekube.Server{}, t.Context()
	await.Must(t, s.Start(true))
	defer s.Stop()
	d := await.Value(open(ctx, s.Addr))
	c := backend.Claim{Key: "controller", Token: "token", TTL: time.Minute, Timeout: time.Minute}
	await.Value(d.Acquire(ctx, c))
	url := "http://" + s.Addr + "/apis/coordination.k8s.io/v1/namespaces/default/leases/controller"
	spec := `{"holderIdentity":"leader","leaseDurationSeconds":15,"leaseTransitions":7,"renewTime":"2026-01-01T00:00:00.000000Z"}`
	r := await.Value(http.NewRequest(http.MethodPatch, url, strings.NewReader(`{"spec":`+spec+`}`)))
	await.Value(http.DefaultClient.Do(r)).Body.Close()

	d.Renew(ctx, []backend.Claim{c}, func(_ int, _ backend.Grant, err error) {
		if !errors.Is(err, backend.ErrLost) {
			t.Errorf("renewal of the hold that was there: %v", err)
		}
	})
	var got struct{ Spec json.RawMessage }
	reply := await.Value(http.Get(url))
	defer reply.Body.Close()
	if err := json.NewDecoder(reply.Body).Decode(&got); err != nil || string(got.Spec) != spec {
		t.Errorf("the spec of the leader has become %s: %v", got.Spec, err)
	}
	var held *backend.HeldError
	if _, err := d.Acquire(ctx, c); !errors.As(err, &held) || held.Owner != "leader" {
		t.Errorf("acquire beside the leader: %v", err)
	}
}

func TestANamespaceThatDoesNotExist(t *testing.T) {
	s := &fakekube.Server{}
	await.Must(t, s.Start(true))
	defer s.Stop()
	_, err := caslock.NewDriver(t.Context(), k8slease.New(http.DefaultClient, "http://"+s.Addr, "missing"))
	if err == nil || errors.Is(err, caslock.ErrConflict) || !strings.Contains(err.Error(), "404") {
		t.Errorf("%v, want the server's answer", err)
	}
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
