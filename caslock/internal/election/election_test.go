package election

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/fakekube"
	"github.com/hasplock/hasp/caslock/k8slease"
	"github.com/hasplock/hasp/internal/await"
)

const (
	lease = "controller" // the Lease that both want
	term  = 2 * time.Second
)

// world is a fake API server, and how many hold the Lease at the moment.
type world struct {
	t      *testing.T
	server *fakekube.Server
	inside atomic.Int32
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, server: &fakekube.Server{}}
	await.Must(t, w.server.Start(true))
	t.Cleanup(func() { w.server.Stop() })
	return w
}

// enter checks that no other holds the Lease.
func (w *world) enter(name string) (leave func()) {
	if n := w.inside.Add(1); n != 1 {
		w.t.Errorf("%s holds the Lease, and so do %d others", name, n-1)
	}
	return func() { w.inside.Add(-1) }
}

func newStore(addr string) *k8slease.Store {
	return k8slease.New(&http.Client{Transport: &http.Transport{}}, "http://"+addr, "default")
}

// locks returns a Client that is closed at the end of the test.
func (w *world) locks() *hasp.Client {
	o := &hasp.Options{TTL: term, Owner: "worker"}
	c := await.Value(caslock.New(context.Background(), newStore(w.server.Addr), o))
	w.t.Cleanup(func() { c.Close() })
	return c
}

// leads runs an election of client-go until ctx ends, and then releases the Lease or dies. It calls
// lead while it leads, and returns when client-go has returned.
func (w *world) leads(ctx context.Context, name string, release bool, lead func(ctx context.Context)) {
	client, err := coordination.NewForConfig(&rest.Config{Host: "http://" + w.server.Addr,
		ContentConfig: rest.ContentConfig{ContentType: "application/json", AcceptContentTypes: "application/json"}})
	if err != nil {
		w.t.Error(err)
		return
	}
	e, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{LeaseMeta: metav1.ObjectMeta{Name: lease, Namespace: "default"}, Client: client,
			LockConfig: resourcelock.ResourceLockConfig{Identity: name}},
		LeaseDuration: term, RenewDeadline: term * 3 / 4, RetryPeriod: term / 20, ReleaseOnCancel: release,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: lead,
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		w.t.Error(err)
		return
	}
	e.Run(ctx)
}

// A leader of client-go keeps hasp out as long as it renews. After its release, or a term after its
// death, hasp gets the key.
func TestLeaderOfClientGo(t *testing.T) {
	for _, release := range []bool{true, false} {
		t.Run(fmt.Sprint("release=", release), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ctx, stop := context.WithCancel(t.Context())
			leading, ended := make(chan struct{}), make(chan time.Time, 1)
			go w.leads(ctx, "elector", release, func(ctx context.Context) {
				leave := w.enter("client-go")
				close(leading)
				<-ctx.Done()
				leave()
				ended <- time.Now()
			})
			<-leading
			c := w.locks()
			var held *hasp.HeldError
			_, err := c.TryLock(t.Context(), lease)
			if !errors.As(err, &held) || held.Owner != "elector" {
				t.Errorf("TryLock beside a leader: %v, want that elector holds it", err)
			}
			if _, err := c.Lock(t.Context(), lease, hasp.WithMaxWait(2*term)); !errors.Is(err, hasp.ErrHeld) {
				t.Errorf("Lock for two terms beside a leader that renews: %v", err)
			}
			stop()
			l, err := c.Lock(t.Context(), lease)
			await.Must(t, err)
			defer w.enter("hasp")()
			if took := time.Since(<-ended); !release && took < term/2 {
				t.Errorf("the key of a leader that died was taken %v after its end", took)
			}
			await.Must(t, l.Unlock(t.Context()))
		})
	}
}

// A holder of hasp keeps client-go out as long as it renews. After its release, or a term after its
// death, client-go leads.
func TestHolderOfHasp(t *testing.T) {
	for _, release := range []bool{true, false} {
		t.Run(fmt.Sprint("release=", release), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			l, err := w.locks().Lock(t.Context(), lease)
			await.Must(t, err)
			leave := w.enter("hasp")
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			leading := make(chan struct{})
			go w.leads(ctx, "elector", true, func(context.Context) {
				defer w.enter("client-go")()
				close(leading)
			})
			select {
			case <-leading:
				t.Error("client-go leads beside a holder")
			case <-time.After(2 * term):
			}
			await.Must(t, l.Err())
			if release {
				leave()
				await.Must(t, l.Unlock(t.Context()))
			} else {
				// The holder loses the store, as one that is cut off. Its lease ends before client-go
				// leads.
				await.Must(t, w.server.Stop())
				<-l.Context().Done()
				leave()
				await.Must(t, w.server.Start(true))
			}
			await.Return(t, "the election", func() { <-leading })
		})
	}
}

// client-go cuts times to whole seconds. It sees a renewal in the second of the grant nevertheless.
func TestARenewalInTheSecondOfTheGrant(t *testing.T) {
	t.Parallel()
	w, ctx := newWorld(t), t.Context()
	d := await.Value(caslock.NewDriver(ctx, newStore(w.server.Addr)))
	time.Sleep(time.Until(time.Now().Truncate(time.Second).Add(time.Second)))
	c := backend.Claim{Key: lease, Token: "token", TTL: term + 900*time.Millisecond, Timeout: term}
	await.Value(d.Acquire(ctx, c))
	led := make(chan time.Time, 1)
	go w.leads(ctx, "elector", true, func(context.Context) { led <- time.Now() })
	time.Sleep(800 * time.Millisecond) // the elector sees the grant
	var until time.Time
	d.Renew(ctx, []backend.Claim{c}, func(_ int, g backend.Grant, _ error) { until = g.Until })
	await.Return(t, "the election", func() {
		if early := until.Sub(<-led); early > 0 {
			t.Errorf("client-go leads %v before the end of the hold", early)
		}
	})
}
