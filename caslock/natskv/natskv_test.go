package natskv_test

import (
	"cmp"
	"context"
	"errors"
	"regexp"
	"strconv"
	"strings"
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
	nc, err := nats.Connect("nats://"+addr, nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond),
		nats.ReconnectBufSize(-1), nats.Timeout(3*time.Second), nats.PingInterval(time.Second), nats.MaxPingsOutstanding(1))
	if err != nil {
		return nil, err
	}
	s, err := natskv.New(ctx, await.Value(jetstream.New(nc)), jetstream.KeyValueConfig{Bucket: "locks"}, clock)
	if err != nil {
		nc.Close()
		return nil, err
	}
	return caslock.NewDriver(ctx, owned{s, nc})
}

// node is a server in this process.
type node struct {
	dir, addr string
	may       *server.Permissions // of all clients; nil means everything
	s         *server.Server
}

func (n *node) start() (err error) {
	n.addr = cmp.Or(n.addr, await.Value(crew.FreeAddr()))
	o := &server.Options{Host: "127.0.0.1", JetStream: true, StoreDir: n.dir, NoLog: true, NoSigs: true,
		Users: []*server.User{{Username: "any", Permissions: n.may}}, NoAuthUser: "any"}
	o.Port = await.Value(strconv.Atoi(strings.TrimPrefix(n.addr, "127.0.0.1:")))
	if n.s, err = server.NewServer(o); err != nil {
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
						n.dir = t.TempDir()
					}
					return n.start()
				},
				Kick: func(context.Context, string) error {
					for _, c := range await.Value(n.s.Connz(&server.ConnzOptions{Limit: 1000})).Conns {
						_ = n.s.DisconnectClientByID(c.Cid) // an error says that it has gone meanwhile
					}
					return nil
				},
			})
		})
	}
}

// What the suite does not find out on one server.
func TestStore(t *testing.T) {
	t.Parallel()
	deaf := &server.Permissions{Subscribe: &server.SubjectPermission{Deny: []string{"_INBOX.*"}}} // which is for messages, not for answers
	n := &node{dir: t.TempDir(), may: deaf}
	await.Must(t, n.start())
	t.Cleanup(n.stop)
	ctx, nc := t.Context(), await.Value(nats.Connect(n.addr))
	defer nc.Close()
	js := await.Value(jetstream.New(nc))
	s := await.Value(natskv.New(ctx, js, jetstream.KeyValueConfig{Bucket: "locks"}, false))

	// A bucket whose values end by themselves cannot keep holds.
	short := jetstream.KeyValueConfig{Bucket: "short", TTL: time.Minute}
	if _, err := natskv.New(ctx, js, short, false); !errors.Is(err, backend.ErrInvalid) {
		t.Errorf("a bucket with a TTL: %v", err)
	}
	await.Value(js.CreateKeyValue(ctx, short)) // New has not created it
	if _, err := natskv.New(ctx, js, jetstream.KeyValueConfig{Bucket: "short"}, false); !errors.Is(err, backend.ErrInvalid) {
		t.Errorf("a bucket of the server with a TTL: %v", err)
	}

	// A Scan whose messages do not come is not the end of the list.
	one := await.Value(s.Put(ctx, "key", []byte("1"), ""))
	within, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if es, next, err := s.Scan(within, "", 10); err == nil {
		t.Errorf("Scan without messages: %v, %q", es, next)
	}

	// A Delete keeps a newer version. Otherwise it leaves nothing behind.
	two := await.Value(s.Put(ctx, "key", []byte("2"), one))
	if err := s.Delete(ctx, "key", one); !errors.Is(err, caslock.ErrConflict) {
		t.Errorf("Delete of an old version: %v, want ErrConflict", err)
	}
	e, err := s.Get(ctx, "key")
	await.Must(t, errors.Join(err, s.Delete(ctx, "key", two)))
	if left := await.Value(js.Stream(ctx, "KV_locks")).CachedInfo().State.Msgs; e.Version != two || left > 0 {
		t.Errorf("Get: version %s, want %s; Delete has left %d messages", e.Version, two, left)
	}

	// A direct get would be answered by any replica, also by one that lags.
	direct := await.Value(nc.SubscribeSync("$JS.API.DIRECT.GET.>"))
	await.Value(s.Get(ctx, "key"))
	await.Must(t, nc.Flush())
	if n, _, _ := direct.Pending(); n > 0 {
		t.Error("Get has made a direct get")
	}
	await.Must(t, direct.Unsubscribe())

	// A bucket on several servers has an error of its own while another write of the key is in flight.
	await.Must(t, js.DeleteKeyValue(ctx, "locks"))
	await.Value(nc.Subscribe("$KV.>", func(m *nats.Msg) {
		m.Respond([]byte(`{"error": {"code": 400, "err_code": 10164, "description": "wrong last sequence"}}`))
	}))
	for _, at := range []string{"", one} {
		if _, err := s.Put(ctx, "key", nil, at); !errors.Is(err, caslock.ErrConflict) {
			t.Errorf("Put at version %q during another: %v, want ErrConflict", at, err)
		}
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
