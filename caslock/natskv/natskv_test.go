package natskv_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/natskv"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/crew"
)

// owned is a store whose connection is closed with the driver.
type owned struct {
	*natskv.Store
	nc *nats.Conn
}

func (o owned) Close() error { o.nc.Close(); return nil }

func open(ctx context.Context, addr string, clock bool) (backend.Driver, error) {
	nc, err := nats.Connect("nats://"+addr, nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond),
		nats.ReconnectBufSize(-1), nats.Timeout(3*time.Second), nats.PingInterval(time.Second), nats.MaxPingsOutstanding(1))
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	s, err := natskv.New(ctx, js, jetstream.KeyValueConfig{Bucket: "locks"}, clock)
	if err != nil {
		nc.Close()
		return nil, err
	}
	return caslock.NewDriver(ctx, owned{s, nc}, nil)
}

// node is a server in this process.
type node struct {
	dir, addr string
	s         *server.Server
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
	n.s, err = server.NewServer(&server.Options{Host: "127.0.0.1", Port: port, JetStream: true, StoreDir: n.dir, NoLog: true, NoSigs: true})
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
