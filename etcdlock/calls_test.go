package etcdlock_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/etcdlock"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/etcdtest"
)

// patience is for an event that must happen. A slow machine may take long for it.
const patience = time.Minute

func open(ctx context.Context, hosts string) (backend.Driver, error) {
	return hasp.Config{Strategy: "etcdlock", Nodes: []string{"etcd://" + hosts}, Params: map[string]string{"timeout": "20s"}}.Driver(ctx)
}

func openDriver(tb testing.TB, hosts string) *etcdlock.Driver {
	tb.Helper()
	d := await.Value(open(tb.Context(), hosts))
	tb.Cleanup(func() { d.Close() })
	return d.(*etcdlock.Driver)
}

var serial atomic.Int64

// long is a term that no test outlasts.
const long = 5 * time.Minute

// renewable returns a claim for a long hold that will be renewed.
func renewable(key string) backend.Claim {
	c := claimFor(key, long)
	c.Renewed = true
	return c
}

// claimFor returns a claim with a token of its own.
func claimFor(key string, ttl time.Duration) backend.Claim {
	n := serial.Add(1)
	return backend.Claim{Key: key, Token: fmt.Sprintf("token-%d", n), Owner: fmt.Sprintf("owner %d", n), TTL: ttl, Timeout: 3 * time.Second, Fenced: true}
}

// brief returns a context with the usual timeout.
func brief() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), 20*time.Second)
}

func inspect(d backend.Inspector, key string) (backend.Status, error) {
	ctx, cancel := brief()
	defer cancel()
	return d.Inspect(ctx, key)
}

func acquire(d backend.Driver, c backend.Claim) (backend.Grant, error) {
	ctx, cancel := brief()
	defer cancel()
	return d.Acquire(ctx, c)
}

func renew(d backend.Driver, c backend.Claim) error {
	ctx, cancel := brief()
	defer cancel()
	return renewWithin(ctx, d, c)
}

func release(d backend.Driver, c backend.Claim) error {
	ctx, cancel := brief()
	defer cancel()
	return d.Release(ctx, c)
}

func renewWithin(ctx context.Context, d backend.Driver, c backend.Claim) error {
	err, answered := renewAll(ctx, d, []backend.Claim{c})[0]
	if !answered {
		return errors.New("no answer")
	}
	return err
}

// renewAll returns the answers to the renewals of cs.
func renewAll(ctx context.Context, d backend.Driver, cs []backend.Claim) map[int]error {
	answers := map[int]error{}
	d.Renew(ctx, cs, func(i int, _ backend.Grant, err error) { answers[i] = err })
	return answers
}

var eventually = await.Success

// take acquires a key that is free.
func take(tb testing.TB, d backend.Driver, key string, ttl time.Duration) backend.Claim {
	tb.Helper()
	c := claimFor(key, ttl)
	g, err := acquire(d, c)
	if err != nil {
		tb.Fatalf("acquire %q: %v", key, err)
	}
	c.Handle = g.Handle
	return c
}

// free releases a key, or stops the test.
func free(tb testing.TB, d backend.Driver, c backend.Claim) {
	tb.Helper()
	if err := release(d, c); err != nil {
		tb.Fatalf("release %.80q: %v", c.Key, err)
	}
}

// isFree waits until d can take a key.
func isFree(tb testing.TB, d backend.Driver, key string) {
	tb.Helper()
	eventually(tb, "a lock of "+key, func() error {
		c := claimFor(key, time.Minute)
		_, err := acquire(d, c)
		if err == nil {
			err = release(d, c)
		}
		return err
	})
}

// linkTo returns a link that ends with the test.
func linkTo(tb testing.TB, at string) *conformance.Link {
	tb.Helper()
	l := await.Value(conformance.TCP(at))
	tb.Cleanup(l.Close)
	return l
}

// waiting is a Wait that goes on over outages, as the engine does it.
type waiting chan backend.Claim

func wants(tb testing.TB, d backend.Waiter, key string) waiting {
	return wantsAs(tb, d, claimFor(key, time.Minute))
}

func wantsAs(tb testing.TB, d backend.Waiter, c backend.Claim) waiting {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	tb.Cleanup(cancel)
	w := make(waiting, 1)
	go func() {
		for ctx.Err() == nil {
			g, err := d.Wait(ctx, c)
			if err == nil {
				c.Handle = g.Handle
				w <- c
				return
			}
			_ = release(d, c)
			c.Token = claimFor(c.Key, c.TTL).Token
		}
	}()
	return w
}

func (w waiting) granted(tb testing.TB) backend.Claim {
	tb.Helper()
	select {
	case c := <-w:
		return c
	case <-time.After(patience):
		tb.Fatal("the waiter does not get the key")
		panic("unreachable")
	}
}

// lineUp lets d wait for the key of c, which h holds.
func lineUp(tb testing.TB, h, d *etcdlock.Driver, c backend.Claim) (held backend.Claim, w waiting) {
	tb.Helper()
	held = take(tb, h, c.Key, long)
	w = wantsAs(tb, d, c)
	queued(tb, h, c.Key, 1)
	return held, w
}

// handOver lets d wait for a key that h holds, and then get it. meanwhile is called while d waits.
func handOver(tb testing.TB, h, d *etcdlock.Driver, meanwhile func(held backend.Claim)) {
	tb.Helper()
	c, w := lineUp(tb, h, d, claimFor("key", time.Minute))
	meanwhile(c)
	free(tb, h, c)
	free(tb, d, w.granted(tb))
}

// queued waits until n callers wait for key.
func queued(tb testing.TB, d backend.Inspector, key string, n int) {
	tb.Helper()
	eventually(tb, "the waiters in the queue", func() error {
		st, err := inspect(d, key)
		if err == nil && len(st.Waiters) < n {
			err = fmt.Errorf("waiters %q", st.Waiters)
		}
		return err
	})
}

// server is one etcd process.
type server = etcdtest.Server

var (
	newServers   = etcdtest.New   // members of one cluster, which do not run yet
	startServers = etcdtest.Start // a cluster that ends with the test
)

// startOne starts an etcd of one member that ends with the test, and returns its address.
func startOne(t testing.TB) (addr string) {
	t.Helper()
	return startServers(t, 1)[0].Client
}

// twoDrivers opens two drivers of one etcd.
func twoDrivers(t testing.TB) (a, b *etcdlock.Driver) {
	t.Helper()
	at := startOne(t)
	return openDriver(t, at), openDriver(t, at)
}

// start starts a server, and waits until it answers.
func start(ctx context.Context, s *server) error {
	if err := s.Start(); err != nil {
		return err
	}
	return s.Healthy(ctx)
}

func leaderOf(tb testing.TB, servers []*server) (leader *server) {
	tb.Helper()
	eventually(tb, "a leader", func() error {
		for _, leader = range servers {
			if leader.IsLeader() {
				return nil
			}
		}
		return errors.New("no leader")
	})
	return leader
}

// pause stops the process, which keeps its connections.
func pause(tb testing.TB, s *server) (resume func()) {
	tb.Helper()
	await.Must(tb, s.Pause())
	return func() { await.Must(tb, s.Resume()) }
}

// metric returns the sum of the metrics whose lines begin with a pattern.
func metric(tb testing.TB, s *server, pattern string) float64 {
	tb.Helper()
	return await.Value(sum(s, pattern))
}

func sum(s *server, pattern string) (sum float64, err error) {
	ctx, cancel := brief()
	defer cancel()
	text, err := s.Metrics(ctx)
	for _, m := range regexp.MustCompile(`(?m)^`+pattern+` (\S+)$`).FindAllStringSubmatch(text, -1) {
		x, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			return 0, err
		}
		sum += x
	}
	return sum, err
}

// hosts returns the addresses of servers, as in a URL.
func hosts(servers []*server) string {
	var all []string
	for _, s := range servers {
		all = append(all, s.Client)
	}
	return strings.Join(all, ",")
}

// newClient returns a plain client of etcd.
func newClient(hosts string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: strings.Split(hosts, ","), Logger: zap.NewNop()})
}

// plainClient returns a plain client of etcd, which ends with the test.
func plainClient(tb testing.TB, hosts string) *clientv3.Client {
	tb.Helper()
	c := await.Value(newClient(hosts))
	tb.Cleanup(func() { c.Close() })
	return c
}
