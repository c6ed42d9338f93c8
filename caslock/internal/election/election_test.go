//go:build unix

package election

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
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
	"github.com/hasplock/hasp/caslock/internal/adaptertest"
	_ "github.com/hasplock/hasp/caslock/k8slease"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/kubetest"
)

const (
	lease = "controller" // the Lease that both want
	term  = 2 * time.Second
)

// world is an API server, and how many hold the Lease at the moment.
type world struct {
	t      *testing.T
	server *kubetest.Server
	url    string // of the strategy kube
	inside atomic.Int32
}

func newWorld(t *testing.T) *world {
	s := kubetest.Start(t)
	return &world{t: t, server: s, url: s.URL(s.Host, "default", s.TokenFile)}
}

// enter checks that no other holds the Lease.
func (w *world) enter(name string) (leave func()) {
	if n := w.inside.Add(1); n != 1 {
		w.t.Errorf("%s holds the Lease, and so do %d others", name, n-1)
	}
	return func() { w.inside.Add(-1) }
}

// newLocks returns a Client of hasp.
func newLocks(url string) (*hasp.Client, error) {
	return hasp.Open(context.Background(), url, &hasp.Options{TTL: term, Owner: "worker"})
}

// locks returns a Client that is closed at the end of the test.
func (w *world) locks() *hasp.Client {
	c, err := newLocks(w.url)
	await.Must(w.t, err)
	w.t.Cleanup(func() { c.Close() })
	return c
}

// leads runs an election of client-go until ctx ends, and then releases the Lease or dies. It calls
// lead while it leads, and returns when client-go has returned.
func (w *world) leads(ctx context.Context, name string, release bool, lead func(ctx context.Context)) {
	c := await.Value(hasp.ParseURL(w.url))
	host, _, _ := strings.Cut(c.Nodes[0], "/")
	client := await.Value(coordination.NewForConfig(&rest.Config{
		Host:            "https://" + host,
		BearerTokenFile: c.Params["token_file"],
		TLSClientConfig: rest.TLSClientConfig{CAFile: c.Params["ca"]},
	}))
	e := await.Value(leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{LeaseMeta: metav1.ObjectMeta{Name: lease, Namespace: "default"}, Client: client,
			LockConfig: resourcelock.ResourceLockConfig{Identity: name}},
		LeaseDuration: term, RenewDeadline: term * 3 / 4, RetryPeriod: term / 20, ReleaseOnCancel: release,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: lead,
			OnStoppedLeading: func() {},
		},
	}))
	e.Run(ctx)
}

// A leader of client-go keeps hasp out as long as it renews. A term after its death, hasp gets the
// key. TestProcesses has leaders that release.
func TestLeaderOfClientGo(t *testing.T) {
	w := newWorld(t)
	ctx, stop := context.WithCancel(t.Context())
	leading, ended := make(chan struct{}), make(chan time.Time, 1)
	go w.leads(ctx, "elector", false, func(ctx context.Context) {
		leave := w.enter("client-go")
		close(leading)
		<-ctx.Done()
		leave()
		ended <- time.Now()
	})
	<-leading

	c := w.locks()
	var held *hasp.HeldError
	_, err := c.Lock(t.Context(), lease, hasp.WithMaxWait(2*term))
	if !errors.As(err, &held) || held.Owner != "elector" {
		t.Errorf("Lock for two terms beside a leader that renews: %v, want that elector holds it", err)
	}
	stop()
	l, err := c.Lock(t.Context(), lease)
	await.Must(t, err)
	defer w.enter("hasp")()
	if took := time.Since(<-ended); took < term/2 {
		t.Errorf("the key of a leader that died was taken %v after its end", took)
	}
	await.Must(t, l.Unlock(t.Context()))
}

// A holder of hasp keeps client-go out as long as it renews. A term after the holder was cut off,
// client-go leads. TestProcesses has holders that release.
func TestHolderOfHasp(t *testing.T) {
	w := newWorld(t)
	l := await.Value(w.locks().Lock(t.Context(), lease))
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

	// The holder's lease ends before client-go leads.
	w.server.Stop()
	<-l.Context().Done()
	leave()
	await.Must(t, w.server.Start(t.Context(), true))
	await.Return(t, "the election", func() { <-leading })
}

// client-go cuts times to whole seconds. It sees a renewal in the second of the grant nevertheless.
func TestARenewalInTheSecondOfTheGrant(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	d := await.Value(adaptertest.Driver(ctx, w.url))
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

// turn is when a process had the Lease, in nanoseconds since 1970.
type turn struct {
	process    *process
	start, end int64
}

// process is a process that takes the Lease again and again, and tells of each turn.
type process struct {
	*crew.Process
	kind string
	void [2]int64 // a pause and the term after it: what began then proves nothing
}

// contend is the role of such a process.
func contend(args []string) error {
	kind, w, parent := args[0], &world{url: args[1]}, crew.Parent()
	work := func(valid func() bool) {
		start := time.Now().UnixNano()
		if !valid() {
			return // the process has stood still since it got the Lease
		}
		time.Sleep(rand.N(50 * time.Millisecond))
		parent.Send([]int64{start, time.Now().UnixNano()})
	}
	c, err := newLocks(args[1])
	for err == nil {
		if kind == "hasp" {
			err = hasp.Do(context.Background(), c, lease, func(ctx context.Context, l *hasp.Lease) error {
				work(func() bool { return l.Err() == nil })
				return nil
			})
			if errors.Is(err, hasp.ErrLost) {
				err = nil // by a pause
			}
		} else {
			ctx, end := context.WithCancel(context.Background())
			w.leads(ctx, fmt.Sprint("elector", os.Getpid()), true, func(ctx context.Context) {
				work(func() bool { return ctx.Err() == nil })
				end()
			})
			end()
		}
		time.Sleep(rand.N(200 * time.Millisecond))
	}
	return err
}

func TestMain(m *testing.M) {
	crew.Main(crew.Roles{"contend": contend})
	os.Exit(m.Run())
}

// Two clusters of processes take turns on one Lease, while some of them are stopped and killed.
func TestProcesses(t *testing.T) {
	w := newWorld(t)
	var mu sync.Mutex // guards turns
	var turns []turn
	start := func(kind string) *process {
		child := await.Value(crew.Start("contend", kind, w.url))
		p := &process{Process: child, kind: kind}
		go func() {
			for of := [2]int64{}; p.Receive(&of) == nil; {
				mu.Lock()
				turns = append(turns, turn{p, of[0], of[1]})
				mu.Unlock()
			}
			p.Wait()
		}()
		t.Cleanup(func() { p.Kill() })
		return p
	}
	all := []*process{start("client-go"), start("hasp"), start("client-go"), start("hasp")}
	turnsOfBoth := func() {
		since := time.Now().UnixNano()
		await.Until(t, "two turns of each kind", func() bool {
			mu.Lock()
			defer mu.Unlock()
			n := map[string]int{}
			for _, of := range turns {
				if of.start > since {
					n[of.process.kind]++
				}
			}
			return n["hasp"] >= 2 && n["client-go"] >= 2
		})
	}
	turnsOfBoth()
	for i := range 8 {
		p := all[i%4]
		if i < 4 {
			await.Must(t, p.Pause())
			mu.Lock()
			p.void[0] = time.Now().UnixNano()
			mu.Unlock()
			turnsOfBoth()
			await.Must(t, p.Resume())
			mu.Lock()
			p.void[1] = time.Now().Add(term).UnixNano()
			mu.Unlock()
		} else {
			await.Must(t, p.Kill())
			all[i%4] = start(p.kind)
		}
		turnsOfBoth()
	}

	mu.Lock()
	defer mu.Unlock()
	slices.SortFunc(turns, func(a, b turn) int { return cmp.Compare(a.start, b.start) })
	var last turn
	for _, of := range turns {
		v := of.process.void
		switch {
		case of.start >= v[0] && of.start < v[1]:
			continue
		case of.start < v[0] && of.end > v[0], of.end-of.start > int64(term)/2:
			of.end = of.start // it was stopped, or stood still, during its turn
		}
		if of.start < last.end {
			t.Errorf("%s has the Lease %v before the end of a turn of %s", of.process.kind, time.Duration(last.end-of.start), last.process.kind)
		}
		last = of
	}
	t.Logf("%d turns", len(turns))
}
