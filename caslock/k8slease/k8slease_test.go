package k8slease_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/adaptertest"
	"github.com/hasplock/hasp/caslock/internal/fakekube"
	"github.com/hasplock/hasp/caslock/k8slease"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
)

// at returns a URL of the fake, which has no TLS.
func at(addr string) string { return "kube+http://" + addr + "/default" }

// The API server is a fake. Package election has the test with client-go.
func TestConformance(t *testing.T) {
	t.Parallel()
	s := &fakekube.Server{}
	h := adaptertest.Harness(at)
	h.Store = func(context.Context) (string, func(), error) {
		err := s.Start(true)
		return s.Addr, func() { s.Stop() }, err
	}
	h.Stop = func(context.Context, string) error { return s.Stop() }
	h.Start = func(_ context.Context, _ string, data bool) error { return s.Start(data) }
	h.Kick = func(context.Context, string) error {
		if err := s.Stop(); err != nil {
			return err
		}
		return s.Start(true)
	}
	conformance.Run(t, h)
}

// A holder that was suspended until client-go had taken the Lease leaves the leader its Lease.
func TestALateRenewalLeavesTheLeaderItsLease(t *testing.T) {
	s, ctx := &fakekube.Server{}, t.Context()
	await.Must(t, s.Start(true))
	defer s.Stop()
	d := await.Value(adaptertest.Driver(ctx, at(s.Addr)))
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

// versionOf returns the resourceVersion of the Lease of a key, as a number.
func versionOf(t *testing.T, s *k8slease.Store, key string) (n int) {
	t.Helper()
	e := await.Value(s.Get(t.Context(), key))
	_, text, _ := strings.Cut(e.Version, "/")
	n, err := strconv.Atoi(text)
	await.Must(t, err)
	return n
}

// The server loses its data, and its versions begin again. The new hold has the same
// resourceVersion as the lost one. The old holder's renewal and release leave the new hold alone.
func TestVersionsBeginAgain(t *testing.T) {
	s, ctx := &fakekube.Server{}, t.Context()
	await.Must(t, s.Start(true))
	defer func() { s.Stop() }()
	d := await.Value(adaptertest.Driver(ctx, at(s.Addr)))
	store := k8slease.New(http.DefaultClient, "http://"+s.Addr, "default")
	for i := range 5 { // so that the new server needs more writes to get as far
		await.Value(store.Put(ctx, fmt.Sprint("before-", i), nil, ""))
	}
	old := backend.Claim{Key: "again", Token: "old", TTL: time.Hour, Timeout: time.Minute}
	await.Value(d.Acquire(ctx, old))
	lost := versionOf(t, store, "again")

	await.Must(t, s.Stop())
	await.Must(t, s.Start(false))
	other := await.Value(adaptertest.Driver(ctx, at(s.Addr)))
	for i := range lost {
		filler := fmt.Sprint("filler-", i)
		await.Value(store.Put(ctx, filler, nil, ""))
		n := versionOf(t, store, filler)
		if n >= lost {
			t.Fatalf("the new server is at version %d, and the hold was at %d", n, lost)
		}
		if n == lost-1 {
			break
		}
	}
	next := old
	next.Token = "new"
	await.Value(other.Acquire(ctx, next))
	if n := versionOf(t, store, "again"); n != lost {
		t.Fatalf("the new hold is at version %d, and the lost hold was at %d", n, lost)
	}

	d.Renew(ctx, []backend.Claim{old}, func(_ int, _ backend.Grant, err error) {
		if !errors.Is(err, backend.ErrLost) {
			t.Errorf("renewal of the lost hold: %v", err)
		}
	})
	if err := d.Release(ctx, old); !errors.Is(err, backend.ErrLost) {
		t.Errorf("release of the lost hold: %v", err)
	}
	other.Renew(ctx, []backend.Claim{next}, func(_ int, _ backend.Grant, err error) {
		if err != nil {
			t.Errorf("renewal of the new hold: %v", err)
		}
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
