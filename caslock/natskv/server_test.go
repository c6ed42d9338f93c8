package natskv_test

import (
	"cmp"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/crew"
)

// node is a server in this process.
type node struct {
	dir, addr string
	configure func(o *server.Options) // may be nil
	s         *server.Server
}

func (n *node) start() (err error) {
	n.addr = cmp.Or(n.addr, await.Value(crew.FreeAddr()))
	o := &server.Options{
		Host:      "127.0.0.1",
		Port:      port(n.addr),
		JetStream: true,
		StoreDir:  n.dir,
		NoLog:     true,
		NoSigs:    true,
	}
	if n.configure != nil {
		n.configure(o)
	}
	if n.s, err = server.NewServer(o); err != nil {
		return err
	}
	n.s.Start()
	if !n.s.ReadyForConnections(time.Minute) {
		return errors.New("the server does not start")
	}
	return nil
}

func (n *node) stop() {
	n.s.Shutdown()
	n.s.WaitForShutdown()
}

// connect returns a connection that ends with the test.
func (n *node) connect(t *testing.T, o ...nats.Option) (*nats.Conn, jetstream.JetStream) {
	o = append(o, nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	nc := await.Value(nats.Connect(n.addr, o...))
	t.Cleanup(nc.Close)
	return nc, await.Value(jetstream.New(nc))
}

func port(addr string) int {
	return await.Value(strconv.Atoi(strings.TrimPrefix(addr, "127.0.0.1:")))
}

// startNode starts a server, which ends with the test.
func startNode(t *testing.T, configure func(o *server.Options)) *node {
	t.Helper()
	n := &node{dir: t.TempDir(), configure: configure}
	await.Must(t, n.start())
	t.Cleanup(func() { n.stop() })
	return n
}

// startCluster starts three servers, and returns them when a bucket can be created. A client does
// not learn their addresses from them.
func startCluster(t *testing.T) (all []*node) {
	t.Helper()
	var routes []*url.URL
	for range 3 {
		routes = append(routes, &url.URL{Scheme: "nats", Host: await.Value(crew.FreeAddr())})
	}
	for i := range routes {
		all = append(all, startNode(t, func(o *server.Options) {
			o.ServerName = fmt.Sprint("n", i)
			o.Routes = routes
			o.Cluster = server.ClusterOpts{
				Name:        "hasp",
				Host:        "127.0.0.1",
				Port:        port(routes[i].Host),
				NoAdvertise: true,
			}
		}))
	}

	// A new leader refuses a bucket as long as it has not heard from all servers.
	_, js := all[0].connect(t)
	await.Success(t, "a bucket with three replicas", func() error {
		_, err := js.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "locks", Replicas: 3})
		return err
	})
	return all
}
