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
	s := fakekube.New()
	start := func(_ context.Context, data bool) (string, error) {
		err := s.Start(data)
		return s.Addr, err
	}
	conformance.Run(t, adaptertest.Harness(start, s.Stop, at))
}

// A holder that was suspended until client-go had taken the Lease leaves the leader its Lease.
func TestALateRenewalLeavesTheLeaderItsLease(t *testing.T) {
	s, ctx := fakekube.Serve(t), t.Context()
	d := await.Value(adaptertest.Driver(ctx, at(s.Addr)))
	c := backend.Claim{Key: "controller", Token: "token", TTL: time.Minute, Timeout: time.Minute}
	await.Value(d.Acquire(ctx, c))
	url := "http://" + s.Addr + "/apis/coordination.k8s.io/v1/namespaces/default/leases/controller"
	spec := `{"holderIdentity":"leader","leaseDurationSeconds":15,"leaseTransitions":7,"renewTime":"2026-01-01T00:00:00.000000Z"}`
	write := func(spec string) {
		r := await.Value(http.NewRequest(http.MethodPatch, url, strings.NewReader(`{"spec":`+spec+`}`)))
		await.Value(http.DefaultClient.Do(r)).Body.Close()
	}
	write(spec)

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

	// The hold in the annotation is not there again when the leader leaves.
	write(`{"holderIdentity":""}`)
	await.Value(d.Acquire(ctx, c))
}

// The server begins its resourceVersions again after a loss of its data, and then a Lease may have
// the resourceVersion of a lost one, but not its uid.
func TestUID(t *testing.T) {
	s := fakekube.Serve(t)
	checkUID(t, k8slease.New(http.DefaultClient, "http://"+s.Addr, "default"))
}

// checkUID checks that a Put and a Delete leave a Lease alone that has the resourceVersion, but not
// the uid.
func checkUID(t *testing.T, store *k8slease.Store) {
	ctx := t.Context()
	version := await.Value(store.Put(ctx, "key", []byte("{}"), ""))
	_, number, _ := strings.Cut(version, "/")
	other := "00000000-0000-0000-0000-000000000000/" + number

	await.ErrorIs(t, "Put of another uid",
		await.ErrorOf(store.Put(ctx, "key", []byte("{}"), other)), caslock.ErrConflict)
	await.ErrorIs(t, "Delete of another uid", store.Delete(ctx, "key", other), caslock.ErrConflict)
	await.Must(t, store.Delete(ctx, "key", version))
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
