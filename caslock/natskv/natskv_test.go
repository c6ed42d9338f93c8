package natskv_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/natskv"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/crew"
)

// owned is a store whose connection is closed with the driver.
type owned struct {
	*natskv.Store
	nc *nats.Conn
}

func (o owned) Close() error { o.nc.Close(); return nil }

func open(ctx context.Context, addr string, clock bool) (backend.Driver, error) {
	s, err := store(ctx, addr, jetstream.KeyValueConfig{Bucket: "locks"}, clock)
	if err != nil {
		return nil, err
	}
	return caslock.NewDriver(ctx, s, nil)
}

func store(ctx context.Context, addr string, bucket jetstream.KeyValueConfig, clock bool) (o owned, err error) {
	nc, err := nats.Connect("nats://"+addr, nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond),
		nats.ReconnectBufSize(-1), nats.Timeout(3*time.Second), nats.PingInterval(time.Second), nats.MaxPingsOutstanding(1))
	if err != nil {
		return o, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return o, err
	}
	s, err := natskv.New(ctx, js, bucket, clock)
	if err != nil {
		nc.Close()
	}
	return owned{s, nc}, err
}

// node is a server in this process.
type node struct {
	dir, addr string
	s         *server.Server
	options   server.Options // of a cluster
}

func (n *node) start() (err error) {
	if n.addr == "" {
		if n.addr, err = crew.FreeAddr(); err != nil {
			return err
		}
	}
	var port int
	if _, err = fmt.Sscanf(n.addr, "127.0.0.1:%d", &port); err != nil {
		return err
	}
	o := n.options
	o.Host, o.Port, o.JetStream, o.StoreDir, o.NoLog, o.NoSigs = "127.0.0.1", port, true, n.dir, true, true
	n.s, err = server.NewServer(&o)
	if err != nil {
		return err
	}
	n.s.Start()
	if !n.s.ReadyForConnections(time.Minute) {
		return errors.New("the server does not start")
	}
	return nil
}

func (n *node) stop() { n.s.Shutdown(); n.s.WaitForShutdown() }

// onTerms has the clauses that a clock of the store may change.
var onTerms = regexp.MustCompile("^(takes|acquire|expiry|deadline|process|wait-d|keep|fence-g|list-held|history)")

func TestConformance(t *testing.T) {
	for _, clock := range []bool{false, true} {
		t.Run("clock="+strconv.FormatBool(clock), func(t *testing.T) {
			t.Parallel()
			n := &node{}
			conformance.Run(t, conformance.Harness{
				Store: func(context.Context) (string, func(), error) {
					n.dir = t.TempDir()
					err := n.start()
					return n.addr, n.stop, err
				},
				Open: func(ctx context.Context, addr string) (backend.Driver, error) { return open(ctx, addr, clock) },
				Only: func(clause string) bool { return !clock || onTerms.MatchString(clause) },
				Link: func(_ context.Context, addr string) (*conformance.Link, error) { return conformance.TCP(addr) },
				Stop: func(context.Context, string) error { n.stop(); return nil },
				Start: func(_ context.Context, _ string, data bool) error {
					if !data {
						if err := os.RemoveAll(filepath.Join(n.dir, "jetstream")); err != nil {
							return err
						}
					}
					return n.start()
				},
				Kick: func(context.Context, string) error {
					conns, err := n.s.Connz(&server.ConnzOptions{Limit: 1000})
					if err != nil {
						return err
					}
					for _, c := range conns.Conns {
						_ = n.s.DisconnectClientByID(c.Cid) // an error says that it has gone meanwhile
					}
					return nil
				},
			})
		})
	}
}

// On three servers, each of several Puts at one version succeeds or gets ErrConflict.
func TestCluster(t *testing.T) {
	t.Parallel()
	var routes []*url.URL
	for range 3 {
		routes = append(routes, &url.URL{Scheme: "nats-route", Host: await.Value(crew.FreeAddr())})
	}
	var n *node
	for _, r := range routes {
		port := await.Value(strconv.Atoi(r.Port()))
		n = &node{dir: t.TempDir(), options: server.Options{ServerName: r.Host, Routes: routes,
			Cluster: server.ClusterOpts{Name: "cluster", Host: r.Hostname(), Port: port}}}
		await.Must(t, n.start())
		t.Cleanup(n.stop)
	}
	var s owned
	await.Success(t, "New", func() (err error) {
		s, err = store(t.Context(), n.addr, jetstream.KeyValueConfig{Bucket: "locks", Replicas: 3}, false)
		return err
	})
	defer s.Close()
	for range 100 {
		e, _ := s.Get(t.Context(), "key") // an error means an election
		var writers sync.WaitGroup
		for range 4 {
			writers.Go(func() {
				_, err := s.Put(t.Context(), "key", nil, e.Version)
				if err != nil && !errors.Is(err, caslock.ErrConflict) && strings.Contains(err.Error(), "wrong last sequence") {
					t.Errorf("Put: %v, want ErrConflict", err)
				}
			})
		}
		writers.Wait()
	}

	direct := await.Value(s.nc.SubscribeSync("$JS.API.DIRECT.GET.>"))
	_, _ = s.Get(t.Context(), "key")
	await.Must(t, s.nc.Flush())
	if n, _, _ := direct.Pending(); n > 0 {
		t.Error("Get asks any replica, also one that lags")
	}
}

func ExampleNew() {
	ctx := context.Background()
	var js jetstream.JetStream // its connection has MaxReconnects(-1) and ReconnectBufSize(-1)
	store, err := natskv.New(ctx, js, jetstream.KeyValueConfig{Bucket: "locks", Replicas: 3}, false)
	if err != nil {
		panic(err)
	}
	locks, err := caslock.New(ctx, store, nil)
	if err != nil {
		panic(err)
	}
	defer locks.Close()
}
